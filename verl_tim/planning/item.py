"""One thing that takes memory, and why so much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """Bytes on one GPU, or on one machine without any.

    Attributes:
        name: what it is.
        nbytes: bytes.
        why: the formula with its numbers, for a reader.
        assumed: the size rests on a guess of rates.yaml and not on a formula or a measurement.
    """

    name: str
    nbytes: float
    why: str
    assumed: bool = False
