"""Start-up checks of verl's asynchronous V1 trainers (`trainer.v1.trainer_mode`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from verl_tim.training.finding import Finding

MODE_KEY = "trainer.v1.trainer_mode"
MODES = ("sync", "colocate_async", "separate_async")
LAG_KEY = "tim.partial_rollout.max_version_lag"
GLOO_MODULE = "verl_tim.rollout.gloo_checkpoint_engine"

_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
_Get = Callable[..., Any]


def trainer_mode(get: _Get) -> str:
    """The V1 trainer's mode; "sync" for the legacy trainer, which is nothing else."""
    return str(get(MODE_KEY, "sync")) if get("trainer.use_v1", True) else "sync"


def standalone_ranks(get: _Get) -> int:
    """Rollout servers with GPUs of their own, beside those of the trainer."""
    if trainer_mode(get) != "separate_async":
        return 0
    return int(get("actor_rollout_ref.rollout.nnodes", 0)) * int(get("actor_rollout_ref.rollout.n_gpus_per_node", 0))


def asynchronous_findings(get: _Get, *, cpu_only: bool, ours: bool) -> Iterator[Finding]:
    """Settings that an asynchronous trainer cannot run with, and those that only it has a use for.

    Args:
        get: (key, default) -> value.
        cpu_only: the run has no accelerator.
        ours: the rollout is one of this package's.
    """
    mode = trainer_mode(get)
    if mode not in MODES:
        yield Finding(MODE_KEY, f"verl has no trainer {mode}", f"Choose one of {', '.join(MODES)}")
        return
    if mode == "sync":
        if get(LAG_KEY) is not None:
            yield Finding(
                LAG_KEY,
                "it has no effect: the synchronous trainer draws every token under its own weights",
                f"Set it to null, or {MODE_KEY} to colocate_async or separate_async",
            )
        return
    if mode == "separate_async":
        yield from _weight_transfer(get, cpu_only=cpu_only, ours=ours)
        yield from _batches(get)


def _weight_transfer(get: _Get, *, cpu_only: bool, ours: bool) -> Iterator[Finding]:
    """New weights travel between processes that share no GPU."""
    backend, module = str(get(f"{_ENGINE}.backend", "naive")), get(f"{_ENGINE}.custom_backend_module")
    gloo = f"{_ENGINE}.backend=gloo {_ENGINE}.custom_backend_module={GLOO_MODULE}"
    if backend == "naive":
        yield Finding(
            f"{_ENGINE}.backend",
            "it is naive, which hands weights over inside one process, and separate_async has the rollout elsewhere",
            f"Set {gloo}" if cpu_only else "Set it to nccl",
        )
    elif backend == "gloo" and module != GLOO_MODULE:
        yield Finding(
            f"{_ENGINE}.custom_backend_module", "verl has no backend gloo, and this module brings one",
            f"Set it to {GLOO_MODULE}",
        )  # fmt: skip
    elif backend == "delta_sharded" and ours:
        yield Finding(
            f"{_ENGINE}.backend", "it is delta_sharded, and this rollout takes full tensors only", "Set it to nccl"
        )
    elif cpu_only and backend != "gloo" and module is None:
        yield Finding(f"{_ENGINE}.backend", f"{backend} needs an accelerator", f"Set {gloo}")
    elif backend == "nccl" and module is None and importlib.util.find_spec("cupy") is None:
        yield Finding(
            f"{_ENGINE}.backend",
            "it is nccl, which is verl's and works on cupy, and cupy is not installed here",
            f"pip install cupy-cuda13x (cupy-cuda12x for CUDA 12), or send weights by way of the host: set {gloo}",
        )


def _batches(get: _Get) -> Iterator[Finding]:
    """Sizes that verl asserts inside the job, and a pass under weights that are gone by then."""
    for name in ("nnodes", "n_gpus_per_node"):
        key = f"actor_rollout_ref.rollout.{name}"
        if int(get(key, 0)) < 1:
            yield Finding(
                key, f"it is {get(key, 0)}, and separate_async draws on GPUs of its own", "Set it to 1 or more"
            )
    parts, batch = int(get(_SYNC_STEP, 1)), int(get("data.train_batch_size", 0))
    mini = int(get("actor_rollout_ref.actor.ppo_mini_batch_size", 0))
    if batch != parts * mini:
        yield Finding(
            "data.train_batch_size",
            f"it is {batch}, and separate_async takes {parts} mini-batches of {mini} between two weight updates "
            f"({_SYNC_STEP}, actor.ppo_mini_batch_size)",
            f"Set it to {parts * mini}",
        )
    old_forward = "algorithm.rollout_correction.old_forward"
    if parts > 1 and get(old_forward, False):
        yield Finding(
            old_forward,
            f"it scores a batch under the weights that the step began with, and {_SYNC_STEP}={parts} has trained on a "
            "part of it by then",
            f"Set it to false, or {_SYNC_STEP} to 1",
        )
