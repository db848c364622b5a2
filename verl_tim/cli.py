"""The console script `verl-tim`: one module of `verl_tim.commands` per command, imported only for its signature.

What a command needs beyond typer and rich it imports when it runs, so that `verl-tim --help` answers at once.
"""

from __future__ import annotations

import typer

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
from verl_tim.commands.output import CommandWithJson

app = typer.Typer(
    name="verl-tim",
    help="Zero training-inference mismatch for verl: exact rollouts, correction, diagnosis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

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


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
