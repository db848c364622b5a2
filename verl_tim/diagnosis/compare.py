"""Runs side by side: one table, one JSON, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType

from verl_tim.diagnosis.curves import (
    DELTA_MAX,
    DELTA_MEAN,
    DELTA_P99,
    EXACT_FRACTION,
    RESPONSE_AT_LIMIT,
    REWARD,
    validation_label,
    validation_names,
)
from verl_tim.diagnosis.early_warning import BandRule, Departure, early_warning
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.groups import Group, named_groups, seed_groups
from verl_tim.diagnosis.manifest import Difference, Manifest
from verl_tim.diagnosis.metric_log import MetricLog, RunFolderError
from verl_tim.diagnosis.own_file import mark
from verl_tim.diagnosis.restarts import as_json, restarts_of
from verl_tim.diagnosis.run import Run, tracked_name
from verl_tim.diagnosis.smoothing import Smoothing
from verl_tim.diagnosis.speed import Speed, speed
from verl_tim.diagnosis.terms import Term, legend
from verl_tim.diagnosis.verdict import Exactness, Verdict, exactness, judge
from verl_tim.diagnosis.what_differs import WhatDiffers, all_differences
from verl_tim.home import expanded

NO_BASELINE = (
    "No run here has an exact rollout: name the baseline (--baseline RUN) to see which signal leaves its band."
)


SUMMARY_STEPS = (
    "first and last: the metric at the first and the last step that logged it; mean: over all steps that did, each "
    "counted once, while sentences weigh every token alike."
)


@dataclass(frozen=True)
class Row:
    """One line of the summary: a metric's first, last and mean value per group; None where it lacks it."""

    label: str
    metric: str
    kind: str
    values: list[tuple[float | None, float | None, float | None]]


@dataclass(frozen=True)
class Options:
    """How runs are compared.

    Attributes:
        baseline: name of a run or group; None takes the first with rollout vexact.
        groups: `LABEL=PATTERN` rules over run names.
        by_seed: group runs whose manifests and configs are equal but for the seed; rules turn it off.
        smoothing: drawn beside the values.
        band: of the early warning.
    """

    baseline: str | None = None
    groups: tuple[str, ...] = ()
    by_seed: bool = True
    smoothing: Smoothing | None = None
    band: BandRule = field(default_factory=BandRule)


@dataclass(frozen=True)
class Comparison:
    """Several runs, what differs between them besides the rollout, and what they show.

    Attributes:
        runs: each run that was given.
        groups: what one curve or column stands for: a run, or all seeds of a setting.
        units: one run per group; of several seeds, with their pooled metrics (Group.log).
        baseline: the group that the others are held against, or None.
        warnings: which signal leaves the baseline's band when.
        what: what differs between them.
        disagreements: run -> facts in which processes of one side differ from each other.
    """

    runs: list[Run]
    groups: list[Group]
    units: list[Run]
    options: Options
    baseline: Group | None
    warnings: list[Departure]
    what: WhatDiffers
    disagreements: dict[str, list[str]]
    speeds: list[Speed]
    states: list[Exactness]
    verdict: Verdict

    def group_of(self, run: int) -> int:
        """Place of the group that a run is in."""
        return next(at for at, group in enumerate(self.groups) if run in group.members)

    def band_text(self) -> str:
        """How the baseline's band is made."""
        return self.options.band.text(len(self.baseline.members) if self.baseline else 1)

    def summary(self) -> list[Row]:
        """What a reader asks for first, per group."""
        return summarise(self.units)

    def terms(self) -> list[Term]:
        """The names in the tables, explained."""
        return legend([*(departure.signal for departure in self.warnings), *(row.label for row in self.summary())])

    def table(self) -> RenderableType:
        """For the terminal."""
        from verl_tim.diagnosis.compare_table import comparison_table

        return comparison_table(self)

    def to_dict(self) -> dict[str, Any]:
        """`compare.json`."""
        return {
            **mark("compare"),
            "runs": [
                {
                    "name": run.name,
                    "path": str(run.path),
                    "rollout": run.rollout,
                    "correction": run.correction,
                    "steps": run.steps,
                    "metrics": run.statistics(),
                }
                for run in self.runs
            ],
            "groups": [{"name": g.name, "runs": [self.runs[at].name for at in g.members]} for g in self.groups],
            "verdict": {
                "lead": self.verdict.lead,
                "notes": self.verdict.notes,
                "alerts": self.verdict.alerts,
            },
            "early_warning": {
                "baseline": self.baseline.name if self.baseline else None,
                "band": {**asdict(self.options.band), "text": self.band_text()},
                "signals": [asdict(departure) for departure in self.warnings],
            },
            "smoothing": str(self.options.smoothing) if self.options.smoothing else None,
            "differences": [{"key": d.key, "values": d.values} for d in self.what.settings],
            "same_rollout": self.what.one_rollout,
            "rollout_differences": [{"key": d.key, "values": d.values} for d in self.what.rollout],
            "not_compared": self.what.unknown,
            "disagreements": self.disagreements,
            "mismatch": {run.name: vars(state) for run, state in zip(self.runs, self.states, strict=True)},
            "restarts": {run.name: as_json(restarts_of(run.log)) for run in self.runs},
            "speed": {run.name: vars(speed) for run, speed in zip(self.runs, self.speeds, strict=True)},
        }

    def write(self, folder: str | Path, stem: str = "compare", *, png: bool = False) -> list[Path]:
        """Write `<stem>.json`, `<stem>.html` and, if asked for, `<stem>.png` into a folder (made if need be).

        Returns:
            Their paths, in that order.
        """
        from verl_tim.diagnosis.page import render_page  # plotly is slow to import, and the table does not need it

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.json", folder / f"{stem}.html"]
        paths[0].write_text(
            json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        paths[1].write_text(render_page(self), encoding="utf-8")
        if png:
            from verl_tim.diagnosis.png import write_png

            paths.append(folder / f"{stem}.png")
            write_png(self, paths[-1])
        return paths


def compare(
    run_dirs: Sequence[str | Path], names: Sequence[str] | None = None, options: Options | None = None
) -> Comparison:
    """Read runs and set them side by side, aligned by step.

    Args:
        run_dirs: one or more run folders, tracker folders or metrics files (Run.read).
        names: how to call them; the folders' names otherwise, with as much of the parent path as tells them apart.
        options: baseline, groups, smoothing and band.
    Raises:
        DiagnosisError: no folder, one given twice, names or groups that do not fit, or a baseline that is none of them.
        RunFolderError, ManifestError: a folder without a run or metrics, or with something corrupt.
    """
    options = options or Options()
    paths = [expanded(path).absolute() for path in run_dirs]
    if not paths:
        raise DiagnosisError("compare needs at least one run folder")
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise DiagnosisError(f"run folder given twice: {twice[0]}", "give it once")
    if names is None:
        names = distinct_names(paths)
    elif len(names) != len(paths) or len(set(names)) != len(names):
        raise DiagnosisError(
            f"{len(names)} {'name' if len(names) == 1 else 'names'} ({', '.join(names)}) for "
            f"{len(paths)} run{'s' * (len(paths) > 1)}",
            "names must be distinct, one for each run, in their order: repeat the option",
            key="--name",
        )
    runs = [Run.read(path, name) for path, name in zip(paths, names, strict=True)]
    groups = _groups(runs, options)
    units = [replace(runs[g.members[0]], name=g.name, log=g.log()) for g in groups]
    baseline = _baseline(groups, units, options.baseline)
    what = WhatDiffers.of(runs, seeds=any(len(group.members) > 1 for group in groups))
    return Comparison(
        runs=runs,
        groups=groups,
        units=units,
        options=options,
        baseline=baseline,
        warnings=early_warning(groups, baseline, options.band) if baseline else [],
        what=what,
        disagreements={
            run.name: lines
            for run in runs
            if run.manifest is not None and (lines := _process_disagreements(run.manifest))
        },
        speeds=[speed(run.log) for run in runs],
        states=[exactness(run.log) for run in runs],
        verdict=judge(units, what, {g.name: {runs[at].name: runs[at].log for at in g.members} for g in groups}),
    )


def summarise(runs: Sequence[Run]) -> list[Row]:
    """The metrics a reader asks for first, one value triple per run; those no run logged are left out."""
    rows = []
    logs = [run.log for run in runs]
    for label, names, kind in summary_metrics(logs):
        values: list[tuple[float | None, float | None, float | None]] = []
        used = names[0]
        for log in logs:
            name = next((name for name in names if log.series(name)[0]), None)
            if name is None:
                values.append((None, None, None))
                continue
            used = name
            series = log.series(name)[1]
            values.append((series[0], series[-1], fmean(series)))
        if any(mean is not None for *_, mean in values):
            rows.append(Row(label, used, kind, values))
    return rows


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Folder names, lengthened by parent folders until they differ; of a folder that wandb wrote wandb's name."""
    told = [tracked_name(path) for path in paths]
    depth = 1
    while True:
        folders = ["/".join(path.parts[-depth:]) for path in paths]
        names = [name or folder for name, folder in zip(told, folders, strict=True)] if depth == 1 else folders
        if len(set(names)) == len(names) or depth > max(len(path.parts) for path in paths):
            return names
        depth += 1


def _groups(runs: Sequence[Run], options: Options) -> list[Group]:
    names = [run.name for run in runs]
    if options.groups:
        found = named_groups(names, options.groups)
    elif options.by_seed:

        def between(one: int, other: int) -> list[Difference] | None:
            pair = [runs[one], runs[other]]
            differences, unknown = all_differences(pair)
            return None if unknown else differences

        found = seed_groups(names, between)
    else:
        found = [(name, [at]) for at, name in enumerate(names)]
    return [Group(name, tuple(members), tuple(runs[at].log for at in members)) for name, members in found]


def _baseline(groups: Sequence[Group], units: Sequence[Run], name: str | None) -> Group | None:
    if name is None:
        return next((g for g, unit in zip(groups, units, strict=True) if unit.rollout == "vexact"), None)
    for group in groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in groups)
    raise DiagnosisError(f"{name!r} is none of the runs compared", f"choose one of {known}", key="--baseline")


def shown(value: Any) -> str:
    """A setting's value in a table."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _process_disagreements(manifest: Manifest) -> list[str]:
    lines = []
    for title, side in (("trainer", manifest.trainer), ("rollout", manifest.rollout)):
        for process, facts in side.different.items():
            lines += [f"{title} {process}: {key} is {shown(value)}" for key, value in facts.items()]
    return lines


def summary_metrics(logs: Sequence[MetricLog]) -> list[tuple[str, tuple[str, ...], str]]:
    """(label, metric names, kind) of the summary's rows, whether or not a run logged them."""
    validation = validation_names(logs)
    several = len(validation) > 1
    return [
        ("reward", REWARD, "number"),
        *(
            (f"validation {validation_label(name)}" if several else "validation", (name,), "number")
            for name in validation[:4]
        ),
        ("|d| mean, nats", DELTA_MEAN, "number"),
        ("|d| p99, nats", DELTA_P99, "number"),
        ("|d| max, nats", DELTA_MAX, "number"),
        ("exact tokens", EXACT_FRACTION, "share"),
        ("contribution skew", ("tim/contribution_skew",), "number"),
        ("gradient norm", ("actor/grad_norm", "actor/grad_norm/mean"), "number"),
        ("entropy, nats", ("actor/entropy", "actor/entropy_loss"), "number"),
        ("response length", ("response_length/mean",), "number"),
        ("at length limit", RESPONSE_AT_LIMIT, "share"),
        ("step time, s", ("timing_s/step", "perf/time_per_step"), "number"),
        ("tokens/s/device", ("perf/throughput",), "number"),
    ]


__all__ = ["Comparison", "Options", "Row", "Run", "RunFolderError", "compare", "distinct_names"]
