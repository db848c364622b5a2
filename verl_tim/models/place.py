"""Which part of a model one rank of an engine holds: some layers (pipeline), of each some output columns (tensor)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_tim.numerics.shards import ONE, Shards

if TYPE_CHECKING:
    from verl_tim.models.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """One rank's place. Stages run one after another, each with its own run of layers; the first embeds, the last has
    the final norm and the head. The ranks of a stage share every weight's outputs (`shards`)."""

    shards: Shards = ONE
    stage: int = 0
    stages: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, num_layers: int) -> range:
        """This stage's layers; the earlier stages take one more where they do not come out even, since the last one
        has the head."""
        share, more = divmod(num_layers, self.stages)
        first = self.stage * share + min(self.stage, more)
        return range(first, first + share + (self.stage < more))


WHOLE = Place()
"""The only rank: all of the model."""


def misfits(config: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> list[tuple[str, str]]:
    """Why a model cannot be split so: (key, reason with the remedy); empty where it can."""
    found = []
    sizes = [
        ("num_key_value_heads", config.num_kv_heads),
        ("num_attention_heads", config.num_heads),
        ("hidden_size", config.hidden_size),
    ]
    if any(not config.is_moe_layer(index) for index in range(config.num_layers)):
        sizes.append(("intermediate_size", config.intermediate_size))
    if config.moe is not None and config.moe.layers:
        sizes.append(("moe_intermediate_size", config.moe.intermediate_size))
    odd = [f"{name}={size}" for name, size in sizes if size % tensor_parallel]
    if odd:
        degrees = [n for n in range(1, tensor_parallel) if not any(size % n for _, size in sizes)]
        found.append(
            (
                "tensor_parallel_size",
                f"{tensor_parallel} does not divide the model's {', '.join(odd)}: choose {degrees[-1]} or less, or "
                "pipeline_parallel_size",
            )
        )
    if pipeline_parallel > config.num_layers:
        found.append(
            (
                "pipeline_parallel_size",
                f"{pipeline_parallel} stages for {config.num_layers} layers: choose {config.num_layers} or less",
            )
        )
    return found
