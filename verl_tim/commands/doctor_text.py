"""What `verl-tim doctor` prints for people: the checks, what was found by what it does, and a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from verl_tim.commands.output import stdout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from verl_tim.correction import RolloutCorrectionConfig
    from verl_tim.doctor.examine import Report
    from verl_tim.doctor.rule import Violation

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_BLOCKS = "keeps the run from starting"


def show(source: str, result: Report, correction: RolloutCorrectionConfig | None, *, machine: bool, why: bool) -> None:
    """Print a report on stdout: what was found is the result, and `doctor FILE > log` keeps it.

    Args:
        source: what was read.
        machine: whether this machine was looked at.
        why: say the reason of every rule, too.
    """
    console = stdout()
    console.print(f"Start-up checks of {source}: {'; '.join(_states(result))}", markup=False, soft_wrap=True)
    if correction is not None:
        told = correction.describe() if correction.enabled else "rollout correction: none"
        console.print(told, markup=False, soft_wrap=True)
    for title, violations in _groups(result.violations).items():
        _say_group(console, title, violations, result, why)
    console.print(_sentence(source, result, machine), markup=False, soft_wrap=True)
    if machine and (local := [one for one in result.violations if one.of_machine and one.level.value != "note"]):
        told = "1 of them is" if len(local) == 1 else f"{len(local)} of them are"
        where = "if the run will be elsewhere, leave it out: verl-tim doctor --no-machine ..."
        console.print(f"{told} about this machine; {where}", markup=False, soft_wrap=True)
    if result.violations and not why:
        console.print("The reason of every rule: --why", style="dim", soft_wrap=True)


def _states(result: Report) -> Iterator[str]:
    """The checks by how they went, those that need an eye by name."""
    by_state: dict[str, list[str]] = {}
    for row in result.checks:
        state = row.state if row.until is None else f"not looked at before {row.until} is right"
        by_state.setdefault(state, []).append(row.check.name)
    for state, names in by_state.items():
        yield f"{len(names)} ok" if state == "ok" else f"{', '.join(names)}: {state}"


def _groups(violations: Iterable[Violation]) -> dict[str, list[Violation]]:
    """By what they do; the order of the report is kept."""
    groups: dict[str, list[Violation]] = {}
    for one in violations:
        title = _BLOCKS if one.blocks else one.severity.value
        groups.setdefault(f"{title} ({one.level.value})" if title != one.level.value else title, []).append(one)
    return groups


def _say_group(console: Console, title: str, violations: list[Violation], result: Report, why: bool) -> None:
    from rich.text import Text

    style = _COLOURS[violations[0].level.value]
    console.print(Text(f"\n{title[:1].upper()}{title[1:]}: {len(violations)}", style=f"bold {style}"))
    together = [one for one in violations if one in result.together]
    for one in violations:
        if one not in together:
            _say(console, one, Text(f"  {one.key}: ", style=style), why=why)
            for other in one.also:
                _say(console, other, Text("    also: ", style="bold"), why=why, indent=6)
    if together:
        console.print(Text(f"  These {len(together)} are mended together:"))
        console.print(Text.assemble(("    -> ", "bold"), result.together_remedy), soft_wrap=True)
    for one in together:
        _say(console, one, Text(f"  {one.key}: ", style=style), why=why, remedy=why)


def _say(console: Console, one: Violation, lead: Text, *, why: bool, remedy: bool = True, indent: int = 4) -> None:
    """What one rule found: what is there, which rule says so and why, what to do."""
    from rich.text import Text

    console.print(Text.assemble(lead, one.problem, (f" [{one.rule}]", "dim")), soft_wrap=True)
    if why:
        console.print(Text(f"{' ' * indent}{one.why}", style="dim"), soft_wrap=True)
    if remedy:
        console.print(Text.assemble((f"{' ' * indent}-> ", "bold"), one.remedy), soft_wrap=True)


def _sentence(source: str, result: Report, machine: bool) -> str:
    """What came out, in a line."""
    counts = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in result.counts.items())
    if blocking := sum(one.blocks for one in result.violations):
        all_of_them = "the error" if blocking == 1 else "all errors"
        who = all_of_them if blocking == len(result.errors) else f"{blocking} of the errors"
        counts += f"; {who} keep{'s' * (blocking == 1)} the run from starting"
    if result.violations:
        said = f"\nIn {source}{' and on this machine' if machine else ''}: {counts}."
    elif machine:
        said = f"Nothing found in {source}, nor on this machine: this run can start."
    else:
        said = f"Nothing found in {source}."
    return said if machine else f"{said} This machine was left out."
