"""Runs of one setting that differ in the seed alone, taken together: mean and spread per step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile

import pandas as pd

from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.manifest import Difference
from verl_tim.diagnosis.metric_log import MetricLog, Record

# `seed`, `data_loader_seed`, ... anywhere in config or manifest.
SEED_KEY = re.compile(r"(.*[._])?seed")


@dataclass(frozen=True)
class Curve:
    """One metric over steps. `low` and `high` are mean -+ one standard deviation over several seeds, None for one."""

    steps: list[int]
    values: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Group:
    """One or several runs that one curve stands for.

    Attributes:
        name: of the setting; a single run's own name.
        members: places of its runs in the comparison.
        logs: their metrics.
    """

    name: str
    members: tuple[int, ...]
    logs: tuple[MetricLog, ...]

    def frame(self, names: Sequence[str]) -> pd.DataFrame:
        """(step, run) values of the first of `names` that each run logged; NaN where a run has none."""
        columns = []
        for log in self.logs:
            name = next((name for name in names if log.series(name)[0]), names[0])
            steps, values = log.series(name)
            columns.append(pd.Series(values, index=pd.Index(steps, dtype="int64"), dtype="float64"))
        return pd.concat(columns, axis=1).sort_index() if columns else pd.DataFrame()

    def shared(self, names: Sequence[str]) -> pd.DataFrame:
        """`frame` at the steps where every run that logs this has a value.

        What is concluded rests on these alone: where a run has ended before the others, the mean of those left is that
        of other runs, and jumps although none of them did.
        """
        return self.frame(names).dropna(axis=1, how="all").dropna(how="any")

    def curve(self, names: Sequence[str]) -> Curve:
        """Mean over the runs that logged a step, and their spread (n - 1) where there are several."""
        frame = self.frame(names)
        mean = frame.mean(axis=1)
        if len(self.logs) == 1:
            return Curve(mean.index.tolist(), mean.tolist())
        spread = frame.std(axis=1, ddof=1).fillna(0.0)
        return Curve(mean.index.tolist(), mean.tolist(), (mean - spread).tolist(), (mean + spread).tolist())

    def log(self) -> MetricLog:
        """One log for all runs: the mean of each metric; the largest of a maximum, the sum of a count of tokens."""
        if len(self.logs) == 1:
            return self.logs[0]
        rows: dict[int, dict[str, list[float]]] = {}
        broken: dict[int, dict[str, None]] = {}
        for log in self.logs:
            for record in log.records:
                row = rows.setdefault(record.step, {})
                for name, value in record.data.items():
                    row.setdefault(name, []).append(value)
                broken.setdefault(record.step, {}).update(dict.fromkeys(record.nonfinite))
        records = [
            Record(step, {name: _pooling(name)(values) for name, values in row.items()}, tuple(broken[step]))
            for step, row in sorted(rows.items())
        ]
        return MetricLog(records, any(log.torn for log in self.logs))


def _pooling(name: str) -> Callable[[list[float]], float]:
    if name.endswith(("_max", "/max")):
        return max
    if name.startswith("tim/") and name.endswith("_tokens"):
        return sum
    return lambda values: sum(values) / len(values)


def named_groups(names: Sequence[str], rules: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Groups from `LABEL=PATTERN` rules over run names; runs that no rule names stand alone.

    Raises:
        DiagnosisError: a malformed rule, one that matches nothing, a run matched twice, a label that is a run's name.
    """
    taken: dict[int, str] = {}
    groups: list[tuple[str, list[int]]] = []
    for rule in rules:
        label, sign, pattern = rule.partition("=")
        if not sign or not label or not pattern:
            raise DiagnosisError(
                f"{rule!r} is not LABEL=PATTERN", "give a label and a pattern, as stock='stock-seed*'", key="--group"
            )
        members = [at for at, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not members:
            raise DiagnosisError(
                f"{rule!r} matches no run", f"give a pattern over the names {', '.join(names)}", key="--group"
            )
        twice = [names[at] for at in members if at in taken]
        if twice:
            raise DiagnosisError(
                f"{rule!r} takes {twice[0]}, which group {taken[members[0]]!r} has already",
                "give patterns that share no run",
                key="--group",
            )
        taken |= dict.fromkeys(members, label)
        groups.append((label, members))
    groups += [(name, [at]) for at, name in enumerate(names) if at not in taken]
    labels = [label for label, _ in groups]
    if len(set(labels)) < len(labels):
        raise DiagnosisError(
            f"one name stands for two: {', '.join(labels)}",
            "give labels that differ from each other and from the names of the runs left",
            key="--group",
        )
    return sorted(groups, key=lambda group: group[1][0])


def seed_groups(
    names: Sequence[str], differences: Callable[[int, int], list[Difference] | None]
) -> list[tuple[str, list[int]]]:
    """Runs whose manifests and configs are equal but for a seed.

    Args:
        names: of the runs.
        differences: of two runs; None where they cannot be compared in full, and the runs then stand alone.
    """
    groups: list[list[int]] = []
    for at in range(len(names)):
        for group in groups:
            found = differences(group[0], at)
            if found and all(SEED_KEY.fullmatch(d.key) for d in found):
                group.append(at)
                break
        else:
            groups.append([at])
    return [(_common(names, group), group) for group in groups]


def _common(names: Sequence[str], group: list[int]) -> str:
    """A single run's name; of several what their names begin with, without a seed's mark, and their number."""
    if len(group) == 1:
        return names[group[0]]
    # `data.seed=` is what the runs of a sweep are called
    begun = re.sub(r"[-_./]*(s|(data\.)?seed=?)?[-_./]*$", "", _begun([names[at] for at in group]))
    return f"{begun or names[group[0]]} ({len(group)} seeds)"


def _begun(names: Sequence[str]) -> str:
    """The letters that all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False)))
