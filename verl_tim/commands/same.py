"""`verl-tim same`: are two runs equal bit for bit, and if not, what differs first?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout, table

if TYPE_CHECKING:
    from verl_tim.diagnosis.same import Sameness

NAME = "same"
HELP = (
    "Are two runs equal bit for bit? Compares samples, token and batch dumps, metrics and checkpoints of two run "
    "folders, and names the first step and value that differs.\n\n"
    "Exit code 0: equal; 1: they differ; 2: they cannot be compared. Times, memory and the rollout's schedule are left "
    "out; differences of config and machine, and of generators that nobody seeded, are listed and decide nothing."
)

# Differences of config or manifest in the terminal; of other machines and versions there may be hundreds.
_SHOWN = 20


def command(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to hold against it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare two runs bit for bit."""
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.diagnosis.same import same_runs
    from verl_tim.launch.errors import LaunchError

    with bad_input():
        try:
            answer = same_runs(first, second)
        except DiagnosisError as error:
            remedy = "give the folders of two runs, as tim.run_dir named them"
            raise LaunchError.of_input(error, "RUN", remedy) from error
    if as_json:
        print_json(answer.to_dict())
    else:
        _print(answer)
    raise typer.Exit(0 if answer.equal else 1)


def _print(answer: Sameness) -> None:
    from verl_tim.diagnosis.compare import shown
    from verl_tim.diagnosis.restarts import in_words

    rows = [
        (
            section.name,
            "; ".join(
                [f"{section.compared:,} {section.unit}"] * (not section.note or section.compared > 0)
                + [section.note] * bool(section.note)
            ),
            f"{section.differing:,}",
        )
        for section in answer.sections
    ]
    all_of_it = "Every bit that was compared is equal" if answer.first is None else "Every bit that decides is equal"
    title = all_of_it if answer.equal else "The runs differ"
    table(title, ("", "compared", "differing"), rows)
    if answer.first is not None and not answer.equal:
        section, found = answer.first
        values = " and ".join("nothing" if value is None else value for value in (found.first, found.second))
        stdout().print(f"first: step {found.step}, {section}, {found.name}: {values}", soft_wrap=True, markup=False)
    for which, restarts in zip(("first", "second"), answer.restarts, strict=True):
        if restarts:
            stdout().print(f"- {which} run: {in_words(restarts)}", soft_wrap=True, markup=False)
    for what, differences in (("config", answer.config), ("manifest", answer.facts)):
        for difference in differences[:_SHOWN]:
            a, b = (shown(difference.values[side]) for side in ("first", "second"))
            stderr().print(f"- {what}: {difference.key} is {a} and {b}", soft_wrap=True, markup=False)
        if len(differences) > _SHOWN:
            stderr().print(f"- {what}: {len(differences) - _SHOWN} more (--json lists them)", markup=False)
