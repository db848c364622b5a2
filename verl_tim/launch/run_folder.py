"""The run folder, as far as starting a run concerns it: it must be free, and it gets the resolved config."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.diagnosis.manifest import flatten
from verl_tim.diagnosis.run_folder import (
    LOG_NAME,
    RunFolder,
    RunFolderError,
    describe_run,
    holds_run,
    is_resumable,
    read_jsonl_metrics,
)
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.training.checkpoints import TRACKER

KEY = "tim.run_dir"
LOG = LOG_NAME


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a full disk leaves the old one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def resumes(config: DictConfig) -> bool:
    """True when verl shall go on from a checkpoint, so that the folder may hold the run so far."""
    return str(config.trainer.resume_mode) != "disable"


def has_checkpoint(config: DictConfig) -> bool:
    """Whether the run's folder has one to go on from."""
    return (Path(config.trainer.default_local_dir) / TRACKER).exists()


def check_free(config: DictConfig) -> Iterator[Finding]:
    """A finding if `tim.run_dir` holds a run (and this one does not resume it), or cannot be a folder."""
    folder = Path(config.tim.run_dir)
    if folder.exists() and not folder.is_dir():
        yield Finding(KEY, f"{folder} is a file", f"give a folder: {KEY}=runs/NAME")
    elif not resumes(config) and folder.is_dir() and holds_run(folder):
        remedy = f"give another folder ({KEY}=runs/NAME) or remove that one"
        if has_checkpoint(config):
            remedy += "; to go on from its checkpoint: trainer.resume_mode=auto"
        else:
            remedy += "; it left no checkpoint to go on from (trainer.save_freq)"
        yield Finding(KEY, f"{folder} holds a run already ({describe_run(folder)})", remedy)


def claim(config: DictConfig) -> RunFolder:
    """Take the run folder and write config.yaml into it.

    Args:
        config: resolved, without Hydra's node.

    Raises LaunchError if it holds another run, or was taken a moment ago.
    """
    try:
        return RunFolder.create(config.tim.run_dir, _plain(config), resume=resumes(config))
    except RunFolderError as error:
        raise LaunchError.of_input(error, KEY, f"{KEY}=runs/NAME") from error
    except OSError as error:
        raise LaunchError.of(
            KEY, f"cannot be written: {error}", f"give a folder with room that can be written to: {KEY}=runs/NAME"
        ) from error


class State(Enum):
    """What a run folder holds, seen from a config that would run there."""

    FREE = "free"
    FINISHED = "finished"
    UNFINISHED = "unfinished"
    OTHER = "other"


def state_of(config: DictConfig, *, resumable: bool = False) -> tuple[State, str]:
    """The state of `tim.run_dir`, and for OTHER the first key in which the run there differs.

    Args:
        config: resolved, without Hydra's node; a run is the same run if its config.yaml says the same.
        resumable: keys that a resumed run may change (`is_resumable`) are no difference.

    Raises:
        LaunchError: what the folder holds is damaged.
    """
    folder = Path(config.tim.run_dir)
    if not folder.is_dir() or not holds_run(folder):
        return State.FREE, ""
    try:
        there, here = flatten(RunFolder(folder).config() or {}), flatten(_plain(config))
        for key in [*here, *there]:
            if here.get(key) != there.get(key) and not (resumable and is_resumable(key)):
                return State.OTHER, key
        log = read_jsonl_metrics(folder)
    except RunFolderError as error:
        raise LaunchError.of_input(error, KEY, f"remove {folder}, or give another folder: {KEY}=FOLDER") from error
    last = log.steps[-1] if log is not None and log.steps else 0
    return (State.FINISHED if last >= config.trainer.total_training_steps else State.UNFINISHED), ""


def check_same(config: DictConfig) -> Iterator[Finding]:
    """A finding if `tim.run_dir` holds a run with other settings than this one's."""
    state, differing = state_of(config, resumable=True)
    if state is State.OTHER:
        yield Finding(
            KEY,
            f"{config.tim.run_dir} holds a run with other settings (first difference: {differing})",
            f"remove that folder, or give another one: {KEY}=FOLDER",
        )


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
