"""From what the user gave to a config that rules can read: a recipe and overrides, any YAML of verl's, a run folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_tim import broken_yaml
from verl_tim.correction import UnderscoreNumber, find_in_overrides, find_in_yaml
from verl_tim.home import expanded
from verl_tim.launch import prepare, underscores
from verl_tim.launch.checks import values
from verl_tim.launch.compose import compose_config, hydra_for, split_recipe
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import Recipe

_VERL_CONFIGS = "pkg://verl.trainer.config"
# verl's recipes search `file://verl/trainer/config`, which is there in a checkout of verl only.
_IN_A_CHECKOUT = "verl/trainer/config"
# Where a run leaves its config: this package's run folder, Hydra's output folder.
_IN_A_FOLDER = ("config.yaml", ".hydra/config.yaml")


@dataclass(frozen=True)
class Source:
    """A config to examine.

    Attributes:
        name: where it came from, for the report.
        config: complete and resolved.
        underscore_numbers: thresholds that YAML read as numbers, found in the text.
        is_a_run: it was read from the folder of a run, which therefore need not be free.
    """

    name: str
    config: DictConfig
    underscore_numbers: tuple[UnderscoreNumber, ...] = ()
    is_a_run: bool = False


def read(words: Sequence[str], *, config_path: str | None = None, config_name: str | None = None) -> Source:
    """The config that the words name.

    Args:
        words: a YAML file or the folder of a run, or nothing, or `recipe=NAME`; then overrides KEY=VALUE.
        config_path, config_name: a primary config as Hydra's command line takes it, instead of a file.

    Raises:
        LaunchError: a file that is absent or no YAML, a config that does not compose, words that are no overrides.
    """
    given = [word for word in words if "=" not in word and not word.startswith("~")]
    overrides = [word for word in words if word not in given]
    if len(given) > 1:
        raise LaunchError.of(given[1], "is one config too many", "give one file or folder, then KEY=VALUE")
    if config_path is not None or config_name is not None:
        if given:
            raise LaunchError.of(given[0], "is given beside --config-name", "give one of the two")
        return _of_hydra(config_path or ".", config_name or "ppo_trainer", overrides)
    files = [*given, *(word.removeprefix("recipe=") for word in overrides if _names_a_file(word))]
    if not files:
        return _of_recipe(overrides)
    if len(files) > 1 or any(word.startswith("recipe=") and not _names_a_file(word) for word in overrides):
        raise LaunchError.of("recipe", "is given beside a file or folder", "give one of the two")
    return _of_path(expanded(files[0]), [word for word in overrides if not word.startswith("recipe=")])


def _names_a_file(word: str) -> bool:
    return word.startswith("recipe=") and (word.endswith((".yaml", ".yml")) or "/" in word)


def _of_recipe(overrides: Sequence[str]) -> Source:
    recipe, rest = split_recipe(overrides)
    return _composed(recipe, rest, name=f"recipe {recipe.name}")


def _of_hydra(path: str, name: str, overrides: Sequence[str]) -> Source:
    name = name.removesuffix(".yaml").removesuffix(".yml")
    if path.startswith("pkg://"):
        return _composed(Recipe(name, path, name), overrides, name=f"{path}/{name}")
    file = expanded(path).absolute() / f"{name}.yaml"
    return _of_path(file, overrides)


def _of_path(path: Path, overrides: Sequence[str]) -> Source:
    if path.is_dir():
        file = next((path / name for name in _IN_A_FOLDER if (path / name).is_file()), None)
        if file is None:
            raise LaunchError.of(str(path), f"holds no {' or '.join(_IN_A_FOLDER)}", "give a run folder or a YAML")
        return _of_text(file, overrides, name=f"run {path}", is_a_run=True)
    if not path.is_file():
        raise LaunchError.of(str(path), "is neither file nor folder", "give a YAML file, a run folder, or KEY=VALUE")
    return _of_text(path, overrides, name=str(path))


def _of_text(file: Path, overrides: Sequence[str], *, name: str, is_a_run: bool = False) -> Source:
    """A YAML with a defaults list is composed as Hydra would; one without is what is set on top of verl's defaults."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise LaunchError.of(word, "is not an override", "write KEY=VALUE")
    try:
        text = file.read_text(encoding="utf-8")
        # OmegaConf's loader, since YAML 1.1 reads 1e-6 as text
        content: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem, remedy = broken_yaml.explain(error, file)
        raise LaunchError.of(str(file), f"cannot be read, it is not YAML: {problem}", remedy) from error
    except (OSError, OmegaConfBaseException) as error:
        raise LaunchError.of(str(file), f"cannot be read: {error}", "give a YAML file of verl") from error
    if not isinstance(content, Mapping) or not content:
        raise LaunchError.of(str(file), "holds no keys", "give a YAML file of verl")
    if "defaults" in content:
        recipe = Recipe(file.stem, str(file.absolute().parent), file.stem)
        if file.suffix != ".yaml":
            raise LaunchError.of(str(file), "has a defaults list, and Hydra reads *.yaml only", "rename it")
        return _composed(recipe, [*_search_path(content, overrides), *overrides], name=name)
    if not {"actor_rollout_ref", "data", "trainer", "algorithm"} & set(content):
        raise LaunchError.of(
            str(file),
            "has none of verl's groups (actor_rollout_ref, data, trainer, algorithm)",
            "give a config of verl",
        )
    numbers = (*find_in_yaml(text, str(file)), *find_in_overrides(overrides))
    with _on_verls_defaults(content) as recipe:
        source = _composed(recipe, overrides, name=name, is_a_run=is_a_run)
    return Source(name, source.config, numbers, is_a_run)


def _search_path(content: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The override that lets Hydra find verl's configs from any folder."""
    if any(word.lstrip("+").startswith("hydra.searchpath") for word in overrides):
        return []
    given = (content.get("hydra") or {}).get("searchpath") or []
    paths = [path for path in given if not str(path).rstrip("/").endswith(_IN_A_CHECKOUT)]
    if _VERL_CONFIGS not in paths:
        paths.append(_VERL_CONFIGS)
    return ["hydra.searchpath=[" + ",".join(f"'{path}'" for path in paths) + "]"]


@contextmanager
def _on_verls_defaults(content: Mapping[str, Any]) -> Iterator[Recipe]:
    """A primary config of verl's `ppo_trainer` with `content` on top, for Hydra to apply overrides to."""
    primary = {
        **{str(key): value for key, value in content.items() if key != "hydra"},
        "hydra": {"searchpath": [_VERL_CONFIGS]},
        "defaults": ["ppo_trainer", "_self_"],
    }
    with tempfile.TemporaryDirectory() as folder:
        OmegaConf.save(OmegaConf.create(primary), Path(folder) / "given.yaml")
        yield Recipe("given", folder, "given")


def _composed(recipe: Recipe, overrides: Sequence[str], *, name: str, is_a_run: bool = False) -> Source:
    with hydra_for(recipe):
        config = compose_config(recipe, overrides, with_hydra=True)
        numbers = tuple(underscores.numbers(config.hydra))
    with open_dict(config):
        del config["hydra"]
    has_tim = config.get("tim") is not None
    wrong = [found for found in values.check_structure(config) if has_tim or found.key != "tim"]
    if wrong:
        raise LaunchError(wrong)
    if {"run_dir", "cache_dir"} <= set(config.get("tim") or ()):  # a group by hand may be a part of it
        prepare.absolute_paths(config)
    prepare.resolve(config)
    return Source(name, config, numbers, is_a_run)
