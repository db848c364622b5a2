"""verl's trackers, told what a run is: its group, its job type, its tags, and what its processes really run.

verl gives every tracker project, name and config (verl 0.9.1, utils/tracking.py) and nothing to sort runs by. Here each
gets that in its own terms:

    tracker      group            setting (one curve)   facts and tags              manifest
    wandb        group            job type              tags                        config, `tim.manifest`
    swanlab      group            job type              tags                        config, `tim.manifest`
    mlflow       tag `group`      tag `setting`         a tag each                  params, manifest.json
    trackio      group            (in the config)       (in the config)             config, `tim.manifest`
    tensorboard  (the folder)     (the folder)          text `run`                  text `manifest`

`Labels` says what they are; docs/tracking.md says it to users.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tim.training.config import MAX_TAG_LENGTH, TimConfig

# Worst values of the whole run in wandb's table, where the last step's would hide a mismatch that has passed.
WANDB_SUMMARIES = {"tim/delta_abs_max": "max,last", "tim/exact_fraction": "min,last"}


class TrackerError(RuntimeError):
    """A tracker that was asked for could not be started."""


@dataclass(frozen=True)
class Labels:
    """What a run is filed under.

    Attributes:
        name: of the run; project: of all runs of this work.
        group: the recipe, or the matrix that the run is part of.
        setting: rollout-trainer-correction; runs of one setting differ in their seeds, and are one curve in `compare`.
        facts: what a reader filters by, by name: recipe, task, rollout, trainer, correction, seeds.
        tags: the user's own.
    """

    project: str
    name: str
    group: str
    setting: str
    facts: Mapping[str, str]
    tags: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Labels:
        """From the resolved config of a run, as verl gives it to its trackers; the manifest in it knows best."""
        tim = TimConfig.of(config)
        run = dict(((tim.manifest or {}).get("run")) or {})
        choices = {name: value for name, value in (tim.choices or {}).items() if value}
        replay = (tim.manifest or {}).get("routing_replay", choices.get("routing_replay"))
        rollout = config["actor_rollout_ref"]["rollout"]
        seeds = {"seed": rollout.get("seed"), "data_seed": (config.get("data") or {}).get("seed")}
        facts = {
            "recipe": run.get("recipe") or choices.get("recipe"),
            "task": choices.get("task") or run.get("task"),
            "rollout": run.get("rollout") or choices.get("rollout") or rollout["name"],
            "trainer": run.get("trainer_numerics") or tim.trainer_numerics,
            "correction": run.get("correction") or choices.get("correction"),
            "replay": None if replay == "off" else replay,
            **seeds,
        }
        known = {name: str(value) for name, value in facts.items() if value is not None}
        return cls(
            project=str(config["trainer"]["project_name"]),
            name=str(config["trainer"]["experiment_name"]),
            group=str(tim.tracking.group or known.get("recipe") or "run"),
            setting="-".join(known[name] for name in ("rollout", "trainer", "correction", "replay") if name in known),
            facts=known,
            tags=tim.tracking.tags,
        )

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Facts as `name:value`, then the user's; none longer than trackers take."""
        return tuple(f"{name}:{value}"[:MAX_TAG_LENGTH] for name, value in self.facts.items()) + self.tags

    def environment(self) -> dict[str, str]:
        """The variables by which wandb and swanlab take what verl's calls of their `init` leave out."""
        tags = ",".join(self.all_tags)
        return {
            "WANDB_RUN_GROUP": self.group,
            "WANDB_JOB_TYPE": self.setting,
            "WANDB_TAGS": tags,
            "SWANLAB_GROUP": self.group,
            "SWANLAB_JOB_TYPE": self.setting,
            "SWANLAB_TAGS": tags,
        }


def labelled(tracking: type) -> type:
    """verl's `Tracking` with labels, for runs of verl_tim; other runs get what verl makes."""

    class TimTracking(tracking):  # type: ignore[misc, valid-type]
        def __init__(
            self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
        ) -> None:
            self.labels = Labels.of(config) if config and config.get("tim") is not None else None
            if self.labels is None:
                super().__init__(project_name, experiment_name, default_backend, config)
                return
            backends = [default_backend] if isinstance(default_backend, str) else list(default_backend)
            _before(self.labels, backends, config)
            with _default_environment(self.labels.environment()):
                super().__init__(project_name, experiment_name, backends, config)
            missing = [name for name in backends if name not in self.logger and name != "tracking"]
            if missing:
                self.finish(exit_code=1)
                raise TrackerError(
                    f"trainer.logger: {', '.join(missing)} did not start (verl's warnings above say why): correct its "
                    "settings, or take it out of trainer.logger"
                )
            _after(self.labels, self.logger, config["tim"].get("manifest"))
            _OPEN.add(self)

    TimTracking.__name__ = TimTracking.__qualname__ = tracking.__name__
    return TimTracking


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def closed_at_the_end() -> Iterator[None]:
    """Close the trackers of this process when training ends, well or not.

    verl leaves that to the garbage collector, and Ray ends the process without one: what wandb has buffered is lost.
    W&B's own process, too, must have written and ended by then. Python would wait for it at its exit; Ray kills a
    worker's children before that, and on a busy machine the last step was missing in the file.
    """
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        trackings = list(_OPEN)
        for tracking in trackings:
            tracking.finish(exit_code=exit_code)
        if any("wandb" in tracking.logger for tracking in trackings):
            import wandb

            wandb.teardown(exit_code=exit_code)


@contextmanager
def _default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set already: the user's own variables win."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _before(labels: Labels, backends: list[str], config: Mapping[str, Any]) -> None:
    if "trackio" in backends:
        # verl starts a run of its own only where none is there
        import trackio

        trackio.init(project=labels.project, name=labels.name, group=labels.group, config=dict(config))
    if "mlflow" in backends:
        _place_mlflow_artifacts(labels.project)


def _place_mlflow_artifacts(project: str) -> None:
    """In a local database an experiment's artifacts go beside it; MLflow's default is the folder of this process."""
    import mlflow

    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or os.environ.get("MLFLOW_RUN_ID"):
        return
    mlflow.set_tracking_uri(uri)
    if mlflow.get_experiment_by_name(project) is None:
        mlflow.create_experiment(project, artifact_location=(path.parent.resolve() / "mlflow-artifacts").as_uri())


def _after(labels: Labels, loggers: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> None:
    if "wandb" in loggers:
        for name, summary in WANDB_SUMMARIES.items():
            loggers["wandb"].define_metric(name, summary=summary)
    if "mlflow" in loggers:
        import mlflow

        own = dict.fromkeys(labels.tags, "")
        mlflow.set_tags({**own, **labels.facts, "group": labels.group, "setting": labels.setting})
        if manifest is not None:
            mlflow.log_dict(dict(manifest), "manifest.json")
    if "tensorboard" in loggers:
        writer = loggers["tensorboard"].writer
        rows = {"name": labels.name, "group": labels.group, "setting": labels.setting, **labels.facts}
        lines = [f"| {name} | {value} |" for name, value in rows.items()]
        own_tags = [f"| tags | {', '.join(labels.tags)} |"] if labels.tags else []
        writer.add_text("run", "\n".join(["| | |", "| --- | --- |", *lines, *own_tags]), 0)
        if manifest is not None:
            text = json.dumps(manifest, indent=2, ensure_ascii=False)
            writer.add_text("manifest", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        writer.flush()
