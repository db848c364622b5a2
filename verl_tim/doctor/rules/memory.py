"""Trainer and rollout on one GPU: does it hold both? Estimates from the number of parameters, without activations."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ACTOR, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.finding import Finding
from verl_tim.units import size

RULES = Rules()
rule = RULES.rule

_ENGINE = f"{ACTOR}.fsdp_config"


def _trainer_bytes(view: View) -> tuple[float, float]:
    """(parameters, AdamW's two moments) of the actor on one rank; gradients are as large as the parameters."""
    size = view.whole(f"{_ENGINE}.fsdp_size", -1)
    shards = view.ranks if size <= 0 else min(size, view.ranks)
    width = 4 if str(view.get(f"{_ENGINE}.model_dtype", "fp32")) in ("fp32", "float32") else 2
    parameters = (view.parameters or 0) * width / max(1, shards)
    return parameters, 2 * parameters


def _rollout_bytes(view: View, memory: int) -> float:
    """What the rollout holds while it generates."""
    if not view.rollout_is_ours:
        return view.number(f"{ROLLOUT}.gpu_memory_utilization", 0.5) * memory
    weights = (view.parameters or 0) * (4 if view.rollout_dtype == "float32" else 2)
    pool = view.engine_option("kv_cache_bytes")[1]
    # without it the pool is a share of what is free, which always fits
    return weights + (float(pool) if isinstance(pool, (int, float)) else 0)


def _offloads(view: View) -> bool:
    return bool(view.get(f"{_ENGINE}.offload_policy", False))


@rule(
    "stops.memory-while-generating",
    Severity.STOPS,
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{_ENGINE}.param_offload",
    f"{_ENGINE}.optimizer_offload",
    "engine_kwargs.vexact.kv_cache_bytes",
    remedy=f"lower it, or set {_ENGINE}.optimizer_offload=true and {_ENGINE}.param_offload=true",
    needs_machine=True,
)
def while_generating(view: View) -> Iterator[Finding]:
    """The rollout takes its share of the GPU while the trainer's parameters and optimiser states stay there, unless
    they are offloaded. vLLM refuses to start, or the KV pool cannot be made.
    """
    gpu = view.gpu
    if gpu is None or view.parameters is None or not view.on_fsdp:
        return
    parameters, moments = _trainer_bytes(view)
    stays = 0.0 if _offloads(view) or view.get(f"{_ENGINE}.param_offload", False) else parameters
    stays += 0.0 if _offloads(view) or view.get(f"{_ENGINE}.optimizer_offload", False) else moments
    rollout = _rollout_bytes(view, gpu.memory)
    if stays + rollout > gpu.memory:
        key = view.engine_option("kv_cache_bytes")[0] if view.rollout_is_ours else f"{ROLLOUT}.gpu_memory_utilization"
        yield found(
            key,
            f"the rollout takes {size(rollout)} and the trainer keeps {size(stays)} of {size(gpu.memory)} ({gpu.name})",
        )


@rule(
    "stops.memory-while-training",
    Severity.STOPS,
    "trainer.n_gpus_per_node",
    f"{_ENGINE}.offload_policy",
    f"{ROLLOUT}.free_cache_engine",
    remedy=f"more GPUs, {_ENGINE}.offload_policy=true, or {ROLLOUT}.free_cache_engine=true",
    needs_machine=True,
)
def while_training(view: View) -> Iterator[Finding]:
    """Parameters, gradients and AdamW's moments are on the GPU together in the update (16 bytes per parameter over the
    ranks), and so is the rollout if it does not free its memory.
    """
    gpu = view.gpu
    if gpu is None or view.parameters is None or not view.on_fsdp or _offloads(view):
        return
    parameters, moments = _trainer_bytes(view)
    needed = 2 * parameters + moments
    rollout = 0.0 if view.get(f"{ROLLOUT}.free_cache_engine", True) else _rollout_bytes(view, gpu.memory)
    if needed + rollout > gpu.memory:
        key = f"{ROLLOUT}.free_cache_engine" if needed <= gpu.memory else "trainer.n_gpus_per_node"
        held = f" beside {size(rollout)} of the rollout" if rollout else ""
        yield found(
            key, f"the update needs {size(needed)} on each GPU{held}, which has {size(gpu.memory)} ({gpu.name})"
        )


@rule(
    "waste.cache-not-freed",
    Severity.WASTE,
    f"{ROLLOUT}.free_cache_engine",
    remedy=f"set {ROLLOUT}.free_cache_engine=true",
)
def cache_not_freed(view: View) -> Iterator[Finding]:
    """The rollout's weights and KV cache stay on the GPU while the trainer works there, so micro-batches must be
    smaller.
    """
    colocated = view.synchronous and not view.on_cpu
    if colocated and not view.get(f"{ROLLOUT}.free_cache_engine", True):
        yield found(f"{ROLLOUT}.free_cache_engine", "it is false")
