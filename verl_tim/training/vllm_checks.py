"""Start-up checks of rollout vllm: what its engine would die of, minutes after the start or at the first request.

Seen with vLLM 0.28: model_executor/layers/fused_moe/routed_experts_capturer.py:289 (routes),
model_executor/layers/batch_invariant.py:571 (kernels written in Triton, which has no driver for a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl_tim.training.config import WORKER_ENVIRONMENT
from verl_tim.training.finding import Finding
from verl_tim.training.replay_checks import has_experts

INVARIANT = "VLLM_BATCH_INVARIANT"
INVARIANT_KEY = f"{WORKER_ENVIRONMENT}.{INVARIANT}"
_ROLLOUT = "actor_rollout_ref.rollout"
_RETURNS_KEY = f"{_ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts"
_Get = Callable[..., Any]


def is_batch_invariant(get: _Get) -> bool:
    """Whether the config tells vLLM's workers to take batch-invariant kernels."""
    return _is_on(get(INVARIANT_KEY))


def _is_on(value: Any) -> bool:
    return str(value or "0").strip().lower() not in ("", "0", "false")


def route_findings(get: _Get, *, cpu_only: bool) -> Iterator[Finding]:
    """Routes that are asked of an engine which has none to return, and dies at its start.

    Args:
        get: (key, default) -> value.
        cpu_only: the run has no accelerator.
    """
    if get(f"{_ROLLOUT}.name") != "vllm" or not get(_RETURNS_KEY, False):
        return
    key = "tim.vllm_routes" if get("tim.vllm_routes", False) is True else _RETURNS_KEY
    if has_experts(get) is False:
        yield Finding(
            key,
            f"it is true, and {get('actor_rollout_ref.model.path')} has no experts, so vLLM would have no routes "
            "to return",
            "Set it to false",
        )
    elif cpu_only:
        yield Finding(
            key,
            "it is true, and on a CPU vLLM's kernels for experts give out no routes: its engine would die at its start",
            "Set it to false, or choose rollout=stock, whose routes are recorded",
        )


def invariance_findings(get: _Get, variable: tuple[str, str | None], *, cpu_only: bool) -> Iterator[Finding]:
    """Batch-invariant kernels on a CPU: vLLM starts, and its first request ends in "'function' object is not
    subscriptable".

    Args:
        variable: `INVARIANT` as the workers get it, from the config or from the shell: what sets it, and its value.
    """
    if not cpu_only or get(f"{_ROLLOUT}.name") != "vllm":
        return
    why = "vLLM's batch-invariant kernels need a GPU: on a CPU its engine would die at the first request"
    place, value = variable
    if _is_on(value):
        out = "leave it out (rollout=vllm)" if place == INVARIANT_KEY else "unset it"
        yield Finding(
            place,
            f"it is {value}, and {why}",
            f"Choose rollout=vexact, which is batch-invariant on a CPU, too, or {out}",
        )
    if get(f"{_ROLLOUT}.full_determinism", False):
        yield Finding(
            f"{_ROLLOUT}.full_determinism",
            f"it is true, and {why}",
            "Set it to false, and choose rollout=vexact for a run that repeats itself",
        )
