"""`verl-tim doctor`: every start-up check of a run, without starting it."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, report, stdout, table

NAME = "doctor"
HELP = "Check whether a run can start, and list every key that keeps it from it."
NEEDS_ARGUMENTS = False

# Checks of things that are made at the start, where the config leaves them to this package.
_OF_MODEL = ("model", "tokenizer")
_OF_DATA = ("data",)


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[recipe=NAME] [KEY=VALUE]...", help="As for train.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the checks."""
    from verl_tim.launch import prepare
    from verl_tim.launch.checks import one_per_key, run_checks
    from verl_tim.launch.start import composed

    with bad_input():
        config = composed(overrides or [])
        prepare.resolve(config)
    made_at_start: set[str] = set()
    if config.actor_rollout_ref.model.path is None:
        made_at_start.update(_OF_MODEL)
    if config.data.train_files is None or config.data.val_files is None:
        made_at_start.update(_OF_DATA)
    results = [
        # of two files one may be given, and be wrong
        (check, None if check.name in made_at_start and not found else found)
        for check, found in run_checks(config)
    ]
    findings = one_per_key(finding for _, found in results for finding in found or [])
    if as_json:
        print_json(
            {
                "ok": not findings,
                "checks": [
                    {"name": check.name, "state": _state(found), "findings": [vars(finding) for finding in found or []]}
                    for check, found in results
                ],
            }
        )
    else:
        colours = {"ok": "green", "fails": "red", "made at start": "dim"}
        rows = [
            (check.name, check.looks_at, f"[{colours[_state(found)]}]{_state(found)}[/]") for check, found in results
        ]
        table("Start-up checks", ("check", "looks at", "state"), rows)
        report(findings)
        if not findings:
            stdout().print("This run can start.")
    if findings:
        raise typer.Exit(1)


def _state(found: list | None) -> str:
    if found is None:
        return "made at start"
    return "fails" if found else "ok"
