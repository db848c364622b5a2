"""Start-up checks of counts: batches that ranks share, and rollout replicas that GPUs share.

verl finds most of them inside its workers, minutes after the start, and some not at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl_tim.sequence_parallel import sequence_parallel
from verl_tim.training.finding import Finding

if TYPE_CHECKING:
    from verl_tim.training.start_checks import Cluster, View

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_MINI, _N, _BATCH = f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", "data.train_batch_size"
# A replica's GPUs are the product of these.
_DEGREES = tuple(
    f"{_ROLLOUT}.{name}"
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
)
# What verl 0.9.1 refuses to run in pipeline stages (workers/config/rollout.py, __post_init__).
_NO_STAGES = ("vllm", "sglang", "trtllm")


def batches(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Mini-batches that do not come out even: over the batch, over the ranks, over their micro-batches.

    Yields one finding at most for the batch as a whole, since the others compute with it.
    """
    sizes = {key: view.get(key, default) for key, default in ((_BATCH, 1024), (_MINI, 256), (_N, 1))}
    if not all(_is_count(value) for value in sizes.values()):
        return  # said by the checks of the values
    batch, mini, n = (int(value) for value in sizes.values())
    ranks = view.ranks
    split_key, split = sequence_parallel(view.get)
    if ranks % split:
        yield Finding(
            split_key,
            f"it is {split} and does not divide the {_ranks(view)}",
            "Set it to 1",
        )
        return
    dealt_to = ranks // split
    if batch % mini:
        # verl 0.9.1 repeats sequences to fill the last mini-batch (trainer_base.py:1586): not what was asked for
        yield Finding(_MINI, f"it is {mini} and does not divide {_BATCH}={batch}", f"Take a divisor of {batch}")
        return
    if mini * n % dealt_to:
        # verl 0.9.1, workers/engine_workers.py:267: asserted in the first update
        step = dealt_to // math.gcd(dealt_to, n)
        yield Finding(
            _MINI,
            f"{mini} prompts x {_N}={n} are {mini * n} sequences per optimiser step, which cannot be dealt to the "
            f"{_ranks(view)} evenly",
            f"Take a multiple of {step} that divides {_BATCH}={batch}, or fewer GPUs",
        )
        return
    yield from _micro_batches(view, mini * n // dealt_to, batch * n // dealt_to)
    workers = view.get(f"{_ROLLOUT}.agent.num_workers", 8)
    if not view.get("trainer.use_v1", True) and _is_count(workers) and batch * n % int(workers):
        yield Finding(
            f"{_ROLLOUT}.agent.num_workers",
            f"it is {workers}, and the legacy trainer deals the {batch * n} sequences of a step to them in equal parts",
            f"Take a divisor of {batch * n}, or trainer.use_v1=true",
        )


def _micro_batches(view: View, per_update: int, per_step: int) -> Iterator[Finding]:
    """verl 0.9.1, workers/engine/utils.py:125: asserted by every worker, in its first step."""
    uses_reference = view.get(f"{_ACTOR}.use_kl_loss", False) or view.get("algorithm.use_kl_in_reward", False)
    for key, group, switch, count in (
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _ACTOR, "use_dynamic_bsz", per_update),
        (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", _ROLLOUT, "log_prob_use_dynamic_bsz", per_step),
        (f"{_REF}.log_prob_micro_batch_size_per_gpu", _REF, "log_prob_use_dynamic_bsz", per_step),
    ):
        if view.get(f"{group}.{switch}", False) or (group == _REF and not uses_reference):
            continue
        micro = view.get(key)
        if _is_count(micro) and count % int(micro):
            yield Finding(
                key,
                f"it is {micro} and does not divide the {count} sequences that a rank gets",
                f"Take a divisor of {count}, or {_ACTOR}.use_dynamic_bsz=true",
            )


def replicas(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Rollout replicas and FSDP groups that the GPUs cannot be shared out to: verl starts no replica, or leaves ranks
    waiting for one. (vexact's and stock's replicas have checks of their own.)
    """
    shard = view.get(f"{_ACTOR}.fsdp_config.fsdp_size", -1)
    if isinstance(shard, int) and 0 < shard < view.ranks and view.ranks % shard:
        yield Finding(
            f"{_ACTOR}.fsdp_config.fsdp_size",
            f"it is {shard} and does not divide the {_ranks(view)}",
            f"Take a divisor of {view.ranks}, or -1 for all of them",
        )
    degrees = {key: view.get(key, 1) for key in _DEGREES}
    if view.rollout_is_ours or not all(_is_count(degree) for degree in degrees.values()):
        return
    name = view.get(f"{_ROLLOUT}.name")
    if name in _NO_STAGES and degrees[_DEGREES[1]] > 1:
        yield Finding(
            _DEGREES[1],
            f"it is {degrees[_DEGREES[1]]}, and verl 0.9.1 runs no {name} in pipeline stages",
            f"Set it to 1, and {_DEGREES[0]} instead; rollout=vexact has stages",
        )
        return
    size = math.prod(int(degree) for degree in degrees.values())
    per_node = int(view.get("trainer.n_gpus_per_node", 8))
    whole_nodes = per_node % size == 0 if size <= per_node else size % per_node == 0
    if view.ranks % size or not whole_nodes:
        widest = max(degrees, key=lambda key: degrees[key])
        yield Finding(
            widest,
            f"a replica takes {size} GPUs (tensor x pipeline x data parallel), and there are {view.ranks}, "
            f"{per_node} per node",
            f"Let it divide {per_node}, or be whole nodes",
        )
        return
    yield from _heads(view, int(degrees[_DEGREES[0]]))


def _heads(view: View, tensor: int) -> Iterator[Finding]:
    """Other engines give each rank whole attention heads."""
    from verl_tim.models import ModelError, load_model_config

    try:
        heads = load_model_config(os.path.expanduser(str(view.get("actor_rollout_ref.model.path", "")))).num_heads
    except ModelError:
        return  # a model on the hub, or one that only the other engine knows
    if heads % tensor:
        yield Finding(
            _DEGREES[0], f"it is {tensor} and does not divide the model's {heads} heads", f"Take a divisor of {heads}"
        )


def _ranks(view: View) -> str:
    nodes, each = view.get("trainer.nnodes", 1), view.get("trainer.n_gpus_per_node", 8)
    return f"{view.ranks} ranks (trainer.nnodes={nodes} x trainer.n_gpus_per_node={each})"


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1 and value % 1 == 0
