"""What has changed since a run of a matrix ended well, though the overrides are the same: a recipe's own file, an
option of a group, a default of verl's.

`matrix.json` knows a run by its overrides. Its folder keeps the whole config that it ran with, and that one is held
against what the same overrides compose to now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.diagnosis.config_diff import diff_configs
from verl_tim.diagnosis.manifest import Difference
from verl_tim.diagnosis.run_folder import CONFIG_NAME, RunFolder, RunFolderError, is_resumable
from verl_tim.launch import prepare
from verl_tim.launch.checks.keys import MADE_FROM
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.matrix import Matrix, finished
from verl_tim.launch.recipes import Recipe
from verl_tim.launch.record import RECORD
from verl_tim.launch.run_folder import KEY

THEN, NOW = "then", "now"
_SHOWN = 3
# A resumed run may have others; of one that has ended they say whether it has done all that is asked for.
_LENGTHS = ("trainer.total_training_steps", "trainer.total_epochs")


def changed(matrix: Matrix, composed: Callable[[Recipe, Sequence[str]], DictConfig]) -> dict[str, list[Difference]]:
    """Of each run that counts as finished and is another now, the keys that differ; those alone whose folder is there.

    Args:
        composed: `start.composed_of`.

    Raises:
        LaunchError: a folder's config that cannot be read, and what does not compose any more.
    """
    done = finished(matrix)
    found = {
        cell.name: differences(composed(cell.recipe or matrix.recipe, cell.overrides), matrix.folder / cell.name)
        for cell in matrix.cells
        if cell.is_in(done) and (matrix.folder / cell.name / CONFIG_NAME).is_file()
    }
    return {name: ones for name, ones in found.items() if ones}


def differences(config: DictConfig, folder: Path) -> list[Difference]:
    """Keys that decide what is trained, in which a run differs from the one in a folder; sorted.

    Where a run lies, its trackers, checkpoints and restarts decide nothing, nor does what a path begins with.

    Args:
        config: composed, paths absolute; changed in place.
        folder: of a run, with its config.
    """
    try:
        there = RunFolder(folder).config() or {}
    except RunFolderError as error:
        raise LaunchError.of_input(error, KEY, f"remove {folder}, and the run from {RECORD} beside it") from error
    prepare.complete(config)
    with open_dict(config):
        for key in MADE_FROM:  # made from `tim.task` and `tim.model`, which are compared themselves
            if OmegaConf.select(config, key, throw_on_missing=False) is None:
                OmegaConf.update(config, key, OmegaConf.select(OmegaConf.create(there), key))
    prepare.resolve(config)
    here = json.loads(json.dumps(OmegaConf.to_container(config), default=str))
    found = diff_configs({THEN: there, NOW: here}, include_rollout=True)
    return [
        one
        for one in found
        if (one.key in _LENGTHS or not is_resumable(one.key))
        and _named(one.key, one.values[THEN]) != _named(one.key, one.values[NOW])
    ]


def _named(key: str, value: Any) -> Any:
    """A value, of a path its name alone; of data the folder's, too, since files of all sets are called alike."""
    if isinstance(value, list):
        return [_named(key, one) for one in value]
    if isinstance(value, str) and value.startswith(("/", "~/", "./")):
        return Path(value).parts[-2 if key.startswith("data.") else -1 :]
    return value


def in_words(matrix: Matrix, found: Mapping[str, Sequence[Difference]]) -> list[str]:
    """A line for each run, and one with what to do."""
    lines = []
    for name, ones in found.items():
        shown = "; ".join(f"{one.key}: {_text(one, THEN)} then, {_text(one, NOW)} now" for one in ones[:_SHOWN])
        more = f"; and {len(ones) - _SHOWN} more" if len(ones) > _SHOWN else ""
        lines.append(f"{name} has finished with other settings than these, and is left as it is: {shown}{more}")
    if lines:
        lines.append(
            f"to do such a run anew, remove its folder in {matrix.folder} and its line in {RECORD} there; or give "
            f"another folder: {KEY}=FOLDER"
        )
    return lines


def as_json(found: Mapping[str, Sequence[Difference]]) -> dict[str, dict[str, Any]]:
    """Run -> key -> its two values."""
    return {name: {one.key: one.values for one in ones} for name, ones in found.items()}


def _text(difference: Difference, when: str) -> str:
    return json.dumps(difference.values[when], ensure_ascii=False)
