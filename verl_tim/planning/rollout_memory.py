"""What a rollout rank holds: weights, KV pool, a step's activations, decode graphs.

The engine measures its weights, a full eager step and its graphs at the start and gives the rest of its share to the
pool, at most `max_num_seqs` sequences of `max_model_len` (engine/memory.py, engine/engine.py:_pages_of). Here the same
sum is made from sizes that are computed. A tensor-parallel rank holds 1/t of every weight's outputs and of the KV heads
(and the whole of norms and router, which is neglected), a pipeline stage its layers; embedding and head are on the
first and the last stage, one of which counts. vLLM divides its share in the same way and gives the pool all of the
rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_tim.engine.graphs import bucket_sizes
from verl_tim.planning.item import Item
from verl_tim.planning.rates import rate
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape
from verl_tim.units import size

_RESERVE = 256 << 20  # engine/memory.py
_GRAPH_LAYERS = 28  # of the model that `decode_graph` speaks of


@dataclass(frozen=True)
class RolloutMemory:
    """One rank of a replica on a GPU of `total` bytes."""

    shape: Shape
    settings: Settings
    total: int

    @property
    def _layers(self) -> int:
        """Of the fullest stage."""
        return math.ceil(self.shape.config.num_layers / self.settings.pipeline_parallel)

    @property
    def weights(self) -> float:
        shape, s = self.shape, self.settings
        sizes = [shape.layer_parameters(index) for index in range(shape.config.num_layers)]
        fullest = sum(sorted(sizes)[-self._layers :])
        outer = shape.embedding_parameters
        if s.pipeline_parallel == 1:
            outer += shape.head_parameters
        return s.rollout_bytes * (fullest + outer) / s.tensor_parallel

    @property
    def activations(self) -> float:
        """Of a full step: `max_num_batched_tokens` rows through a layer, and logits of one row per sequence."""
        shape, s = self.shape, self.settings
        rows = s.max_batched_tokens * shape.inference_elements * s.rollout_bytes
        return float(rows + 4 * s.max_sequences * min(shape.config.vocab_size, 1 << 17))

    @property
    def graphs(self) -> float:
        s = self.settings
        if not s.graphs:
            return 0.0
        count = len(bucket_sizes(s.max_sequences, 1))
        return count * rate("decode_graph").value * self._layers / _GRAPH_LAYERS

    @property
    def token_bytes(self) -> float:
        """Keys and values of one token on this rank."""
        s = self.settings
        heads = self.shape.kv_bytes * s.rollout_bytes / 2 / s.tensor_parallel
        return heads * self._layers / self.shape.config.num_layers

    @property
    def pool(self) -> float:
        """Bytes of the KV pool; negative where the share does not even hold the rest."""
        s = self.settings
        if s.kv_tokens is not None:
            return s.kv_tokens * self.token_bytes
        if s.kv_bytes is not None:
            return float(s.kv_bytes)
        if s.engine == "vllm":
            return self.room
        useful = s.max_sequences * math.ceil(s.max_model_length / s.page_size) * s.page_size
        return min(self.room, useful * self.token_bytes)

    @property
    def room(self) -> float:
        """Bytes that there are for the pool where the config does not say its size."""
        return self.total * self.settings.utilization - self.weights - self.activations - self.graphs - _RESERVE

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool of a replica holds, in whole pages."""
        page = self.settings.page_size
        return max(0, int(self.pool / self.token_bytes) // page * page)

    def awake(self) -> tuple[Item, ...]:
        """All that it holds while it generates."""
        return (
            *self.at_work(),
            Item("decode graphs", self.graphs, "recorded sizes up to max_num_seqs", assumed=True),
            Item("rollout's reserve", float(_RESERVE), "engine/memory.py"),
        )

    def at_work(self) -> tuple[Item, ...]:
        """What generating takes on any device."""
        s = self.settings
        pool = max(0.0, self.pool)
        return (
            self.weights_item(),
            Item("KV pool", pool, f"{self.pool_tokens:,} tokens x {size(self.token_bytes)}"),
            Item("rollout's step", self.activations, f"{s.max_batched_tokens:,} rows, {s.max_sequences} sequences"),
        )

    def weights_item(self) -> Item:
        s = self.settings
        split = f"tensor {s.tensor_parallel} x pipeline {s.pipeline_parallel}"
        return Item("rollout weights", self.weights, f"{s.rollout_bytes} B per parameter, {split}")
