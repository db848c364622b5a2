"""Runs of two variants that are one: every value that both logged is the same."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import combinations

from verl_tim.diagnosis.metric_log import MetricLog
from verl_tim.diagnosis.same import compare_metrics
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
            if first.seed != second.seed:
                continue
            steps = {*one.steps} & {*other.steps}
            section = compare_metrics(_only(one, steps), _only(other, steps))
            if section.compared and not section.differing:
                yield Equal(first, second, len(steps - {0}), section.compared)  # step 0: validation before the first


def _only(log: MetricLog, steps: Set[int]) -> MetricLog:
    return replace(log, records=[record for record in log.records if record.step in steps])
