"""A phase of a step on one GPU: what it holds at its fullest moment."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.planning.item import Item

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

    @property
    def largest(self) -> list[Item]:
        """The items by size, largest first, zeros left out."""
        return sorted((item for item in self.items if item.nbytes), key=lambda item: -item.nbytes)
