"""The commands that the pages show exist, and every config that they name composes."""

from __future__ import annotations

import shlex

import pytest

from tests.docs.pages import commands_of
from verl_tim.launch.start import composed

PAGES = ("quickstart.md", "tracking.md")
CONFIGS = [
    (page, command)
    for page in PAGES
    for command in commands_of(page)
    if any(f"verl-tim {name} " in command for name in ("train", "plan", "doctor", "preflight", "launch"))
]


@pytest.mark.parametrize(("page", "command"), CONFIGS)
def test_a_config_that_a_page_names_composes(page, command):
    words = shlex.split(command)
    overrides = [word for word in words[words.index("verl-tim") + 2 :] if "=" in word and not word.startswith("-")]
    assert overrides, command
    config = composed(overrides)
    recipe = next(word for word in overrides if word.startswith("recipe=")).removeprefix("recipe=")
    assert config.tim.choices.recipe == recipe


def test_every_command_that_a_page_shows_exists():
    import typer.main

    from verl_tim.cli import app

    known = typer.main.get_command(app)
    assert len(CONFIGS) > 8
    for page in PAGES:
        for command in commands_of(page):
            words = shlex.split(command)
            if "verl-tim" not in words:
                continue
            name, *rest = words[words.index("verl-tim") + 1 :]
            command_of = known.commands[name]
            if hasattr(command_of, "commands"):  # `launch slurm`
                command_of = command_of.commands[rest.pop(0)]
            options = {option for parameter in command_of.params for option in parameter.opts}
            for word in rest:
                assert not word.startswith("--") or word.partition("=")[0] in options, command
