"""`verl-tim doctor`: everything in a config and on a machine that breaks exactness, a correction, or the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stdout, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from verl_tim.doctor.examine import Report
    from verl_tim.doctor.rule import Violation
    from verl_tim.doctor.source import Source

NAME = "doctor"
HELP = (
    "List every setting that breaks zero mismatch, silently disables a correction, or will hang.\n\n"
    "[dim]verl-tim doctor recipe=cpu_grpo rollout=stock\n\n"
    "verl-tim doctor runs/NAME\n\n"
    "verl-tim doctor any_verl_config.yaml actor_rollout_ref.rollout.n=8[/]\n\n"
    "Exit code: 0 no error, 1 at least one error, 2 the config cannot be read. docs/doctor.md lists the rules."
)

_NONE_NAMED = """No run was named: that was {source}, the default, as it is. A run of yours:
    verl-tim doctor recipe=NAME KEY=VALUE ...   what verl-tim train is given
    verl-tim doctor FILE.yaml KEY=VALUE ...     any config of verl's
    verl-tim doctor RUN_FOLDER                  the config of a run that was started"""

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE | FILE.yaml | RUN_FOLDER] [KEY=VALUE]...", help="A config of verl's, then overrides."
        ),
    ] = None,
    config_path: Annotated[
        str | None, typer.Option("--config-path", help="Folder or pkg:// of a primary config, as for main_ppo.")
    ] = None,
    config_name: Annotated[str | None, typer.Option("--config-name", help="Its name, as for main_ppo.")] = None,
    machine: Annotated[bool, typer.Option(help="Look at this machine too; the run will be here.")] = True,
    exact: Annotated[
        bool, typer.Option("--exact", help="What breaks exactness is an error, also where a mismatch was chosen.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine a config."""
    from verl_tim.doctor.examine import examine
    from verl_tim.doctor.machine import Machine
    from verl_tim.doctor.source import read
    from verl_tim.doctor.view import View
    from verl_tim.launch.prepare import find_made
    from verl_tim.launch.words import with_recipe
    from verl_tim.training.remedy import has_groups

    with bad_input():
        source = read(with_recipe(words or []), config_path=config_path, config_name=config_name)
        damaged = find_made(source.config) if machine and has_groups(source.config) else []
    view = View(source.config, Machine.here() if machine else None, source.underscore_numbers)
    result = examine(view, exact=exact, folder_is_free=not source.is_a_run, damaged=damaged)
    correction = view.correction
    if as_json:
        print_json(
            {
                "ok": not result.errors,
                "source": source.name,
                "counts": result.counts,
                "violations": [violation.to_mapping() for violation in result.violations],
                "checks": [
                    {"name": row.check.name, "state": row.state, "findings": [vars(one) for one in row.findings]}
                    for row in result.checks
                ],
                "correction": correction.to_mapping() if correction is not None else None,
                "notes": [one.to_mapping() for one in result.violations if one.level.value == "note"],
            }
        )
    else:
        _show(source, result, correction.describe() if correction is not None else "", machine=machine)
        if not (words or config_path or config_name):
            stdout().print(_NONE_NAMED.format(source=source.name), markup=False, soft_wrap=True)
    if result.errors:
        raise typer.Exit(1)


def _show(source: Source, result: Report, correction: str, *, machine: bool) -> None:
    from rich.text import Text

    colours = {"ok": "green", "fails": "red", "made at start": "dim", "not looked at": "yellow"}
    rows = [(row.check.name, row.check.looks_at, f"[{colours[row.state]}]{row.state}[/]") for row in result.checks]
    table(f"Start-up checks of {source.name}", ("check", "looks at", "state"), rows)
    if correction:
        stdout().print(correction, markup=False, soft_wrap=True)
    console = stdout()  # what was found is the result: `doctor FILE > log` keeps it
    for one in result.violations:
        _say(console, one, lead=Text(f"{one.key}: ", style=f"bold {_COLOURS[one.level.value]}"))
        for other in one.also:
            _say(console, other, lead=Text("  also: ", style="bold"))
    counts = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in result.counts.items())
    if blocking := sum(one.blocks for one in result.violations):
        counts += f"; {blocking} of the errors keep{'s' * (blocking == 1)} the run from starting"
    if result.violations:
        said = f"In {source.name}{' and on this machine' if machine else ''}: {counts}."
    elif machine:
        said = f"Nothing found in {source.name}, nor on this machine: this run can start."
    else:
        said = f"Nothing found in {source.name}."
    console.print(said if machine else f"{said} This machine was left out.", markup=False, soft_wrap=True)


def _say(console: Console, one: Violation, *, lead: Text) -> None:
    """What one rule found: what is there, which rule says so and why, what to do."""
    from rich.text import Text

    words = [one.level.value]
    # what does not start hangs nowhere, and a note's severity is its level
    if one.severity.value != "note" and not (one.blocks and one.rule.startswith("start.")):
        words.append(one.severity.value)
    if one.blocks:
        words.append("keeps the run from starting")
    console.print(Text.assemble(lead, one.problem), soft_wrap=True)
    console.print(Text(f"  {one.rule} ({', '.join(words)}): {one.why}", style="dim"))
    console.print(Text.assemble(("  -> ", "bold"), one.remedy), soft_wrap=True)
