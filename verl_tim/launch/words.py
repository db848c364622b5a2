"""The words of a command line that are no overrides: a config's name, or a KEY=VALUE that was taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import closest, group_options, names_a_file, recipe_names


def with_recipe(words: Sequence[str]) -> list[str]:
    """The words of a command that takes a recipe by its bare name, with `recipe=NAME` in its place.

    What is there wins: a run folder is called like its recipe more often than not.

    Raises:
        LaunchError: a word that is neither recipe, file, folder nor override.
    """
    recipes, found = recipe_names(), list(words)
    for index, word in enumerate(words):
        if _is_override(word) or names_a_file(word) or Path(word).exists():
            continue
        if word in recipes:
            found[index] = f"recipe={word}"
            continue
        near = closest(word, recipes)
        remedy = _put_together(words, index) or f"{near}installed: {', '.join(recipes)}; or give a YAML or a run folder"
        raise LaunchError.of(word, "is neither a recipe, a file nor a folder", remedy)
    return found


def with_bare_recipe(words: Sequence[str]) -> list[str]:
    """The words of a command that takes overrides only, with `recipe=NAME` in the place of a recipe's bare name.

    A name behind a bare word, or behind `KEY=`, is a KEY=VALUE that was taken apart, and is left for `refuse_bare`.
    """
    recipes = recipe_names()
    before = ["", *words]
    return [
        f"recipe={word}"
        if word in recipes and (not last or last in recipes or (_is_override(last) and not last.endswith("=")))
        else word
        for last, word in zip(before, words, strict=False)
    ]


def refuse_bare(words: Sequence[str]) -> None:
    """
    Raises:
        LaunchError: a word that is no override; the remedy is the override that was meant, where one can be seen.
    """
    for index, word in enumerate(words):
        if _is_override(word):
            continue
        remedy = "write KEY=VALUE, for example rollout=vexact or trainer.total_training_steps=20"
        recipes = recipe_names()
        if word in recipes or names_a_file(word):
            remedy = f"write recipe={word}"
        elif near := closest(word, recipes):
            remedy = f"{near}write recipe=NAME"
        raise LaunchError.of(word, "is not an override", _put_together(words, index) or remedy)


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _put_together(words: Sequence[str], index: int) -> str:
    """KEY=VALUE of a key that is followed by a bare value (or `= VALUE`, `=VALUE`); empty where none can be seen."""
    key = words[index]
    value = next((part for word in words[index + 1 : index + 3] if (part := word.removeprefix("="))), "")
    if key in ("recipe", *group_options()):
        return f"write {key}={value}" if value and not _is_override(value) else f"write KEY=VALUE: {key}=NAME"
    dotted = "." in key and not names_a_file(key)
    return f"write {key}={value}" if dotted and value and not _is_override(value) else ""
