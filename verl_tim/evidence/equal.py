"""Runs of two variants that are one: every value that both logged is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from verl_tim.diagnosis.metric_log import MetricLog
from verl_tim.diagnosis.same import left_out
from verl_tim.evidence.names import RunName
from verl_tim.evidence.runs import Evidence


@dataclass(frozen=True)
class Equal:
    """Two runs of a model, an algorithm and a seed.

    Attributes:
        steps: that both logged; values: how many of them were compared.
    """

    first: RunName
    second: RunName
    steps: int
    values: int


def equal_runs(evidence: Evidence) -> Iterator[Equal]:
    """Pairs of runs that differ in their variant only and logged the same at every step that both have.

    Compared is what `verl-tim same` compares of metrics: not times, memory, nor how requests fell into steps.
    """
    for pair in evidence.pairs:
        logs = dict(zip(pair.folders, (run.log for run in pair.comparison.runs), strict=True))
        for (first, one), (second, other) in combinations(logs.items(), 2):
            if first.seed == second.seed and (found := _same_values(one, other)) is not None:
                yield Equal(first, second, *found)


def _same_values(first: MetricLog, second: MetricLog) -> tuple[int, int] | None:
    """Steps and values that both logged; None where there are none, or one of them differs."""
    theirs = {record.step: record for record in second.records}
    steps = values = 0
    for record in first.records:
        other = theirs.get(record.step)
        if other is None:
            continue
        names = {
            name for name in (*record.data, *record.nonfinite, *other.data, *other.nonfinite) if not left_out(name)
        }
        if any(record.data.get(name) != other.data.get(name) for name in names):
            return None
        steps, values = steps + (record.step > 0), values + len(names)  # step 0: validation before the first
    return (steps, values) if values else None
