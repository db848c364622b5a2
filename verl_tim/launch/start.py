"""From overrides, or from a composed config, to a config that verl can run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.launch import prepare, run_folder, underscores
from verl_tim.launch.checks import all_findings, values
from verl_tim.launch.compose import compose_config, hydra_for, split_recipe
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.recipes import Recipe
from verl_tim.launch.run_folder import KEY as FOLDER_KEY
from verl_tim.training.remedy import has_groups, typeable


def composed(overrides: Sequence[str]) -> DictConfig:
    """The config that `recipe=NAME KEY=VALUE ...` describes, paths absolute, interpolations left in it.

    Raises LaunchError for words, keys and options that do not exist, and for a band that YAML took for a number.
    """
    return composed_of(*split_recipe(overrides))


def composed_of(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """`composed`, of a recipe that is known already."""
    with hydra_for(recipe):
        config = compose_config(recipe, overrides, with_hydra=True)
        _refuse(underscores.find(config.hydra))
    with open_dict(config):
        del config["hydra"]
    with _typeable_behind(config):
        _check_structure(config)
        prepare.absolute_paths(config)
    return config


Made = dict[str, dict[str, Any]]
"""What runs of one command had made, by `prepare.to_make`: key -> path."""


def make_ready(
    config: DictConfig, *, progress: bool = True, folder_is_free: bool = True, made: Made | None = None
) -> None:
    """Absolute paths, missing model and data made, everything resolved and checked, in place.

    Args:
        folder_is_free: False for a caller who will reuse what the run folder may hold.
        made: of the runs before this one; what is in it is not looked for again, nor are all checks done twice.

    Raises LaunchError with all findings, their remedies typeable behind the config as it is given. What can be checked
    without model and data is checked before they are made: making them for a run that cannot start would waste minutes.
    """
    with _typeable_behind(config):
        _make_ready(config, progress, folder_is_free, made)


def _make_ready(config: DictConfig, progress: bool, folder_is_free: bool, made: Made | None) -> None:
    _check_plugin()
    _check_structure(config)
    prepare.absolute_paths(config)
    prepare.complete(config)
    wanted = prepare.to_make(config)
    spelt = False
    if made is not None and wanted in made:
        for key, path in made[wanted].items():
            OmegaConf.update(config, key, path)
    elif wanted:
        as_given = copy.deepcopy(config)
        prepare.resolve(as_given)
        _check(as_given, folder_is_free)
        prepare.make_missing(config, progress=progress)
        if made is not None:
            made[wanted] = prepare.made_paths(config)
        spelt = True  # what is made changes values, not keys
    prepare.resolve(config)
    _check(config, folder_is_free, spelt=spelt)


def ready(overrides: Sequence[str], *, progress: bool = True) -> DictConfig:
    """`composed`, then `make_ready`."""
    config = composed(overrides)
    make_ready(config, progress=progress)
    return config


def ready_of_several() -> Callable[[Recipe, Sequence[str]], DictConfig]:
    """`ready_of`, for all runs of one command: a model that sixty of them begin with is looked for, and its hundreds of
    megabytes are read and checked, once."""
    return partial(ready_of, made={})


def ready_of(recipe: Recipe, overrides: Sequence[str], *, made: Made | None = None) -> DictConfig:
    """`ready`, for one of several runs: of a recipe that is known already, and the folder may hold the run so far.

    Raises LaunchError, also for a folder with a run of other settings.
    """
    config = composed_of(recipe, overrides)
    make_ready(config, folder_is_free=False, made=made)
    _refuse(run_folder.check_same(config))
    return config


def _check_plugin() -> None:
    """verl imports plugins in silence; a part of ours that could not register must stop the run here."""
    from verl_tim.plugin import RegistrationError, ensure_registered

    try:
        ensure_registered()
    except RegistrationError as error:
        remedy = "install the versions that setup.py names (pip install -e .) and look at the cause above"
        raise LaunchError.of("verl.plugins", str(error), remedy) from error


def _check_structure(config: DictConfig) -> None:
    _refuse(values.check_structure(config))
    if not has_groups(config):
        # one by hand is enough for doctor, and for plain verl with the plugin
        problem = "is written by hand: it lacks what every group of this package adds to (run_dir, cache_dir, choices)"
        raise LaunchError.of("tim", problem, values.BEGIN_DEFAULTS)


@contextmanager
def _typeable_behind(config: DictConfig) -> Iterator[None]:
    """Remedies of what is refused inside, as they can be typed behind this config as it is now."""
    given = copy.deepcopy(config)
    try:
        yield
    except LaunchError as error:
        findings = [replace(one, remedy=typeable(one.remedy, given)) for one in error.findings]
        raise LaunchError(findings) from error.__cause__


def _check(config: DictConfig, folder_is_free: bool, *, spelt: bool = False) -> None:
    found = all_findings(config, spelt=spelt)
    _refuse(finding for finding in found if folder_is_free or finding.key != FOLDER_KEY)


def _refuse(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        raise LaunchError(found)
