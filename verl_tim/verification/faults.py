"""Errors planted on purpose, to prove that the gate catches and names them.

Each is a mistake that real systems have made (a stock kernel left in, the temperature forgotten, a weight update that
never arrived) or the smallest difference there is (one ulp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl_tim.engine.engine import Engine
from verl_tim.models import contract_layer
from verl_tim.models.engine_model import EngineModel
from verl_tim.models.stock_layer import sdpa_paged
from verl_tim.numerics import Sampled, SamplingTensors, log_probs_of


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def one_ulp() -> Iterator[None]:
    """The third sampling step of the process records its first log-prob one ulp too high."""
    calls = 0

    def make(original: Callable[..., Sampled]) -> Callable[..., Sampled]:
        def sample(self: EngineModel, logits_BV: Tensor, params: SamplingTensors) -> Sampled:
            nonlocal calls
            sampled = original(self, logits_BV, params)
            calls += 1
            if calls == 3:
                sampled.log_prob_B[0] = torch.nextafter(sampled.log_prob_B[0], torch.tensor(1.0))
            return sampled

        return sample

    with _patched(EngineModel, "sample", make):
        yield


@contextmanager
def stock_kernel() -> Iterator[None]:
    """The engine's attention is PyTorch's SDPA instead of the contract's."""
    with _patched(contract_layer, "paged_attention", lambda _original: sdpa_paged):
        yield


@contextmanager
def wrong_temperature() -> Iterator[None]:
    """The engine draws at the request's temperature but records the log-prob at temperature 1."""

    def make(original: Callable[..., Sampled]) -> Callable[..., Sampled]:
        def sample(self: EngineModel, logits_BV: Tensor, params: SamplingTensors) -> Sampled:
            sampled = original(self, logits_BV, params)
            sampled.log_prob_B, _ = log_probs_of(logits_BV, sampled.token_B, torch.ones_like(params.temperature_B))
            return sampled

        return sample

    with _patched(EngineModel, "sample", make):
        yield


@contextmanager
def skipped_update() -> Iterator[None]:
    """The engine's weight version moves on, its weights do not."""

    def make(_original: Callable[..., Any]) -> Callable[..., Any]:
        def update_weights(self: Engine, weights: Any, version: int, **_: Any) -> list[Any]:
            for _tensor in weights:
                pass
            self._weight_version = version
            self._stats.weight_updates += 1
            return []

        return update_weights

    with _patched(Engine, "update_weights", make):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "one_ulp": one_ulp,
    "stock_kernel": stock_kernel,
    "wrong_temperature": wrong_temperature,
    "skipped_update": skipped_update,
}
