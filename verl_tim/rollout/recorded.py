"""What a rollout says of a sampled sequence beside tokens and log-probs: the likeliest tokens and the routes.

Too much to keep of every sequence, so the agent loop marks a seeded few of each step (`tim.sample_sequences`) with one
sampling parameter, and the server answers with one extra field, which verl carries to the trainer as it is. Of a
conversation with several turns verl keeps the extra fields of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RECORD_PARAM = "tim_record"  # sampling parameter: true for a sequence to be recorded
RECORDED_FIELD = "tim_recorded"  # extra field of the output: a `Recorded.wire()`, or None
# Rollouts that understand the parameter; a plugin adds its own (docs/extending.md).
RECORDING_ROLLOUTS = {"vexact", "stock", "vllm"}


@dataclass(frozen=True)
class Recorded:
    """One response, N drawn tokens.

    Attributes:
        top1_N: int32, the likeliest token in the step that drew the token.
        routes_NLK: int16, the k experts that each sparse layer chose in that step, most probable first; None for a
            dense model, and for a vLLM that returns none (`tim.vllm_routes`).
        layers: the model's layer number of each of the L sparse layers.
    """

    top1_N: np.ndarray
    routes_NLK: np.ndarray | None = None
    layers: tuple[int, ...] = ()

    def wire(self) -> dict[str, Any]:
        """Plain values: TransferQueue, which verl's V1 trainer carries them in, knows no classes."""
        return {"top1": self.top1_N, "routes": self.routes_NLK, "layers": list(self.layers)}

    @classmethod
    def of_wire(cls, value: Mapping[str, Any] | None) -> Recorded | None:
        """What `wire` made; None for a sequence that was not recorded."""
        if value is None:
            return None
        routes = value["routes"]
        return cls(
            np.asarray(value["top1"], np.int32),
            None if routes is None else np.asarray(routes, np.int16),
            tuple(value["layers"]),
        )


def mark(places: int, wanted: int, *, seed: int, step: int) -> np.ndarray:
    """bool (places,): a seeded choice of `wanted` of them, or all where there are no more."""
    marked = np.zeros(places, bool)
    marked[np.random.default_rng((seed, step)).permutation(places)[:wanted]] = True
    return marked
