"""New weights from the trainer to the rollouts, between two steps.

Every rank gathers every tensor whole, in the master's dtype (verl 0.9.1, fsdp/transformer_impl.py:1028), casts it and
copies it into a bucket; the server beside it copies it out into its own layout (rollout/shared_buckets.py). Over device
memory a parameter so moves written and read in 4 bytes, written and read in 2 for the cast, and again for the bucket,
and written once more: 18 bytes. The gather costs the network the whole model in 4 bytes, on every rank and whatever
their number; and every tensor costs launches, of which a model with experts has one per expert and matrix. A rank of
a replica of several sees every tensor, too, and keeps its part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_tim.planning.network import Network
from verl_tim.planning.rates import Speeds, rate
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape


@dataclass(frozen=True)
class SyncTime:
    """Seconds of one weight sync: copies over device memory, gathers over the network, the host's part."""

    copies: float
    network: float
    host: float

    @property
    def seconds(self) -> float:
        return self.copies + self.network + self.host


def sync_time(shape: Shape, settings: Settings, speeds: Speeds) -> SyncTime:
    """Of one step."""
    s = settings
    moved = 2 * s.master_bytes + 5 * s.rollout_bytes
    copies = moved * shape.parameters / speeds.bandwidth
    # fused experts are gathered as two tensors a layer
    gathers = (shape.config.num_layers - shape.sparse_layers) * 11 + shape.sparse_layers * 12 + 3
    network = Network(speeds, s.gpus_per_node).ring_seconds(
        float(s.master_bytes * shape.parameters), s.shards, calls=gathers
    )
    buckets = math.ceil(s.rollout_bytes * shape.parameters / s.bucket_bytes)
    host = shape.tensors * rate("sync_per_tensor").value + buckets * rate("sync_per_bucket").value
    if s.param_offload or s.offload_policy:
        host += s.master_bytes * shape.parameters / s.shards / rate("host_link").value
    return SyncTime(copies, network, host)
