"""Runs side by side: one table, one JSON, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl_tim.diagnosis.config_diff import correction_name, diff_configs
from verl_tim.diagnosis.curves import DELTA_MAX, DELTA_MEAN, EXACT_FRACTION, REWARD, validation_label, validation_names
from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.manifest import Difference, Manifest, diff
from verl_tim.diagnosis.run_folder import MetricLog, RunFolder, RunFolderError, Sample
from verl_tim.diagnosis.speed import Speed, speed
from verl_tim.diagnosis.verdict import Exactness, Verdict, exactness, judge

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Run:
    """One run as the comparison reads it."""

    name: str
    path: Path
    rollout: str
    correction: str
    trainer_numerics: str | None
    log: MetricLog
    manifest: Manifest | None
    config: dict[str, Any] | None
    samples: list[Sample]

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> Run:
        """Read a run folder. Names come from the manifest, which the running processes wrote, else from the config.

        Raises:
            RunFolderError, ManifestError: the folder holds no run, no metrics, or something corrupt.
        """
        folder = RunFolder(path)
        manifest, config = folder.manifest(), folder.config()
        rollout = correction = numerics = None
        if manifest is not None:
            rollout, correction = manifest.run.rollout, manifest.run.correction
            numerics = manifest.run.trainer_numerics or manifest.trainer.facts.numerics
        if config is not None:
            tim = config.get("tim") or {}
            rollout = rollout or ((config.get("actor_rollout_ref") or {}).get("rollout") or {}).get("name")
            correction = correction or correction_name(config)
            numerics = numerics or tim.get("trainer_numerics")
        return cls(
            name=name or folder.name,
            path=folder.path,
            rollout=rollout or UNKNOWN,
            correction=correction or UNKNOWN,
            trainer_numerics=numerics,
            log=folder.metrics(),
            manifest=manifest,
            config=config,
            samples=folder.samples(),
        )

    @property
    def steps(self) -> int:
        """The last training step logged (0 when only a validation before training was)."""
        return max((record.step for record in self.log.records), default=0)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Metric name -> first, last, max and mean of its finite values, in step order."""
        table = {}
        for name in self.log.names():
            _, values = self.log.series(name)
            table[name] = {"first": values[0], "last": values[-1], "max": max(values), "mean": fmean(values)}
        return table


@dataclass(frozen=True)
class Row:
    """One line of the summary: a metric's first, last and mean value per run; None where a run lacks it."""

    label: str
    metric: str
    kind: str
    values: list[tuple[float | None, float | None, float | None]]


@dataclass(frozen=True)
class Comparison:
    """Several runs, what differs between them besides the rollout, and what they show.

    Attributes:
        differences: from manifests and configs, without the rollout.
        rollout_differences: what the change of rollout consists of.
        disagreements: run -> facts in which processes of one side differ from each other.
    """

    runs: list[Run]
    differences: list[Difference]
    rollout_differences: list[Difference]
    disagreements: dict[str, list[str]]
    unknown: list[str]
    speeds: list[Speed]
    states: list[Exactness]
    verdict: Verdict

    def summary(self) -> list[Row]:
        """The metrics a reader asks for first; those no run logged are left out."""
        rows = []
        for label, names, kind in _summary_metrics([run.log for run in self.runs]):
            values: list[tuple[float | None, float | None, float | None]] = []
            used = names[0]
            for run in self.runs:
                name = next((name for name in names if run.log.series(name)[0]), None)
                if name is None:
                    values.append((None, None, None))
                    continue
                used = name
                series = run.log.series(name)[1]
                values.append((series[0], series[-1], fmean(series)))
            if any(mean is not None for *_, mean in values):
                rows.append(Row(label, used, kind, values))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """`compare.json`."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "rollout": run.rollout,
                    "correction": run.correction,
                    "steps": run.steps,
                    "metrics": run.statistics(),
                }
                for run in self.runs
            ],
            "verdict": {
                "lead": self.verdict.lead,
                "notes": self.verdict.notes,
                "alerts": self.verdict.alerts,
            },
            "differences": [{"key": d.key, "values": d.values} for d in self.differences],
            "rollout_differences": [{"key": d.key, "values": d.values} for d in self.rollout_differences],
            "not_compared": self.unknown,
            "disagreements": self.disagreements,
            "mismatch": {run.name: vars(state) for run, state in zip(self.runs, self.states, strict=True)},
            "speed": {run.name: vars(speed) for run, speed in zip(self.runs, self.speeds, strict=True)},
        }

    def write(self, folder: str | Path, stem: str = "compare") -> tuple[Path, Path]:
        """Write `<stem>.json` and `<stem>.html` into a folder (made if need be); returns both paths."""
        from verl_tim.diagnosis.page import render_page  # plotly is slow to import, and the table does not need it

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        json_path, html_path = folder / f"{stem}.json", folder / f"{stem}.html"
        json_path.write_text(
            json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        html_path.write_text(render_page(self), encoding="utf-8")
        return json_path, html_path

    def table(self) -> Group:
        """For the terminal: the verdict, what differs, and the summary."""
        parts: list[Any] = [Padding(Text(self.verdict.lead), (0, 0, 1, 0))]
        parts += [Text(f"! {alert}", style="bold red") for alert in self.verdict.alerts]
        parts += [Text(f"- {note}", style="yellow") for note in self.verdict.notes]
        if self.differences:
            table = Table(
                title="What differs besides the rollout", title_justify="left", box=None, padding=(0, 2, 0, 0)
            )
            table.add_column("setting")
            for run in self.runs:
                table.add_column(run.name)
            for d in self.differences:
                table.add_row(d.key, *(_shown(d.values[run.name]) for run in self.runs))
            parts.append(table)
        elif len(self.runs) > 1 and not self.unknown:
            parts.append(Text("Nothing but the rollout differs between the runs.", style="green"))
        for name in self.unknown:
            parts.append(Text(f"- {name}", style="yellow"))
        table = Table(title_justify="left")
        table.add_column("")
        for run in self.runs:
            for at, heading in enumerate(("first", "last", "mean")):
                title = f"{run.name}\n{heading}" if at == 0 else f"\n{heading}"
                table.add_column(title, justify="right", no_wrap=True)
        for row in self.summary():
            table.add_row(row.label, *(written(value, row.kind) for values in row.values for value in values))
        parts.append(table)
        return Group(*parts)


def compare(run_dirs: Sequence[str | Path], names: Sequence[str] | None = None) -> Comparison:
    """Read run folders and set them side by side, aligned by step.

    Args:
        run_dirs: one or more run folders.
        names: how to call them; the folders' names otherwise, with as much of the parent path as tells them apart.
    Raises:
        ValueError: no folder, one given twice, or names that do not fit.
        RunFolderError, ManifestError: a folder without a run or metrics, or with something corrupt.
    """
    paths = [Path(path).expanduser().absolute() for path in run_dirs]
    if not paths:
        raise ValueError("compare needs at least one run folder")
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise ValueError(f"run folder given twice: {twice[0]}")
    if names is None:
        names = distinct_names(paths)
    elif len(names) != len(paths) or len(set(names)) != len(names):
        raise ValueError(f"names must be distinct, one per run folder: got {len(names)} for {len(paths)} folders")
    runs = [Run.read(path, name) for path, name in zip(paths, names, strict=True)]
    differences, unknown = _differences(runs)
    found = [d for d in differences if not d.of_rollout]
    return Comparison(
        runs=runs,
        differences=found,
        rollout_differences=[d for d in differences if d.of_rollout],
        disagreements={
            run.name: lines
            for run in runs
            if run.manifest is not None and (lines := _process_disagreements(run.manifest))
        },
        unknown=unknown,
        speeds=[speed(run.log) for run in runs],
        states=[exactness(run.log) for run in runs],
        verdict=judge(runs, len(found)),
    )


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Folder names, lengthened by parent folders until they differ."""
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names) or depth > max(len(path.parts) for path in paths):
            return names
        depth += 1


def written(value: float | None, kind: str) -> str:
    """A summary value as text."""
    return percent(value) if kind == "share" else short(value)


def _shown(value: Any) -> str:
    """A setting's value in a table."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _differences(runs: Sequence[Run]) -> tuple[list[Difference], list[str]]:
    """Differences from manifests and configs, and what could not be compared."""
    unknown: list[str] = []
    if len(runs) < 2:
        return [], unknown
    found: list[Difference] = []
    manifests = {run.name: run.manifest for run in runs if run.manifest is not None}
    if len(manifests) == len(runs):
        found += diff(manifests, include_rollout=True)
    else:
        lacking = [run.name for run in runs if run.manifest is None]
        unknown.append(f"No manifest in {', '.join(lacking)}: what ran there is known from its config at best.")
    configs = {run.name: run.config for run in runs if run.config is not None}
    if len(configs) == len(runs):
        from_config = diff_configs(configs, include_rollout=True)
        # The manifest says the same of these, from the processes themselves.
        told = {d.key for d in found}
        same = {"tim.trainer_numerics": "run.trainer_numerics", "tim.choices.correction": "run.correction"}
        same |= {f"tim.choices.{name}": f"run.{name}" for name in ("task", "recipe", "rollout")}
        found += [d for d in from_config if same.get(d.key) not in told]
    else:
        lacking = [run.name for run in runs if run.config is None]
        unknown.append(f"No config.yaml in {', '.join(lacking)}: settings cannot be compared.")
    return found, unknown


def _process_disagreements(manifest: Manifest) -> list[str]:
    lines = []
    for title, side in (("trainer", manifest.trainer), ("rollout", manifest.rollout)):
        for process, facts in side.different.items():
            lines += [f"{title} {process}: {key} is {_shown(value)}" for key, value in facts.items()]
    return lines


def _summary_metrics(logs: Sequence[MetricLog]) -> list[tuple[str, tuple[str, ...], str]]:
    validation = validation_names(logs)
    several = len(validation) > 1
    return [
        ("reward", REWARD, "number"),
        *(
            (f"validation {validation_label(name)}" if several else "validation", (name,), "number")
            for name in validation[:4]
        ),
        ("|d| mean, nats", DELTA_MEAN, "number"),
        ("|d| max, nats", DELTA_MAX, "number"),
        ("exact tokens", EXACT_FRACTION, "share"),
        ("gradient norm", ("actor/grad_norm", "actor/grad_norm/mean"), "number"),
        ("entropy, nats", ("actor/entropy", "actor/entropy_loss"), "number"),
        ("response length", ("response_length/mean",), "number"),
        ("truncated", ("response_length/clip_ratio",), "share"),
        ("step time, s", ("timing_s/step", "perf/time_per_step"), "number"),
        ("tokens/s/device", ("perf/throughput",), "number"),
    ]


__all__ = ["Comparison", "Row", "Run", "RunFolderError", "compare", "distinct_names"]
