"""Problems without their copies.

DAPO-Math-17k's file holds each of its problems a hundred times (1,791,700 rows), which the publishers call an
accident that they keep for reproducibility. One epoch over it would be a hundred, and `data.shuffle` would put copies
of a problem into one batch. Copies of a problem whose answers differ leave no way to tell which is true: such problems
are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl_tim.tasks.math.plain import as_integer, clean, compact
from verl_tim.tasks.published.problem import Problem, identity


@dataclass(frozen=True)
class Distinct:
    """Problems in the order of their first row, and what was left out: rows that repeat a problem, and problems whose
    rows disagree on the answer."""

    problems: list[Problem]
    read: int
    copies: int
    conflicts: int

    @property
    def counts(self) -> dict[str, int]:
        return {
            "rows_read": self.read,
            "copies_dropped": self.copies,
            "problems_with_conflicting_answers_dropped": self.conflicts,
            "distinct_problems": len(self.problems),
        }


def distinct(problems: Iterable[Problem]) -> Distinct:
    """One of each problem. Answers conflict if neither their text nor their integers are equal."""
    first: dict[str, Problem] = {}
    conflicts: set[str] = set()
    read = 0
    for problem in problems:
        read += 1
        key = identity(problem)
        known = first.setdefault(key, problem)
        if known is not problem and known.answer != problem.answer and not _same(known.answer, problem.answer):
            conflicts.add(key)
    kept = [problem for key, problem in first.items() if key not in conflicts]
    return Distinct(kept, read, read - len(first), len(conflicts))


def _same(one: str, other: str) -> bool:
    one, other = clean(one), clean(other)
    integer = as_integer(one)
    return compact(one) == compact(other) or (integer is not None and integer == as_integer(other))
