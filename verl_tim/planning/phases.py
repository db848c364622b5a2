"""The four phases of a step on one GPU that trainer and rollout share, and what each holds at its fullest.

    phase         trainer                                          rollout
    rollout       states that are not offloaded                    weights, KV pool, graphs
    log-probs     master weights, a forward                        asleep
    update        master weights, moments, gradients, backward     asleep
    weight sync   states that are not offloaded, one full tensor   weights, and two buckets; pool still asleep

verl 0.9.1 puts the rollout to sleep after generation and wakes its weights before and its KV pool after the new weights
have come (workers/engine_workers.py:768-823, trainer/ppo/v1/trainer_sync.py:33-42); asleep it holds nothing but its
process, unless `rollout.free_cache_engine` is false: then everything is there in all phases. FSDP2's weights leave as
one full tensor after another in the master's dtype (fsdp/transformer_impl.py:977-1036), are cast to the rollout's dtype
and packed into two buckets of `update_weights_bucket_megabytes` (rollout/shared_buckets.py).
"""

from __future__ import annotations

from verl_tim.planning.gpu import Gpu
from verl_tim.planning.item import Item
from verl_tim.planning.phase import Phase
from verl_tim.planning.rates import rate
from verl_tim.planning.rollout_memory import RolloutMemory
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape
from verl_tim.planning.trainer_memory import TrainerMemory, items_of
from verl_tim.units import count


def phases(shape: Shape, settings: Settings, gpu: Gpu) -> tuple[Phase, ...]:
    """In the order of a step. The reference model's pass is no phase of its own: its weights stay on the host and
    come layer by layer (verl forces CPUOffloadPolicy on it), so that it holds less than the log-probs' pass."""
    s = settings
    rollout = RolloutMemory(shape, s, gpu.memory)
    trainer = TrainerMemory(shape, s, accumulates=accumulates(s))
    idle = () if s.frees else rollout.awake()
    update_tokens, pass_tokens = s.micro_tokens(update=True), s.micro_tokens(update=False)
    update = max(trainer.update_moments(update_tokens), key=lambda moment: moment.total)
    forward = trainer.pass_moment(pass_tokens)
    # wherever nothing of it is on the host, `update=False` is what stays between two updates
    return (
        _phase("rollout", "all sequences at work", (*trainer.resident(update=False, forward=False), *rollout.awake())),
        _phase(
            "log-probs",
            forward.name,
            (*trainer.resident(update=False, forward=True), *items_of(forward, pass_tokens), *idle),
        ),
        _phase(
            "update",
            update.name,
            (*trainer.resident(update=True, forward=True), *items_of(update, update_tokens), *idle),
        ),
        _phase("weight sync", "the largest tensor", _sync_items(shape, s, trainer, rollout)),
    )


def accumulates(s: Settings) -> bool:
    """Whether an optimiser step may take several micro-batches: unless one is known to hold all of the rank's."""
    return s.micro_tokens(update=True) < max(1.0, s.mini_sequences) * s.longest / s.sequence_parallel


def _sync_items(shape: Shape, s: Settings, trainer: TrainerMemory, rollout: RolloutMemory) -> tuple[Item, ...]:
    tensor = shape.largest_tensor
    full = tensor * (s.master_bytes + s.rollout_bytes + s.master_bytes / s.shards)
    awake = (rollout.weights_item(),) if s.frees else rollout.awake()
    return (
        *trainer.resident(update=False, forward=False),
        Item("the largest tensor", full, f"{count(tensor)} elements: gathered, its shard, and cast"),
        Item("buckets", 2.0 * s.bucket_bytes, f"2 x {s.bucket_bytes >> 20} MiB"),
        *awake,
    )


def _phase(name: str, moment: str, items: tuple[Item, ...]) -> Phase:
    """With what every phase has: two processes, and what the trainer's allocator cannot use."""
    trainers = ("master weights", "AdamW moments", "gradients", "activations", "head", "bf16 working copies",
                "gradients being reduced", "AdamW's temporary", "the largest tensor")  # fmt: skip
    held = sum(item.nbytes for item in items if item.name in trainers)
    share = rate("allocator_share").value
    fixed = 2 * rate("context").value + rate("nccl").value
    return Phase(
        name,
        moment,
        (
            *items,
            Item("processes", fixed, "two CUDA contexts, NCCL", assumed=True),
            Item("allocator", share * held, f"{share:.0%} of the trainer's, fragmented", assumed=True),
        ),
    )
