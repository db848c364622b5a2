"""The four phases of a step on a machine without a GPU, and what all processes of the run hold of its memory together.

The trainer's formulas are those of a GPU (`trainer_memory`), every rank of the machine for itself. What differs:

- One memory: what a config offloads stays in it, so nothing is offloaded here.
- No CUDA context, NCCL, decode graphs or device allocator; in their place what Ray's and verl's processes take before
  any of them holds a model, which was measured for one rank.
- The engine's pool is a share (`kv_memory_fraction`) of what is free once trainer and engine hold their weights, at
  most `max_num_seqs` sequences of `max_model_len` (engine/engine.py, _num_pages); of free memory here counts what the
  run itself leaves of the machine. vLLM has what `kv_cache_memory_bytes` says, or else
  `gpu_memory_utilization` of the machine; its build for CPUs has no sleep, so weights and pool stay in all phases.
- Weights go through the host's memory (rollout/weights.py): a bucket exists as the tensors that are collected for it,
  packed, and in Ray's object store, and is never larger than the weights.
- Products are made in float32: of the largest tensor a float32 copy, that padded, and in an update its gradient
  (numerics/head.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_tim.planning.host import Host
from verl_tim.planning.item import Item
from verl_tim.planning.phase import Phase
from verl_tim.planning.phases import accumulates
from verl_tim.planning.rates import rate
from verl_tim.planning.rollout_memory import RolloutMemory
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape
from verl_tim.planning.trainer_memory import TrainerMemory, items_of
from verl_tim.units import count, size

_FP32 = 4


@dataclass(frozen=True)
class HostRollout(RolloutMemory):
    """One rank of a replica on a machine without a GPU.

    Attributes:
        total: bytes of the machine.
        free: bytes that are free when its pool is made.
    """

    free: float = 0.0

    @property
    def room(self) -> float:
        s = self.settings
        share = self.total * s.utilization if s.engine == "vllm" else self.free * s.kv_fraction
        return share / s.replica_gpus

    def awake(self) -> tuple[Item, ...]:
        """All that it holds while it generates: no graphs, and no reserve."""
        return self.at_work()


def on_host(settings: Settings) -> Settings:
    """The settings as they are without a GPU: what would be offloaded stays in the one memory."""
    return replace(
        settings,
        param_offload=False,
        optimizer_offload=False,
        offload_policy=False,
        activation_offload=False,
        graphs=False,
        page_size=settings.cpu_page_size,
        frees=settings.frees and settings.engine != "vllm",
    )


def rollout_on(shape: Shape, settings: Settings, host: Host) -> HostRollout:
    """A rank of the rollout on a machine where the trainer's states are already. `settings`: of `on_host`."""
    ranks = settings.gpus_per_node
    without_pool = HostRollout(shape, settings, host.memory)
    states = sum(item.nbytes for item in _states(TrainerMemory(shape, settings, accumulates=False)))
    held = _processes(settings).nbytes + ranks * (states + without_pool.weights)
    return replace(without_pool, free=max(0.0, host.memory - held))


def host_phases(shape: Shape, settings: Settings, host: Host) -> tuple[Phase, ...]:
    """In the order of a step; of all processes on one machine. `settings`: of `on_host`."""
    s = settings
    rollout = rollout_on(shape, s, host)
    trainer = TrainerMemory(shape, s, accumulates=accumulates(s))
    idle = () if s.frees else rollout.awake()
    states = _states(trainer)
    update_tokens, pass_tokens = s.micro_tokens(update=True), s.micro_tokens(update=False)
    update = max(trainer.update_moments(update_tokens), key=lambda moment: moment.total)
    forward = trainer.pass_moment(pass_tokens)
    copies = _operands(shape, 2)
    awake = (rollout.weights_item(),) if s.frees else rollout.awake()
    return (
        _phase("rollout", "all sequences at work", s, (*states, *rollout.awake(), copies)),
        _phase("log-probs", forward.name, s, (*states, *items_of(forward, pass_tokens), copies, *idle)),
        _phase("update", update.name, s, (*states, *items_of(update, update_tokens), _operands(shape, 3), *idle)),
        _phase("weight sync", "the largest tensor", s, (*states, *_sync_items(shape, s, rollout), *awake)),
    )


def _states(trainer: TrainerMemory) -> tuple[Item, ...]:
    """What a rank of the trainer always holds."""
    states = trainer.resident(update=True, forward=True)
    if not trainer.settings.reference:
        return states
    return (*states, Item("reference model", trainer.parameters, "as large as the master weights"))


def _operands(shape: Shape, copies: int) -> Item:
    tensor = shape.largest_tensor
    why = f"{copies} x {count(tensor)} elements of the largest tensor x {_FP32} B"
    return Item("float32 operands", float(copies * _FP32 * tensor), why)


def _sync_items(shape: Shape, s: Settings, rollout: RolloutMemory) -> tuple[Item, ...]:
    tensor = shape.largest_tensor
    full = tensor * (s.master_bytes + s.rollout_bytes)
    bucket = min(float(s.bucket_bytes), float(shape.parameters * s.rollout_bytes))
    return (
        Item("the largest tensor", full, f"{count(tensor)} elements: gathered, and cast"),
        Item("buckets", 3 * bucket, f"3 x {size(bucket)}: collected, packed, and in Ray's object store"),
    )


def _phase(name: str, moment: str, s: Settings, items: tuple[Item, ...]) -> Phase:
    """Of all ranks of a machine, with the processes themselves."""
    ranks = s.gpus_per_node
    if ranks > 1:
        items = tuple(
            replace(item, nbytes=item.nbytes * ranks, why=f"{ranks} ranks, each: {item.why}") for item in items
        )
    return Phase(name, moment, (*items, _processes(s)))


def _processes(s: Settings) -> Item:
    """All of a machine's, before any holds a model."""
    more = s.gpus_per_node - 1
    why = "Ray, verl and torch of all processes, measured for one rank" + (f", and {more} more" if more else "")
    return Item("processes", rate("cpu_run").value + more * rate("cpu_rank").value, why, assumed=bool(more))
