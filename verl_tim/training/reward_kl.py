"""The KL penalty in the reward where a log-prob is missing.

verl takes it from `old_log_probs` (ray_trainer.py:100), under bypass the rollout's. One that is NaN or infinite would
make its token's reward NaN, at a masked position too (NaN * 0), and with it every advantage of its group, or of the
batch where advantages are whitened. A missing log-prob says nothing of the distance to the reference, so it adds
nothing to the penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_MISSING_IS_NEUTRAL: ContextVar[bool] = ContextVar("verl_tim_missing_is_neutral", default=False)


@contextmanager
def missing_is_neutral() -> Iterator[None]:
    """Within it, `penalise` leaves missing log-probs out; our trainers enter it, other runs keep verl's arithmetic."""
    token = _MISSING_IS_NEUTRAL.set(True)
    try:
        yield
    finally:
        _MISSING_IS_NEUTRAL.reset(token)


def penalise(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Call verl's `apply_kl_penalty(data, ...)`; it sees the reference's log-probs where the old ones are not finite.

    Args:
        original: verl's function; returns what it returns.
        data: verl's `DataProto` with `old_log_probs` and `ref_log_prob`, both (B, T); its old log-probs are as before
            afterwards, since losses and metrics tell missing tokens by them.
    """
    if not _MISSING_IS_NEUTRAL.get():
        return original(data, *args, **kwargs)
    old_BT = data.batch["old_log_probs"]
    data.batch["old_log_probs"] = finite_or_reference(old_BT, data.batch["ref_log_prob"])
    try:
        return original(data, *args, **kwargs)
    finally:
        data.batch["old_log_probs"] = old_BT


def finite_or_reference(old_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """(B, T) old log-probs, the reference's where they are NaN or infinite; in the wider dtype, so their gap is 0."""
    return torch.where(old_BT.isfinite(), old_BT, reference_BT)
