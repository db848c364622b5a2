"""Which recipes there are, and where Hydra finds them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources

from verl_tim.home import expanded
from verl_tim.launch.errors import LaunchError

RECIPES_PACKAGE = "verl_tim.recipes"
CONFIGS_PACKAGE = "verl_tim.configs"
DEFAULT_RECIPE = "cpu_grpo"


@dataclass(frozen=True)
class Recipe:
    """A primary config, named as main_ppo's options --config-path and --config-name take it."""

    name: str
    config_path: str
    config_name: str


def recipe_names() -> list[str]:
    """The recipes that are installed with this package."""
    root = resources.files(RECIPES_PACKAGE)
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and (entry / f"{entry.name}.yaml").is_file())


def find_recipe(value: str) -> Recipe:
    """The recipe called `value`: an installed one by its name, or anybody's YAML by its path.

    Raises LaunchError for a name or file that does not exist.
    """
    if names_a_file(value):
        path = expanded(value).absolute()
        if not path.is_file():
            raise LaunchError.of(
                "recipe",
                f"there is no file {path}",
                "give the path of a YAML file, or one of: " + ", ".join(recipe_names()),
            )
        return Recipe(path.stem, str(path.parent), path.stem)
    names = recipe_names()
    if value not in names:
        raise LaunchError.of(
            "recipe", f"unknown recipe {value!r}", closest(value, names) + "installed: " + ", ".join(names)
        )
    return Recipe(value, f"pkg://{RECIPES_PACKAGE}.{value}", value)


def names_a_file(value: str) -> bool:
    """Whether a recipe is named by a path, and not by its name."""
    return value.endswith((".yaml", ".yml")) or "/" in value


def group_options() -> dict[str, list[str]]:
    """The config groups of this package and what each offers: {"rollout": ["stock", "vexact", ...], ...}."""
    root = resources.files(CONFIGS_PACKAGE)
    return {
        group.name: sorted(
            entry.name.removesuffix(".yaml") for entry in group.iterdir() if entry.name.endswith(".yaml")
        )
        for group in sorted(root.iterdir(), key=lambda entry: entry.name)
        if group.is_dir() and group.name != "__pycache__"
    }


def closest(word: str, known: list[str]) -> str:
    """`did you mean X? `, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""
