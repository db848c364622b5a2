"""A comparison in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl_tim.diagnosis.band_words import band_cells, band_notes, changed, left
from verl_tim.diagnosis.compare import NO_BASELINE, SUMMARY_STEPS, Comparison, shown
from verl_tim.diagnosis.formats import written

NAME_WIDTH = 6  # at least so many letters of a name stand on one line
BORDER = 3  # what a column takes beside its text: a rule and a blank on either side
TRIPLE = ("first", "last", "mean")


def comparison_table(comparison: Comparison) -> Group:
    """The verdict, what differs, what leaves the band first, the summary, and what the names in both mean."""
    verdict = comparison.verdict
    parts: list[Any] = [Padding(Text(verdict.lead), (0, 0, 1, 0))]
    parts += [Text(f"! {alert}", style="bold red") for alert in verdict.alerts]
    parts += [Text(f"- {note}", style="yellow") for note in verdict.notes]
    parts += _differences(comparison)
    if len(comparison.groups) > 1:
        parts += _early_warning(comparison)
    parts += [_Summary(comparison), Text(SUMMARY_STEPS, style="dim")]
    parts += [Text(f"{term.name}: {term.meaning}", style="dim") for term in comparison.terms()]
    return Group(*parts)


@dataclass(frozen=True)
class _Summary:
    """The summary, as many groups beside each other as the terminal has room for and the others below."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [
            (row.label, [[written(value, row.kind) for value in values] for values in row.values])
            for row in self.comparison.summary()
        ]
        widths = [
            [max(map(cell_len, column), default=0) for column in zip(TRIPLE, *(of[at] for _, of in rows), strict=True)]
            for at in range(len(self.comparison.groups))
        ]
        label = max((cell_len(name) for name, _ in rows), default=0)
        left = list(range(len(widths)))
        while left:
            taken, room = 0, options.max_width - label - BORDER - 1
            while taken < len(left) and (taken == 0 or sum(widths[left[taken]]) + 3 * BORDER <= room):
                room -= sum(widths[left[taken]]) + 3 * BORDER
                taken += 1
            yield self._table(rows, left[:taken], widths)
            left = left[taken:]

    def _table(self, rows: Sequence[tuple[str, list[list[str]]]], groups: list[int], widths: list[list[int]]) -> Table:
        table = Table(title_justify="left")
        table.add_column("", no_wrap=True)
        for at in groups:
            # A long name folds to the width of its numbers: it must push no number out of a narrow terminal.
            fold, name = max(NAME_WIDTH, widths[at][0]), self.comparison.groups[at].name
            folded = "\n".join(name[start : start + fold] for start in range(0, len(name), fold))
            for title in (f"{folded}\n{TRIPLE[0]}", *TRIPLE[1:]):
                table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
        for label, values in rows:
            table.add_row(label, *(cell for at in groups for cell in values[at]))
        return table


def _differences(comparison: Comparison) -> list[Any]:
    what = comparison.what
    parts: list[Any] = []
    if what.rows:
        table = Table(title=what.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("setting", overflow="fold")
        for run in comparison.runs:
            table.add_column(run.name, overflow="fold")
        for d in what.rows:
            table.add_row(d.key, *(shown(d.values[run.name]) for run in comparison.runs))
        parts.append(table)
    elif len(comparison.runs) > 1 and (nothing := what.nothing()) is not None:
        parts.append(Text(nothing, style="green"))
    return parts + [Text(f"- {name}", style="yellow") for name in what.unknown]


def _early_warning(comparison: Comparison) -> list[Any]:
    if comparison.baseline is None:
        return [Text(f"- {NO_BASELINE}", style="yellow")]
    title = f"What leaves {comparison.baseline.name}'s band first ({comparison.band_text()})"
    table = Table(title=title, title_justify="left")
    for name in ("leaves at step", "signal", "changes at step", "value", "band"):
        table.add_column(name, justify="left" if name == "signal" else "right", overflow="fold")
    for run, departures in groupby(comparison.warnings, key=lambda d: d.run):
        if len(comparison.groups) > 2:
            table.add_section()
            table.add_row("", Text(run, style="bold"))
        for d in departures:
            table.add_row(left(d), d.signal, changed(d), *band_cells(d))
    notes = band_notes(comparison.warnings, comparison.options.band)
    return [table, *(Text(note, style="dim") for note in notes)]
