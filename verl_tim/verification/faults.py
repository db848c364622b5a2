"""Errors planted on purpose, to prove that the gate and the ladder catch and name them.

Each is a mistake that real systems have made (a stock kernel left in, the temperature forgotten, a weight update that
never arrived) or the smallest difference there is (one ulp). Those of `RUNG_FAULTS` break one rung of the ladder each
and leave the others intact.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.engine.core import Request
from verl_tim.engine.engine import Engine
from verl_tim.engine.scheduler import Scheduler, root_key
from verl_tim.models import contract_layer
from verl_tim.models.engine_model import EngineModel
from verl_tim.models.stock_layer import sdpa_paged
from verl_tim.numerics import PagedBatch, Sampled, SamplingTensors, log_probs_of
from verl_tim.numerics.linear import PreparedLinear
from verl_tim.numerics.moe import Routes


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
    """The third sampling step of every engine records its first log-prob one ulp too high."""

    def make(original: Callable[..., Sampled]) -> Callable[..., Sampled]:
        calls: WeakKeyDictionary[EngineModel, int] = WeakKeyDictionary()

        def draw(self: EngineModel, hidden_BD: Tensor, params: SamplingTensors) -> Sampled:
            sampled = original(self, hidden_BD, params)
            calls[self] = calls.get(self, 0) + 1
            if calls[self] == 3:
                one = torch.ones_like(sampled.log_prob_B[0])
                sampled.log_prob_B[0] = torch.nextafter(sampled.log_prob_B[0], one)
            return sampled

        return draw

    with _patched(EngineModel, "draw", make):
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
        def draw(self: EngineModel, hidden_BD: Tensor, params: SamplingTensors) -> Sampled:
            sampled = original(self, hidden_BD, params)
            ones = torch.ones_like(params.temperature_B)
            sampled.log_prob_B, _ = log_probs_of(self.logits(hidden_BD), sampled.token_B, ones)
            return sampled

        return draw

    with _patched(EngineModel, "draw", make):
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


@contextmanager
def kept_generator() -> Iterator[None]:
    """A request that comes again is drawn by the random generator where the first time left it, not by its seed."""

    def make(original: Callable[..., Request]) -> Callable[..., Request]:
        seen: WeakKeyDictionary[Engine, Counter[str]] = WeakKeyDictionary()

        def request(self: Engine, request_id: str, *args: Any) -> Request:
            made = original(self, request_id, *args)
            times = seen.setdefault(self, Counter())
            times[request_id] += 1
            return dataclasses.replace(made, seed=made.seed // 2 + times[request_id] - 1)

        return request

    with _patched(Engine, "_request", make):
        yield


@contextmanager
def batch_dependent_kernel() -> Iterator[None]:
    """The engine takes another attention kernel as soon as a step holds more than one sequence."""

    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def paged_attention(q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, attention: str) -> Tensor:
            company = batch.query_start_S1.numel() > 2
            return (sdpa_paged if company else original)(q, k, v, batch, attention)

        return paged_attention

    with _patched(contract_layer, "paged_attention", make):
        yield


@contextmanager
def stock_activation() -> Iterator[None]:
    """The engine's dense MLP keeps SiLU in float32 up to the product, as fused kernels do."""

    def make(_original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gate_up(x_TD: Tensor, both: PreparedLinear) -> Tensor:
            gate_TI, up_TI = both(x_TD).float().chunk(2, dim=-1)
            return (F.silu(gate_TI) * up_TI).to(x_TD.dtype)

        return gate_up

    with _patched(contract_layer, "gate_up_inference", make):
        yield


@contextmanager
def rerouted_recomputation() -> Iterator[None]:
    """Gradient checkpointing routes anew, and sends every token to other experts than the forward did."""

    def make(original: Callable[..., Routes]) -> Callable[..., Routes]:
        def router(x_TD: Tensor, weight_ED: Tensor, *args: Any) -> Routes:
            routes = original(x_TD, weight_ED, *args)
            if torch._C._current_graph_task_id() == -1:  # not inside a backward
                return routes
            return Routes((routes.expert_TK + 1) % weight_ED.shape[0], routes.weight_TK)

        return router

    with _patched(contract_layer, "router", make):
        yield


@contextmanager
def sorted_experts() -> Iterator[None]:
    """The engine sums a token's experts in the order of their ids: the same set, another order."""

    def make(original: Callable[..., Routes]) -> Callable[..., Routes]:
        def router_inference(*args: Any) -> Routes:
            routes = original(*args)
            expert_TK, order_TK = routes.expert_TK.sort(dim=-1)
            return Routes(expert_TK, routes.weight_TK.gather(1, order_TK))

        return router_inference

    with _patched(contract_layer, "router_inference", make):
        yield


@contextmanager
def stale_kv() -> Iterator[None]:
    """After a weight update, running requests go on with the keys and values of the old weights."""

    def make(_original: Callable[..., None]) -> Callable[..., None]:
        def start_version(self: Scheduler, weight_version: int) -> None:
            self._root = root_key(weight_version)

        return start_version

    with _patched(Scheduler, "start_version", make):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "one_ulp": one_ulp,
    "stock_kernel": stock_kernel,
    "wrong_temperature": wrong_temperature,
    "skipped_update": skipped_update,
}

RUNG_FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "kept_generator": kept_generator,
    "batch_dependent_kernel": batch_dependent_kernel,
    "stock_activation": stock_activation,
    "rerouted_recomputation": rerouted_recomputation,
    "sorted_experts": sorted_experts,
    "stale_kv": stale_kv,
}
"""In the order of the ladder's rungs."""
