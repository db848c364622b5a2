"""`verl-tim doctor`: everything in a config and on a machine that breaks exactness, a correction, or the run."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stdout

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
    why: Annotated[bool, typer.Option("--why", help="With every finding, the reason for its rule.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine a config."""
    from verl_tim.commands.doctor_text import show
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
                    {
                        "name": row.check.name,
                        "state": row.state,
                        "until": row.until,
                        "findings": [vars(one) for one in row.findings],
                    }
                    for row in result.checks
                ],
                "together": {
                    "remedy": result.together_remedy if result.together else None,
                    "rules": [one.rule for one in result.together],
                },
                "correction": correction.to_mapping() if correction is not None else None,
                "notes": [one.to_mapping() for one in result.violations if one.level.value == "note"],
            }
        )
    else:
        show(source.name, result, correction, machine=machine, why=why)
        if not (words or config_path or config_name):
            stdout().print(_NONE_NAMED.format(source=source.name), markup=False, soft_wrap=True)
    if result.errors:
        raise typer.Exit(1)
