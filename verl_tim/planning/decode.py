"""One decode step of a replica.

    seconds = (touched weights / (t) + KV of all contexts / (t p)) / bandwidth + excess + gathers of t ranks

with t tensor-parallel ranks, which share every weight and the KV heads, and p pipeline stages. A pipeline has p
disjoint groups of sequences under way (one per stage), so that in the time in which every sequence draws once each
stage runs p times, on n / p sequences each: weights are read p times by 1/p of the layers, KV once by all stages
together. Tensor parallelism gathers what the next product needs four times a layer (columns only, so that bits do not
change).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.planning.network import Network
from verl_tim.planning.rates import Speeds, rate
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape

_GATHERS = 4  # per layer: attention's output, o, gated product, down (or the experts' sum)
_ENGINE_RATES = {"vexact": "vexact", "stock": "vexact", "vllm": "vllm"}


@dataclass(frozen=True)
class Decode:
    """Decode steps of one run's replicas."""

    shape: Shape
    settings: Settings
    speeds: Speeds

    def floor_seconds(self, sequences: float, context: float) -> float:
        """What reading alone takes: `context` is the sum over all sequences."""
        s = self.settings
        weights = s.rollout_bytes * self.shape.touched_parameters(sequences / s.pipeline_parallel)
        kv = context * self.shape.kv_bytes * s.rollout_bytes / 2
        return (weights + kv / s.pipeline_parallel) / s.tensor_parallel / self.speeds.bandwidth

    def excess_seconds(self, sequences: float) -> float:
        """What a step takes beyond reading; it does not depend on the context."""
        s, c = self.settings, self.shape.config
        group = max(1.0, sequences / s.pipeline_parallel)
        seconds = self.speeds.decode_excess(_ENGINE_RATES[s.engine], self.shape, group)
        if s.tensor_parallel > 1:
            inner = c.moe.top_k * c.moe.intermediate_size if c.moe else c.intermediate_size
            width = 2 * c.hidden_size + c.num_heads * c.head_dim + inner
            network = Network(self.speeds, s.gpus_per_node)
            seconds += network.ring_seconds(2.0 * group * width * c.num_layers, s.tensor_parallel, calls=0)
            seconds += _GATHERS * c.num_layers * rate("decode_gather").value
        return seconds

    def seconds(self, sequences: float, context: float) -> float:
        """A whole step, every sequence drawing one token."""
        return self.floor_seconds(sequences, context) + self.excess_seconds(sequences)
