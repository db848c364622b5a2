"""What will be made at the start: can it be made of these settings, and is there a place for it?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.home import NOBODY, REMEDY, expanded, of_nobody
from verl_tim.launch.checks.keys import MADE_FROM
from verl_tim.launch.errors import Finding


def check_settings(config: DictConfig) -> Iterator[Finding]:
    """Settings of `tim.task` and `tim.model` of which no data and no model can be made."""
    from verl_tim.tasks.base_model import base_model_spec
    from verl_tim.tasks.task_data import task_spec

    null = {key for key in MADE_FROM if OmegaConf.select(config, key, throw_on_missing=False) is None}
    of_task = []
    if null & {"data.train_files", "data.val_files"}:
        of_task = list(_of_group(config, "tim.task", "name", task_spec))
        yield from of_task
    if "actor_rollout_ref.model.path" in null:
        said = {finding.problem for finding in of_task}  # the model's task and difficulty are, by default, the data's
        yield from (f for f in _of_group(config, "tim.model", "kind", base_model_spec) if f.problem not in said)


def check_places(config: DictConfig) -> Iterator[Finding]:
    """Folders that cannot be made or written to."""
    refused: list[Path] = []
    for key, given in _places(config):
        if of_nobody(given):  # verl would make a folder of that name
            yield Finding(key, f"{given}: {NOBODY}", REMEDY)
            continue
        folder = expanded(given).absolute()
        # the part of the path that is there already
        there = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
        if any(there == place or place in there.parents for place in refused):
            continue  # said for the folder that holds this one
        if not there.is_dir():
            yield Finding(key, f"{folder} cannot be a folder: {there} is none", f"give a folder: {key}=FOLDER")
        elif problem := _not_writable(there):
            yield Finding(key, f"{there} cannot be written to ({problem})", f"give a folder of yours: {key}=FOLDER")
        else:
            continue
        refused.append(there)


def _places(config: DictConfig) -> Iterator[tuple[str, str]]:
    """The folders that this run will write to, by the key that names each."""
    keys = ["tim.run_dir", "tim.cache_dir"]
    if config.trainer.save_freq > 0:
        keys.append("trainer.default_local_dir")
    if OmegaConf.select(config, "tim.dump.every"):
        keys.append("tim.dump.dir")
    keys += ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    for key in keys:
        folder = OmegaConf.select(config, key)
        if folder and "://" not in str(folder):
            yield key, str(folder)


def _not_writable(folder: Path) -> str:
    """Why no file can be made in a folder, found by making one: permissions do not tell of quotas, or of /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _of_group(config: DictConfig, group: str, named_by: str, specification: Callable[..., Any]) -> Iterator[Finding]:
    from verl_tim.tasks.errors import InputError

    settings: Any = OmegaConf.to_container(OmegaConf.select(config, group), resolve=True)
    name = settings.pop(named_by, None)
    if not name or (group == "tim.model" and not settings.get("task")):
        return  # said where it is made, or by the check of the keys
    try:
        specification(name, **settings)
    except InputError as error:
        # its messages begin with the setting's name
        setting, colon, problem = str(error).partition(": ")
        inner = named_by if setting in ("task", "kind") and setting not in settings else setting
        key = f"{group}.{inner}" if colon and inner in {named_by, *settings} else group
        yield Finding(key, problem if key != group else str(error), f"see configs/{group.removeprefix('tim.')}/")
    except TypeError as error:
        yield Finding(group, str(error), f"see configs/{group.removeprefix('tim.')}/ for the settings")
