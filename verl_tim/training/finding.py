"""One obstacle that keeps a run from starting, as the start-up checks of trainer and command line report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One obstacle.

    Attributes:
        key: the config key to change, as it is written on the command line.
        problem: what is wrong, with the offending value.
        remedy: what to do about it.
    """

    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}\n    -> {self.remedy}"
