"""A comparison in the terminal."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl_tim.diagnosis.compare import NO_BASELINE, Comparison, shown
from verl_tim.diagnosis.early_warning import Departure
from verl_tim.diagnosis.formats import short, written

NAME_WIDTH = 6  # at least so many letters of a name stand on one line


def comparison_table(comparison: Comparison) -> Group:
    """The verdict, what differs, what leaves the band first, and the summary."""
    verdict = comparison.verdict
    parts: list[Any] = [Padding(Text(verdict.lead), (0, 0, 1, 0))]
    parts += [Text(f"! {alert}", style="bold red") for alert in verdict.alerts]
    parts += [Text(f"- {note}", style="yellow") for note in verdict.notes]
    parts += _differences(comparison)
    if len(comparison.groups) > 1:
        parts.append(_early_warning(comparison))
    rows = [
        (row.label, *(written(value, row.kind) for values in row.values for value in values))
        for row in comparison.summary()
    ]
    # A long name folds to the width of its numbers: it must push no number out of a narrow terminal.
    widths = [max((cell_len(cell) for cell in cells), default=0) for cells in zip(*rows, strict=True)]
    table = Table(title_justify="left")
    table.add_column("", no_wrap=True)
    for number, group in enumerate(comparison.groups):
        fold = max([NAME_WIDTH, *widths[3 * number + 1 :][:1]])
        name = "\n".join(group.name[at : at + fold] for at in range(0, len(group.name), fold))
        for title in (f"{name}\nfirst", "last", "mean"):
            table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    parts.append(table)
    return Group(*parts)


def _differences(comparison: Comparison) -> list[Any]:
    parts: list[Any] = []
    if comparison.differences:
        table = Table(title="What differs besides the rollout", title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("setting")
        for run in comparison.runs:
            table.add_column(run.name)
        for d in comparison.differences:
            table.add_row(d.key, *(shown(d.values[run.name]) for run in comparison.runs))
        parts.append(table)
    elif len(comparison.runs) > 1 and not comparison.unknown:
        parts.append(Text("Nothing but the rollout differs between the runs.", style="green"))
    return parts + [Text(f"- {name}", style="yellow") for name in comparison.unknown]


def _early_warning(comparison: Comparison) -> Any:
    if comparison.baseline is None:
        return Text(f"- {NO_BASELINE}", style="yellow")
    title = f"What leaves {comparison.baseline.name}'s band first ({comparison.band_text()})"
    table = Table(title=title, title_justify="left")
    several = len(comparison.groups) > 2
    for name in ("leaves at step", "signal", *["run"] * several, "changes at step", "value", "band"):
        table.add_column(name, justify="left" if name in ("run", "signal") else "right")
    for d in comparison.warnings:
        table.add_row(left(d), d.signal, *[d.run] * several, changed(d), *band_cells(d))
    return table


def left(departure: Departure) -> str:
    """The step, or why there is none."""
    return str(departure.step) if departure.step is not None else departure.state


def band_cells(departure: Departure) -> tuple[str, str]:
    """Value and band where it left."""
    if departure.step is None or departure.band is None:
        return "", ""
    value = "not finite" if departure.value is None else short(departure.value)
    low, high = departure.band
    return value, short(low) if departure.sharp else f"{short(low)} … {short(high)}"


def changed(departure: Departure) -> str:
    """For a band without width, when the run leaves its own first steps."""
    if not departure.sharp:
        return ""
    return "–" if departure.changed is None else str(departure.changed)
