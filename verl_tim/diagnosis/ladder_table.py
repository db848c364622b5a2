"""A ladder's outcome in the terminal: a line of numbers for each scenario, what it counted on the line below.

The words are long and of every length, so that as a column they would leave none of the numbers room in a terminal of
80 columns, which is also what a log file has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from verl_tim.diagnosis.gate import RungResult, ScenarioResult

HEADINGS = ("", "", "tokens", "differing", "max |d|", "max ulp")
INDENT = 2


@dataclass(frozen=True)
class LadderTable:
    """Rungs as they were climbed. Printed by a rich console, at any width."""

    title: str
    rungs: Sequence[RungResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = {id(result): _cells(result) for rung in self.rungs for result in rung.results}
        widths = [max(map(cell_len, column)) for column in zip(HEADINGS, *rows.values(), strict=True)]
        gap = 2 if INDENT + sum(widths) + 2 * (len(widths) - 1) <= options.max_width else 1

        def line(cells: Sequence[str], style: str = "", state: str = "") -> Text:
            text = Text(" " * INDENT, no_wrap=True, overflow="fold")
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                blank = " " * (width - cell_len(cell))
                text.append(cell + blank if at < 2 else blank + cell, state if at == 1 else style)
                text.append(" " * gap if at + 1 < len(widths) else "")
            return text

        yield Text(self.title, style="italic")
        yield line(HEADINGS, "bold")
        for rung in self.rungs:
            state = "" if rung.results else ": not reached" if rung.skipped else ": no scenario ran"
            yield Text(rung.name, style="bold").append(state, "dim not bold")
            for result in rung.results:
                style = "bold red" if not result.passed else "green" if result.exact else "yellow"
                yield line(rows[id(result)], state=style)
                said = "; ".join(result.failures) or ", ".join(f"{name} {n:,}" for name, n in result.counts.items())
                if said:
                    yield Padding(Text(said, style="dim" if result.passed else ""), (0, 0, 0, 2 * INDENT))


def _cells(result: ScenarioResult) -> tuple[str, ...]:
    report = result.report
    state = "FAIL" if not result.passed else "pass" if result.exact else "size"
    if report is None:
        return (result.name, state, "–", "–", "–", "–")
    numbers = (f"{report.tokens:,}", f"{report.differing:,}", f"{report.max_abs:.3g}", f"{report.max_ulp:,}")
    return (result.name, state, *numbers)
