"""One run as comparison and report read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_tim.diagnosis.config_diff import correction_name
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.diagnosis.metric_log import MetricLog, read_metrics_file
from verl_tim.diagnosis.run_folder import METRICS_NAME, RunFolder, Sample, holds_run
from verl_tim.diagnosis.speed import step_seconds
from verl_tim.diagnosis.trackers import read_wandb_run
from verl_tim.home import expanded

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Run:
    """One run as the comparison reads it.

    Attributes:
        tracked: name, config and manifest are what a tracker was given (`config_diff.FILLED_KEYS`).
    """

    name: str
    path: Path
    rollout: str
    correction: str
    trainer_numerics: str | None
    log: MetricLog
    manifest: Manifest | None
    config: dict[str, Any] | None
    samples: list[Sample]
    tracked: bool = False

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> Run:
        """Read a run folder, a folder of TensorBoard events or of a wandb offline run, or a metrics file alone.

        Names come from the manifest, which the running processes wrote, else from the config.

        Raises:
            RunFolderError, ManifestError: nothing to read there, no metrics, or something corrupt.
        """
        file = expanded(path).absolute()
        if file.suffix == ".jsonl" and file.is_file():
            records, torn = read_metrics_file(file)
            log = MetricLog.merged(records, torn)
            return cls(name or file.stem, file, UNKNOWN, UNKNOWN, None, log, None, None, [])
        folder = RunFolder(path)
        manifest, config = folder.manifest(), folder.config()
        told = None
        if manifest is None and config is None:
            told = read_wandb_run(folder.path)
            if told is not None:
                name, config, manifest = name or told.name, *_of_tracker(told.config)
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
            tracked=told is not None,
        )

    @property
    def steps(self) -> int:
        """The last training step logged (0 when only a validation before training was)."""
        return max((record.step for record in self.log.records), default=0)

    def nothing_logged(self) -> str | None:
        """Where metrics should stand and why none do; None where there is a value, finite or not."""
        if any(record.data or record.nonfinite for record in self.log.records):
            return None
        file = self.path / METRICS_NAME
        cut = ": its only line is cut off" if self.log.torn and not self.log.records else ""
        return f"{file if file.is_file() else self.path} holds no metric of any step{cut}"

    def seconds(self) -> dict[int, float]:
        """Training time at the end of each step: the sum of step times so far. Empty where none were logged.

        Start-up and what lies between steps are not in it, so runs compare whatever their start cost.
        """
        total, at = 0.0, {}
        times = step_seconds(self.log)
        for step in sorted(times):
            total += times[step]
            at[step] = total
        return at

    def statistics(self) -> dict[str, dict[str, float]]:
        """Metric name -> first, last, max and mean of its finite values, in step order."""
        table = {}
        for name in self.log.names():
            _, values = self.log.series(name)
            table[name] = {"first": values[0], "last": values[-1], "max": max(values), "mean": fmean(values)}
        return table


def tracked_name(path: Path) -> str | None:
    """What a tracker calls the run whose folder it wrote; None for a run folder, or where no tracker says it."""
    if not path.is_dir() or holds_run(path):
        return None
    told = read_wandb_run(path)
    return None if told is None else told.name


def _of_tracker(config: dict[str, Any]) -> tuple[dict[str, Any] | None, Manifest | None]:
    """The run's config and manifest out of what a tracker was given; neither of a run that is not verl's."""
    if "actor_rollout_ref" not in config:
        return None, None
    tim = dict(config.get("tim") or {})
    manifest = tim.pop("manifest", None)
    return {**config, "tim": tim}, None if manifest is None else Manifest.of_dict(manifest)
