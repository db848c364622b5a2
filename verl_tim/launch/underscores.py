"""Bands that YAML reads as numbers (`0.5_5` unquoted is 0.55), looked for in everything a Hydra config was composed of.

After composing nothing shows what was written, so this reads the overrides and the text of every file in the defaults
list: the recipe, its bases, the chosen options, whether installed or the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_tim.correction import UnderscoreNumber, find_in_overrides, find_in_yaml, refuse_underscore_numbers
from verl_tim.correction.thresholds import THRESHOLD_KEYS
from verl_tim.launch.errors import Finding


def find(hydra: DictConfig) -> Iterator[Finding]:
    """One finding per underscore number, naming the override, or the file and its line.

    Args:
        hydra: Hydra's own node of the composed config; Hydra is still initialised on it.
    """
    for number in numbers(hydra):
        error = number.error()
        yield Finding(f"algorithm.rollout_correction.{error.key}", f"is {error.value}: {error.problem}", error.remedy)


def refuse_in_this_job() -> None:
    """For a process that Hydra started (`python -m verl.trainer.main_ppo`); elsewhere there is no text to look at.

    Raises:
        verl_tim.correction.ConfigError: naming the key, where it stands, and how to write the band.
    """
    if HydraConfig.initialized() and GlobalHydra.instance().is_initialized():
        refuse_underscore_numbers(numbers(HydraConfig.get()))


def numbers(hydra: Any) -> Iterator[UnderscoreNumber]:
    """Underscore numbers in the overrides and in every file; Hydra is still initialised on its node `hydra`."""
    yield from find_in_overrides(_written(hydra.overrides.task))
    for name, text in _texts(hydra):
        if any(key in text for key in THRESHOLD_KEYS):  # parsing all of them takes as long as composing
            yield from find_in_yaml(text, name)


def _texts(hydra: Any) -> Iterator[tuple[str, str]]:
    """Path and text of each file in the defaults list, from the first source that has it, as Hydra does."""
    # what sets a key chooses no file; a group's name has no dot, unless behind its package's @
    chosen = [
        word for word in _written(hydra.overrides.task) if "." not in (key := word.partition("=")[0]) or "@" in key
    ]
    sources = tuple((source.schema, source.path) for source in hydra.runtime.config_sources)
    for file in _files(hydra.job.config_name, (*_written(hydra.overrides.hydra), *chosen), sources):
        yield str(file), file.read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def _files(name: str, overrides: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """The files of a defaults list: of a matrix, whose runs differ in their seed too, once for every choice of groups.

    Takes as long as composing; Hydra is still initialised on what these are of.
    """
    defaults = GlobalHydra.instance().config_loader().compute_defaults_list(name, list(overrides), RunMode.RUN)
    roots: list[Any] = []
    for schema, path in sources:
        if schema == "file":
            roots.append(Path(path))
        elif schema == "pkg" and path:
            roots.append(resources.files(path.replace("/", ".")))
    found = []
    for place in dict.fromkeys(default.config_path for default in defaults.defaults if default.config_path):
        parts = f"{place.removesuffix('.yaml')}.yaml".split("/")
        file = next((file for root in roots if (file := root.joinpath(*parts)).is_file()), None)
        if file is not None:  # Hydra's own defaults may be dataclasses
            found.append(file)
    return tuple(found)


def _written(overrides: Any) -> list[str]:
    """As they were typed; reading them one by one would resolve a `${key}` in them."""
    plain: Any = OmegaConf.to_container(overrides, resolve=False)
    return plain
