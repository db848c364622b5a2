"""A phase of a step on one GPU, or one machine without any: what it holds at its fullest moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_tim.planning.item import Item
from verl_tim.units import size

PHASES = ("rollout", "log-probs", "update", "weight sync")


@dataclass(frozen=True)
class Phase:
    """The fullest moment of one phase.

    Attributes:
        name: one of `PHASES`.
        moment: which moment that is.
        items: what is held then; none is negative.
    """

    name: str
    moment: str
    items: tuple[Item, ...]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(item.nbytes for item in self.items)

    def problem(self, memory: float, of: str) -> str | None:
        """Why it does not fit into so many bytes of `of`; None where it does."""
        if self.total <= memory:
            return None
        largest = ", ".join(f"{item.name} {size(item.nbytes)}" for item in self.largest[:3])
        fullest = f"at its fullest ({self.moment}); the largest: {largest}"
        return f"needs {size(self.total)} of {size(memory)} ({of}) {fullest}"

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "moment": self.moment,
            "bytes": round(self.total),
            "items": [
                {"name": i.name, "bytes": round(i.nbytes), "why": i.why, "assumed": i.assumed} for i in self.items
            ],
        }

    @property
    def largest(self) -> list[Item]:
        """The items by size, largest first, zeros left out."""
        return sorted((item for item in self.items if item.nbytes), key=lambda item: -item.nbytes)
