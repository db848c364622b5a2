"""The usual mismatch of a set-up: model, dtype, hardware and backends with the sizes that its runs logged, as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.diagnosis.own_file import mark
from verl_tim.diagnosis.run import Run
from verl_tim.home import expanded

FORMAT = 1

MEAN_METRICS = (
    "tim/delta_abs_mean",
    "tim/delta_abs_p95",
    "tim/delta_abs_p99",
    "tim/top1_flip_rate",
    "tim/router_flip_rate",
    "tim/router_expert_mismatch",
)
MAX_METRIC = "tim/delta_abs_max"
METRICS = (*MEAN_METRICS[:3], MAX_METRIC, *MEAN_METRICS[3:])
REQUIRED = "tim/delta_abs_mean"


class BaselineError(DiagnosisError):
    """A baseline that cannot be made or used; the message names run or file, and what is wrong."""


@dataclass(frozen=True)
class Setup:
    """What a baseline holds for. Two runs of one set-up must agree in every field."""

    architecture: str | None
    parameters: int | None
    dtype: str | None
    device: str | None
    trainer: str
    trainer_numerics: str | None
    trainer_attention: str | None
    rollout: str
    rollout_version: str
    rollout_numerics: str | None
    rollout_attention: str | None
    tensor_parallel: int | None

    @classmethod
    def of(cls, manifest: Manifest) -> Setup:
        """Read from what the run's processes said of themselves."""
        trainer, rollout = manifest.trainer.facts, manifest.rollout.facts
        return cls(
            architecture=trainer.model.get("architecture") or rollout.model.get("architecture"),
            parameters=manifest.parameters,
            dtype=trainer.compute_dtype,
            device=trainer.device,
            trainer=trainer.backend,
            trainer_numerics=trainer.numerics,
            trainer_attention=trainer.attention_backend,
            rollout=rollout.backend,
            rollout_version=rollout.backend_version,
            rollout_numerics=rollout.numerics,
            rollout_attention=rollout.attention_backend,
            tensor_parallel=rollout.tensor_parallel,
        )

    def differences(self, other: Setup) -> list[str]:
        """ "field: mine here, theirs there", for every field that differs."""
        return [
            f"{f.name} is {getattr(self, f.name)!r}, there {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class Level:
    """One metric over all steps: its mean, its largest value, and what later values are held against (0: nothing)."""

    mean: float
    largest: float
    reference: float


@dataclass(frozen=True)
class LeftOut:
    """Steps of one run that have no value of a metric that others have, or a line that was cut off.

    Attributes:
        run: the run's name.
        metric: of the values, or None for the last line of the metrics, which was cut off in the middle.
        nonfinite: steps whose value is NaN or infinite.
        missing: steps that logged none.
    """

    run: str
    metric: str | None
    nonfinite: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        if self.metric is None:
            return f"{self.run}: the last line of its metrics is cut off"
        parts = [f"{what} at {_some_steps(steps)}" for what, steps in self._kinds() if steps]
        return f"{self.run}: {self.metric} {', '.join(parts)}"

    def _kinds(self) -> tuple[tuple[str, list[int]], ...]:
        return ("not finite", self.nonfinite), ("not logged", self.missing)


@dataclass(frozen=True)
class Baseline:
    """The usual mismatch of one set-up.

    Attributes:
        metrics: by name. The reference of `tim/delta_abs_max` is the largest value seen, of the others their mean.
        steps, runs: what it was made from. A step counts that has a finite `REQUIRED`.
        left_out: what else these runs logged, or should have, and is in no level; each is worth a look, for a baseline
            of the steps before a run broke tells of those alone.
    """

    setup: Setup
    metrics: dict[str, Level]
    steps: int
    runs: list[str]
    left_out: list[LeftOut] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**mark("baseline"), "format": FORMAT, **asdict(self)}

    def write(self, path: Path) -> Path:
        """As JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(scratch, path)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Baseline:
        """Raises `BaselineError` where the file is missing or no baseline of this format."""
        path = expanded(path)
        if not path.is_file():
            raise BaselineError(f"there is no file {path}", f"verl-tim baseline RUN --out {path} makes one")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BaselineError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise BaselineError(f"{path} is no baseline of format {FORMAT}: make it again with verl-tim baseline")
        try:
            metrics = {str(name): Level(**level) for name, level in content["metrics"].items()}
            left_out = [LeftOut(**one) for one in content.get("left_out", [])]
            baseline = cls(Setup(**content["setup"]), metrics, int(content["steps"]), list(content["runs"]), left_out)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BaselineError(
                f"{path} is no whole baseline ({error}): make it again with verl-tim baseline"
            ) from error
        values = [value for level in metrics.values() for value in (level.mean, level.largest, level.reference)]
        if not all(isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 for value in values):
            raise BaselineError(f"{path}: a level is no finite number of at least 0")
        if not any(level.reference for level in metrics.values()):
            raise BaselineError(f"{path}: every level is 0, nothing can be a multiple of it")
        return baseline


def baseline_of(runs: Sequence[str | Path], *, skip: int = 0) -> Baseline:
    """The usual mismatch over runs of one set-up.

    Args:
        runs: run folders, or what a tracker that was told the manifest wrote; at least one.
        skip: steps left out at the beginning of each run.

    Raises:
        BaselineError: no runs, one without manifest or without `tim/*`, runs of different set-ups, or an exact run
            (its gate is bits: `tim.gate.exact`).
        RunFolderError, ManifestError: a folder that holds no run, or a broken file in it.
    """
    if not runs:
        raise BaselineError("no runs: a baseline is made from at least one")
    setup: Setup | None = None
    left_out: list[LeftOut] = []
    names: list[str] = []
    series: dict[str, list[float]] = {}
    for path in runs:
        run = Run.read(path)
        if run.manifest is None:
            raise BaselineError(f"{run.path} has no manifest.json, so what it ran on is not known")
        own = Setup.of(run.manifest)
        if setup is not None and (differing := own.differences(setup)):
            raise BaselineError(f"{run.path} is another set-up than {runs[0]}: {'; '.join(differing)}")
        setup = own
        names.append(run.name)
        log = run.log
        nonfinite = log.nonfinite()
        # of what was measured, finite or not: `skip` counts steps, whatever their values
        measured = sorted({*log.series(REQUIRED)[0], *nonfinite.get(REQUIRED, [])})[skip:]
        if not set(measured) - set(nonfinite.get(REQUIRED, [])):
            what = f"{REQUIRED}, none of it finite" if measured else f"no {REQUIRED}"
            logged = {*log.series(REQUIRED)[0]} - {*nonfinite.get(REQUIRED, [])}
            if skip and logged:
                raise BaselineError(
                    f"{run.path} logged {what} after {skip} steps", f"skip fewer than {len(logged)}", key="--skip"
                )
            raise BaselineError(f"{run.path} logged {what}")
        for name in METRICS:
            steps, values = log.series(name)
            series.setdefault(name, []).extend(v for s, v in zip(steps, values, strict=True) if s >= measured[0])
            spoiled = [step for step in nonfinite.get(name, []) if step >= measured[0]]
            missing = sorted({*measured} - {*steps, *spoiled}) if steps or spoiled else []
            if spoiled or missing:
                left_out.append(LeftOut(run.name, name, spoiled, missing))
        if log.torn:
            left_out.append(LeftOut(run.name, None))
    assert setup is not None
    metrics = {name: _level(name, values) for name, values in series.items() if values}
    if not any(level.reference for level in metrics.values()):
        raise BaselineError(
            f"{', '.join(map(str, runs))}: rollout and trainer agreed in every token, and a factor of 0 says nothing",
            "give runs that mismatch; the gate of exact runs is bits (tim.gate.exact)",
        )
    return Baseline(setup, metrics, len(series[REQUIRED]), names, left_out)


def _some_steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"{len(steps)} step{'s' * (len(steps) > 1)} ({shown}{', ...' * (len(steps) > 5)})"


def _level(name: str, values: list[float]) -> Level:
    mean, largest = fmean(values), max(values)
    return Level(mean, largest, largest if name == MAX_METRIC else mean)
