"""How many steps stand for the start and the end of a run, wherever a table or a sentence says how a reward ends."""

from __future__ import annotations


def end_steps(steps: int) -> int:
    """Of `steps` steps the number, at each end, whose mean is told: a third, 3 to 10, and fewer where the two ends
    would overlap; at least 1."""
    return max(1, min(max(3, steps // 3), 10, steps // 2))
