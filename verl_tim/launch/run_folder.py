"""The run folder, as far as starting a run concerns it: it must be free, and it gets the resolved config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
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
    kept_as,
    progress_of,
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
    """A finding if `tim.run_dir` cannot be a folder, or holds a run that this one does not resume, or that it shall
    resume and that is finished, with no checkpoint to go on from."""
    folder = Path(config.tim.run_dir)
    if folder.exists() and not folder.is_dir():
        yield Finding(KEY, f"{folder} is a file", f"give a folder: {KEY}=runs/NAME")
    elif not folder.is_dir() or not holds_run(folder):
        return
    elif not resumes(config):
        remedy = f"give another folder ({KEY}=runs/NAME) or remove that one"
        if has_checkpoint(config):
            remedy += "; to go on from its checkpoint: trainer.resume_mode=auto"
        else:
            remedy += "; it left no checkpoint to go on from (trainer.save_freq)"
        yield Finding(KEY, f"{folder} holds a run already ({describe_run(folder)})", remedy)
    elif _begins_at_zero(config):
        # one that was cut off begins anew, and its files are kept; of a finished one that is hardly what was meant
        with suppress(RunFolderError):  # what is damaged, `claim` names
            progress = progress_of(folder)
            if progress.finished:
                problem = f"{folder} holds a run, {progress}; there is nothing to go on from, no checkpoint in "
                yield Finding(
                    KEY, problem + str(config.trainer.default_local_dir), f"give another folder: {KEY}=runs/NAME"
                )


def begins_anew(config: DictConfig) -> str | None:
    """What to say, before `claim`, of a run that shall go on from the last checkpoint of its folder where there is
    none; None of the others."""
    folder = Path(config.tim.run_dir)
    if not (folder.is_dir() and holds_run(folder) and _begins_at_zero(config)):
        return None
    return (
        f"there is no checkpoint in {config.trainer.default_local_dir}: this run begins from step 0; the earlier files "
        f"are kept in {folder}: {', '.join(kept_as(folder).values())}"
    )


def _begins_at_zero(config: DictConfig) -> bool:
    """Whether verl looks for a checkpoint, and does not find one: it then begins without a word."""
    return str(config.trainer.resume_mode) == "auto" and not has_checkpoint(config)


def claim(config: DictConfig) -> RunFolder:
    """Take the run folder and write config.yaml into it.

    Args:
        config: resolved, without Hydra's node.

    Raises LaunchError if it holds a run that this one does not go on with, or was taken a moment ago.
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
        found = RunFolder(folder).config() or {}
        there, here = flatten(found), flatten(_plain(config))
        for key in [*here, *there]:
            if here.get(key) != there.get(key) and not (resumable and is_resumable(key)):
                return State.OTHER, key
        progress = replace(progress_of(folder, found), total=config.trainer.total_training_steps)
    except RunFolderError as error:
        raise LaunchError.of_input(error, KEY, f"remove {folder}, or give another folder: {KEY}=FOLDER") from error
    return (State.FINISHED if progress.finished else State.UNFINISHED), ""


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
