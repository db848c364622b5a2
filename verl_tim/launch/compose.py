"""From overrides to a config: Hydra's compose, with errors that say what to type instead."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, _utils
from omegaconf.errors import OmegaConfBaseException

from verl_tim import broken_yaml
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import DEFAULT_RECIPE, Recipe, closest, find_recipe, group_options
from verl_tim.launch.words import refuse_bare, with_bare_recipe

RECIPE_KEY = "recipe="
_SEVERAL = ("tracker",)  # groups of which a run may take several options


def split_recipe(overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe that `recipe=NAME`, or its bare name, names (default: cpu_grpo), and the other overrides.

    Raises LaunchError for a recipe that does not exist, one named twice, and a word that is no override.
    """
    overrides = with_bare_recipe(overrides)
    named = [word.removeprefix(RECIPE_KEY) for word in overrides if word.startswith(RECIPE_KEY)]
    rest = [word for word in overrides if not word.startswith(RECIPE_KEY)]
    if len(named) > 1:
        raise LaunchError.of("recipe", f"given more than once: {', '.join(named)}", "give one recipe")
    refuse_bare(rest)
    return find_recipe(named[0] if named else DEFAULT_RECIPE), rest


@contextmanager
def hydra_for(recipe: Recipe) -> Iterator[None]:
    """Hydra, initialised on the recipe's folder, and as it was before afterwards."""
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with _yaml_read_by_libyaml():
            if recipe.config_path.startswith("pkg://"):
                with initialize_config_module(recipe.config_path.removeprefix("pkg://"), version_base=None):
                    yield
            else:
                with initialize_config_dir(recipe.config_path, version_base=None):
                    yield
    finally:
        GlobalHydra.instance().hydra = previous


@functools.cache
def _omegaconf_loader() -> type:
    """OmegaConf's own loader with libyaml's parser below it."""
    python_loader = yaml.SafeLoader
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc]
    try:
        loader: type = _utils.get_yaml_loader()
    finally:
        yaml.SafeLoader = python_loader  # type: ignore[misc]
    return loader


@contextmanager
def _yaml_read_by_libyaml() -> Iterator[None]:
    """Patch of OmegaConf (2.3): a recipe is some forty YAML files, and PyYAML's parser in Python takes a third of a
    compose for them. Values are the same; without libyaml the parser in Python stays. Upstream: omry/omegaconf#1150,
    merged and not released.
    """
    if not yaml.__with_libyaml__:
        yield
        return
    loader, before = _omegaconf_loader(), _utils.get_yaml_loader
    _utils.get_yaml_loader = lambda: loader
    try:
        yield
    finally:
        _utils.get_yaml_loader = before


def compose_config(recipe: Recipe, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The recipe's config with the overrides applied, interpolations unresolved, by default without Hydra's own node.

    Call it within `hydra_for(recipe)`. Raises LaunchError for an unknown key, group or option (with the nearest known
    one), for several options of a group that takes one, and for a word that Hydra cannot parse.
    """
    try:
        config = compose(recipe.config_name, overrides=list(overrides), return_hydra_config=with_hydra)
    except OverrideParseException as error:
        raise LaunchError.of(*_explain_unparsed(error)) from error
    except MissingConfigException as error:
        raise LaunchError.of(*_explain_missing(error)) from error
    except ConfigCompositionException as error:
        raise LaunchError.of(*_explain_unknown_key(recipe, overrides, error)) from error
    except UnicodeDecodeError as error:
        remedy = f"save recipe {recipe.config_path}/{recipe.config_name}.yaml, or the file of its groups, as UTF-8"
        raise LaunchError.of("config", f"a file is not text: {error}", remedy) from error
    except ValueError as error:
        # Hydra's answer to a group that is given a number (trainer=5); it does not say which
        raise LaunchError.of(*_explain_group_value(overrides, error)) from error
    except yaml.YAMLError as error:
        problem, remedy = broken_yaml.explain(error)
        raise LaunchError.of("config", f"a file is not YAML: {problem}", remedy) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise LaunchError.of("config", str(error).strip(), "see the recipe's README for what can be set") from error
    _refuse_several(overrides)
    return config


def _refuse_several(overrides: Sequence[str]) -> None:
    """Hydra lays options of one group over each other, and the last would win, with what the others set left in it."""
    options = group_options()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        if group in options and group not in _SEVERAL and isinstance(value, list) and len(value) > 1:
            raise LaunchError.of(
                group,
                f"takes one option, and {value} are {len(value)}",
                f"known: {', '.join(options[group])}; one run for each: -m {group}={','.join(map(str, value))}",
            )


def _explain_unparsed(error: OverrideParseException) -> tuple[str, str, str]:
    key, _, value = str(error.override).partition("=")
    if value.startswith("~"):  # a shell expands it in an argument that begins with it only
        folder = os.path.expanduser(value)  # stays as it is where nobody has that name
        remedy = f"write {key}={folder}" if folder != value else f"nobody here has that home; write {key}=/FOLDER"
        return key, f"{value}: Hydra takes no ~ in a value", remedy
    remedy = "write KEY=VALUE; quote values with special characters: 'KEY=\"VALUE\"'"
    return error.override, str(error).splitlines()[0], remedy


def _explain_group_value(overrides: Sequence[str], error: ValueError) -> tuple[str, str, str]:
    options = group_options()
    for override in overrides:
        group, _, value = override.partition("=")
        if group in options and value not in options[group]:
            return group, f"has no option {value!r}", f"known: {', '.join(options[group])}"
    return "config", str(error).strip(), "see the recipe's README for what can be set"


def _explain_missing(error: MissingConfigException) -> tuple[str, str, str]:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = group_options().get(group) or list(error.options or [])
    if not group:
        return "recipe", str(error).splitlines()[0], "check the defaults list of the recipe"
    return group, f"has no option {option!r}", closest(option, options) + f"known: {', '.join(options)}"


def _explain_unknown_key(
    recipe: Recipe, overrides: Sequence[str], error: ConfigCompositionException
) -> tuple[str, str, str]:
    first_line, *more = str(error).splitlines()
    if not first_line.startswith("Could not override"):
        return "config", first_line, " ".join(more) or "see the recipe's README for what can be set"
    key = first_line.split("'")[1]
    of_hydra = [word for word in overrides if word.startswith("hydra.")]  # such as where to search
    known = sorted({*group_options(), *flat_keys(compose(recipe.config_name, overrides=of_hydra))})
    if key in known:  # a mapping whose entries are the user's own, given as a whole
        return key, "is not set so", " ".join(more).strip()
    near = [name for name in _nearest_keys(key, known) if not key.startswith(f"{name}.")]
    remedy = f"did you mean {' or '.join(near)}? " if near else ""
    if key.startswith("tim."):
        return key, "is not a key of the config", remedy + "docs/configuration.md has every key of tim"
    return key, "is not a key of the config", remedy + f"To add a key that verl or a library reads, write +{key}=..."


def _nearest_keys(key: str, known: Sequence[str], count: int = 3) -> list[str]:
    """Known keys that look like `key`: its siblings by their last word, the same last word elsewhere (for those who
    forgot the path), then whatever is near as a whole.
    """
    parent, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    near_siblings = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=count, cutoff=0.75)]
    begun = [name for last, name in siblings.items() if last.startswith(leaf) or leaf.startswith(last)]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = (
        []
        if near_siblings
        else difflib.get_close_matches(key, [name for name in known if not key.startswith(name)], n=count, cutoff=0.75)
    )
    return list(dict.fromkeys([*near_siblings, *begun, *same_leaf, *near]))[:count]


def flat_keys(config: DictConfig) -> Iterator[str]:
    """Dotted names of all leaves and of all inner nodes."""

    def walk(node: object, prefix: str) -> Iterator[str]:
        if isinstance(node, dict):
            for name, value in node.items():
                yield f"{prefix}{name}"
                yield from walk(value, f"{prefix}{name}.")

    yield from walk(OmegaConf.to_container(config, resolve=False, throw_on_missing=False), "")
