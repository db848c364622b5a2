"""Weights that every rank of a split engine reads by itself, from what lies on its own device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Reader(Protocol):
    """Reads a rank's own tensors; one per rank and update, sent as a pickle before its first use."""

    def read(self, payload: Any, device: torch.device) -> Iterable[tuple[str, Tensor]]:
        """(name, full tensor) pairs of one payload, in the order of the stream."""

    def done(self) -> None:
        """What was read may be overwritten when this returns."""

    def close(self) -> None:
        """The update is over."""


@dataclass(frozen=True)
class LocalTensors:
    """A payload for the `Reader` of each rank, in rank order; all stand for the same tensors."""

    payloads: Sequence[Any]
