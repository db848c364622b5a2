"""The files of a task, whatever kind it is: made here from a seed, or published."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tim.tasks.catalog import get_task
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.sources import PUBLISHED


@dataclass(frozen=True)
class TaskFiles:
    """What to give verl as `data.train_files` and `data.val_files`."""

    train: Path
    validation: tuple[Path, ...]


def task_spec(name: str, **settings: Any) -> dict[str, Any]:
    """What a task's files are a function of, checked; makes and fetches nothing.

    Args:
        settings: the rest of `tim.task`: of a task made here those of `dataset.build_dataset`, of a published one those
            of `task_files`.

    Raises:
        InputError: an unknown task, or a setting that cannot be. The message begins with the setting's name.
        TypeError: a setting that this kind of task does not have.
    """
    if name in PUBLISHED:
        return _published_spec(name, **settings)
    get_task(name)  # says what there is, before a setting is found to be missing
    from verl_tim.tasks.dataset import dataset_spec

    return dataset_spec(name, **settings)


def task_files(
    name: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True, **settings: Any
) -> TaskFiles:
    """Make, or find again, the files of a task.

    Args:
        name: of `catalog.get_task` or `published.sources.PUBLISHED`.
        settings: of a published task:
            validation: names of the published sets to validate on; by default its own.
            prompt_style: of all of them; by default each set's own.
            revision: of the set trained on; by default the pinned one.
            difficulty: empty; a published set has no generator.
            train_size, val_size: the first so many problems, of each validation set; by default all.

    A set without a training file (AIME) is trained on what it has: the same file as it validates on.

    Raises: as `task_spec`; InputError also for what cannot be fetched.
    """
    if name not in PUBLISHED:
        from verl_tim.tasks.dataset import build_dataset

        made = build_dataset(name, cache_dir=cache_dir, progress=progress, **settings)
        return TaskFiles(made.train, (made.validation,))
    from verl_tim.tasks.published.build import build_published

    task_spec(name, **settings)
    arguments = _arguments(name, **settings)
    built = {
        set_name: build_published(set_name, cache_dir=cache_dir, progress=progress, **each)
        for set_name, each in arguments.items()
    }
    train = built[name].train or built[name].validation
    assert train is not None
    validation = [built[each].validation for each in _validation(name, settings.get("validation"))]
    return TaskFiles(train, tuple(path for path in validation if path is not None))


def _published_spec(name: str, **settings: Any) -> dict[str, Any]:
    from verl_tim.tasks.published.build import published_spec

    return {set_name: published_spec(set_name, **each) for set_name, each in _arguments(name, **settings).items()}


def _arguments(
    name: str,
    *,
    validation: str | Sequence[str] | None = None,
    prompt_style: str | None = None,
    revision: str | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    difficulty: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """What each set is built with, by its name."""
    if difficulty:
        raise InputError(f"difficulty: {name} is published and has no generator to set; leave it empty")
    common = {"prompt_style": prompt_style, "val_size": val_size}
    sets = {each: dict(common) for each in _validation(name, validation)}
    sets[name] = {**common, "revision": revision, "train_size": train_size}
    return sets


def _validation(name: str, validation: str | Sequence[str] | None) -> list[str]:
    names = [name] if validation is None else [validation] if isinstance(validation, str) else list(validation)
    with_validation = sorted(row.name for row in PUBLISHED.values() if "validation" in row.splits)
    for each in names:
        if each not in with_validation:
            raise InputError(
                f"validation: {each!r} is no set to validate on; sets with a validation file: "
                f"{', '.join(with_validation)}, for instance tim.task.validation=[aime24]"
            )
    if not names:
        raise InputError(f"validation: names no set; sets with a validation file: {', '.join(with_validation)}")
    return names
