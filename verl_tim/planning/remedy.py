"""What makes a run fit that does not: overrides, each tried by planning the run again with it.

A remedy is never a rule of thumb. Candidates are tried one by one, the mildest value that fits of each; where no single
one suffices, they are added up in the order of what they cost, and those that turn out not to be needed are taken out
again. What is returned has been planned, and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tim.launch.errors import LaunchError
from verl_tim.planning.gpu import Gpu
from verl_tim.planning.plan import Memory, memory_of
from verl_tim.planning.settings import ACTOR, FSDP, LIMIT, LOG_PROB_LIMIT, MODEL, ROLLOUT, plain
from verl_tim.planning.shape import Shape

_STEP = 1024  # tokens
_SHARE = f"{ROLLOUT}.gpu_memory_utilization"
_MOST_GPUS = 1024
_MORE = "more GPUs"


@dataclass(frozen=True)
class Remedy:
    """Overrides with which the run fits.

    Attributes:
        overrides: key to value.
        cost: what is paid for it.
    """

    overrides: Mapping[str, Any]
    cost: str

    @property
    def words(self) -> list[str]:
        """As they are typed."""
        return [f"{key}={_word(value)}" for key, value in self.overrides.items()]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_word(entry)}" for key, entry in value.items()) + "}"
    return str(value)


@dataclass(frozen=True)
class _Candidate:
    """One key with values from mild to harsh."""

    key: str
    values: tuple[Any, ...]
    cost: str


def remedies(resolved: DictConfig | Mapping[str, Any], shape: Shape, gpu: Gpu) -> list[Remedy]:
    """Every single override with which the run fits; where there is none, up to two sets of several: on as many GPUs
    as now, and on more. Empty where nothing helps. `resolved` is left as it was.
    """
    config = plain(resolved)
    memory = memory_of(config, shape, gpu)
    if memory.fits:
        return []
    singles = []
    for candidate in _candidates(memory):
        for value in candidate.values:
            if _fits(config, shape, gpu, {candidate.key: value}):
                singles.append(Remedy({candidate.key: value}, candidate.cost))
                break
    if singles:
        return singles
    sets = [_together(config, shape, gpu, {}, lambda key: not key.startswith("trainer.n"))]
    for nodes in _more_nodes(memory):
        sets.append(_together(config, shape, gpu, {"trainer.nnodes": nodes}, _neither_gpus_nor_host))
        if sets[-1] is not None:
            break
    return [remedy for remedy in sets if remedy is not None]


def _neither_gpus_nor_host(key: str) -> bool:
    return not key.startswith("trainer.n") and "offload" not in key


def _candidates(memory: Memory) -> list[_Candidate]:
    """What may help the phases that do not fit, from what costs least."""
    s = memory.settings
    phases = {misfit.phase for misfit in memory.misfits}
    found: list[_Candidate] = []

    def add(condition: bool, key: str, values: tuple[Any, ...], cost: str) -> None:
        if condition and values:
            found.append(_Candidate(key, values, cost))

    training = bool(phases & {"log-probs", "update"})
    add(not s.frees and bool(phases - {"rollout"}), f"{ROLLOUT}.free_cache_engine", (True,), "waking up in every step")
    add("rollout" in phases, _SHARE, _shares(memory), "another number of sequences at once")
    add("update" in phases, LIMIT, _limits(s.update_tokens, s.longest), "more and smaller micro-batches")
    add("log-probs" in phases, LOG_PROB_LIMIT, _limits(s.log_prob_tokens, s.longest), "more and smaller micro-batches")
    add(
        "update" in phases and s.foreach_adam,
        f"{ACTOR}.optim.override_optimizer_config",
        ({"fused": True},),
        "nothing: AdamW without its temporary, and faster",
    )
    add(
        "update" in phases and not s.checkpointing,
        f"{MODEL}.enable_gradient_checkpointing",
        (True,),
        "a third more arithmetic in the update",
    )
    buckets = tuple(size for size in (1024, 512, 256) if size << 20 < s.bucket_bytes)
    key = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    add("weight sync" in phases, key, buckets, "more calls per weight sync")
    rows = tuple(size for size in (8192, 4096, 2048) if size < s.max_batched_tokens)
    add("rollout" in phases, f"{ROLLOUT}.max_num_batched_tokens", rows, "prefill in smaller steps")
    apart = bool(phases - {"update"})
    add(
        apart and not (s.optimizer_offload or s.offload_policy),
        f"{FSDP}.optimizer_offload",
        (True,),
        "the moments cross the host link twice per update",
    )
    add(
        apart and not (s.param_offload or s.offload_policy),
        f"{FSDP}.param_offload",
        (True,),
        "the parameters cross the host link for every pass",
    )
    degrees = tuple(degree for degree in (2, 4, 8) if degree > s.tensor_parallel)
    sharing = bool(phases & {"rollout", "weight sync"})
    add(sharing, f"{ROLLOUT}.tensor_model_parallel_size", degrees, "gathers in every layer of a decode step")
    degrees = tuple(degree for degree in (2, 4, 8) if degree > s.pipeline_parallel)
    add(sharing, f"{ROLLOUT}.pipeline_model_parallel_size", degrees, "weights are read once per stage's group")
    add(
        "update" in phases and not s.activation_offload,
        f"{MODEL}.enable_activation_offload",
        (True,),
        "activations cross the host link",
    )
    if s.gpus_per_node < 8:
        sizes = tuple(size for size in (2, 4, 8) if size > s.gpus_per_node)
        add(True, "trainer.n_gpus_per_node", sizes, _MORE)
    add(True, "trainer.nnodes", _more_nodes(memory), _MORE)
    add(
        (training or apart) and not s.offload_policy,
        f"{FSDP}.offload_policy",
        (True,),
        "AdamW on the host, and weights and gradients over the host link in every micro-batch",
    )
    return found


def _more_nodes(memory: Memory) -> tuple[int, ...]:
    s = memory.settings
    return tuple(s.nodes << power for power in range(1, 11) if (s.nodes << power) * s.gpus_per_node <= _MOST_GPUS)


def _limits(limit: int | None, longest: int) -> tuple[int, ...]:
    """Smaller limits of a micro-batch, down to the longest sequence, which verl asks for."""
    if limit is None:
        return ()
    least = -(-longest // _STEP) * _STEP
    size = (limit - 1) // _STEP * _STEP
    found = []
    while size > least:
        found.append(size)
        size = max(least, min(size - _STEP, size * 7 // 8 // _STEP * _STEP))
    return (*found, least) if least < limit else tuple(found)


def _shares(memory: Memory) -> tuple[float, ...]:
    """Other shares of the GPU: larger ones where the pool is too small, smaller ones where all is too much."""
    now = round(memory.settings.utilization * 100)
    small = memory.rollout.pool_tokens < memory.settings.max_model_length
    wanted = range(now + 1, 96) if small else range(now - 1, 4, -1)
    return tuple(share / 100 for share in wanted)


def _together(
    config: Mapping[str, Any], shape: Shape, gpu: Gpu, start: Mapping[str, Any], allowed: Callable[[str], bool]
) -> Remedy | None:
    """Overrides added to `start` until the run fits, then those taken out again that it fits without."""
    taken = dict(start)
    costs = dict.fromkeys(start, _MORE)
    tried: set[str] = set()
    while (missing := _missing(config, shape, gpu, taken)) != 0:
        if missing is None:
            return None
        candidates = _candidates(memory_of(_with(config, taken), shape, gpu))
        left = [one for one in candidates if allowed(one.key) and one.key not in tried]
        if not left:
            return None
        candidate = left[0]
        tried.add(candidate.key)
        best = _best(config, shape, gpu, taken, candidate)
        if best is not None:
            taken[candidate.key] = best
            costs[candidate.key] = candidate.cost
            if candidate.key != _SHARE:
                tried.discard(_SHARE)  # another share may be right now
    for key in list(taken):
        rest = {other: value for other, value in taken.items() if other != key}
        if _fits(config, shape, gpu, rest):
            taken = rest
    return Remedy(taken, "; ".join(dict.fromkeys(costs[key] for key in taken)))


def _best(config: Mapping[str, Any], shape: Shape, gpu: Gpu, taken: Mapping[str, Any], candidate: _Candidate) -> Any:
    """The value that leaves least missing; None if none leaves less than now."""
    least, best = _missing(config, shape, gpu, taken), None
    for value in candidate.values:
        missing = _missing(config, shape, gpu, {**taken, candidate.key: value})
        if missing is not None and least is not None and missing < least:
            least, best = missing, value
            if missing == 0:
                break
    return best


def _missing(config: Mapping[str, Any], shape: Shape, gpu: Gpu, overrides: Mapping[str, Any]) -> float | None:
    """Bytes that are missing over all phases; None where the config is refused."""
    try:
        memory = memory_of(_with(config, overrides), shape, gpu)
    except LaunchError:
        return None
    over = sum(max(0.0, phase.total - gpu.memory) for phase in memory.phases)
    rollout = memory.rollout
    return over + max(0, memory.settings.max_model_length - rollout.pool_tokens) * rollout.token_bytes


def _fits(config: Mapping[str, Any], shape: Shape, gpu: Gpu, overrides: Mapping[str, Any]) -> bool:
    return _missing(config, shape, gpu, overrides) == 0


def _with(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with other values; what is not on the way to them is shared."""
    for key, value in overrides.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(config: Mapping[str, Any], names: Sequence[str], value: Any) -> Mapping[str, Any]:
    first, *rest = names
    return {**config, first: _replaced(config[first], rest, value) if rest else value}
