"""The plots of a comparison as plotly figures, one colour per run throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from verl_tim.diagnosis.curves import PLOTS, Line, Plot, first_logged, validation_label, validation_names
from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.run_folder import MetricLog

if TYPE_CHECKING:
    from verl_tim.diagnosis.compare import Run

# One hue per run, told apart by people with the common colour-vision deficiencies in this order, each in a shade for
# light and dark backgrounds.
PALETTE = (
    ("#1d63d8", "#6ea8fe"),
    ("#d9590b", "#ff9a52"),
    ("#0a8f63", "#3dd6a0"),
    ("#8a3fd1", "#c08bfa"),
    ("#c92a6b", "#f77fae"),
    ("#0b8199", "#38cbe4"),
    ("#5f7f0a", "#aeda3c"),
    ("#8a5a17", "#e0b062"),
)
SMOOTHED_STEPS = 5
SMOOTHED = ", smoothed"
MAX_VALIDATIONS = 4


@dataclass(frozen=True)
class LegendEntry:
    """A run's key above a plot: (line's label, its last value as text) per line; empty where it logged none of them."""

    run: int
    last: list[tuple[str, str]]


@dataclass(frozen=True)
class Drawing:
    """One plot, ready for the page."""

    plot: Plot
    figure: go.Figure
    legend: list[LegendEntry]
    metrics: list[str]
    smoothed: bool


@dataclass(frozen=True)
class Section:
    """A titled group of plots; `absent` names those for which no run logged anything."""

    title: str
    drawings: list[Drawing]
    absent: list[str]


def run_colors(run: int) -> tuple[str, str]:
    """(on light, on dark) colour of the run at this place. The palette repeats."""
    return PALETTE[run % len(PALETTE)]


def build_sections(runs: Sequence[Run]) -> list[Section]:
    """All plots for which some run has data, in reading order."""
    logs = [run.log for run in runs]
    validations = validation_names(logs)[:MAX_VALIDATIONS]
    sections = []
    for title, plots in PLOTS:
        drawings, absent = [], []
        for plot in plots:
            concrete = [plot]
            if plot.id == "validation" and validations:
                concrete = [
                    replace(
                        plot,
                        id="validation" if at == 0 else f"validation_{at}",
                        title=plot.title if len(validations) == 1 else f"Validation: {validation_label(name)}",
                        lines=(Line((name,)),),
                    )
                    for at, name in enumerate(validations)
                ]
            for each in concrete:
                drawing = draw(each, runs)
                if drawing is None:
                    absent.append(each.title)
                else:
                    drawings.append(drawing)
        sections.append(Section(title, drawings, absent))
    return sections


def draw(plot: Plot, runs: Sequence[Run]) -> Drawing | None:
    """One plot, or None when no run logged any of its metrics."""
    logs = [run.log for run in runs]
    metrics = [(line, name) for line in plot.lines if (name := first_logged(line.names, logs))]
    if not metrics:
        return None
    values = [value for _, name in metrics for log in logs for value in log.series(name)[1]]
    floor = zero_row(values) if plot.log else None
    write = percent if plot.kind == "share" else short
    figure = go.Figure()
    for at, run in enumerate(runs):
        for line, name in metrics:
            steps, series = run.log.series(name)
            if steps:
                _add_line(figure, plot, line, at, run.name, steps, series, floor, [write(value) for value in series])
    figure.update_layout(_layout(plot, values, floor, step_range(logs)))
    legend = []
    for at, run in enumerate(runs):
        last = [(line.label, run.log.series(name)[1][-1:]) for line, name in metrics]
        legend.append(LegendEntry(at, [(label, write(series[0])) for label, series in last if series]))
    smoothed = any(str(trace.name).endswith(SMOOTHED) for trace in figure.data)
    return Drawing(plot, figure, legend, [name for _, name in metrics], smoothed)


def step_range(logs: Sequence[MetricLog]) -> tuple[float, float]:
    """One range of steps for all plots, so that they line up; a little wider than the data."""
    steps = [step for log in logs for step in log.steps] or [0]
    pad = max(0.5, 0.02 * (max(steps) - min(steps)))
    return min(steps) - pad, max(steps) + pad


def zero_row(values: Sequence[float]) -> float | None:
    """Where exact zeros are drawn on a log axis: a decade below the smallest positive value; None if there is no zero.

    A log axis has no zero, and leaving the points out would hide the very result; so they get a marked row of their
    own.
    """
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) or not positive:
        return None
    return float(10.0 ** (math.floor(math.log10(min(positive))) - 1))


def _add_line(
    figure: go.Figure,
    plot: Plot,
    line: Line,
    at: int,
    run: str,
    steps: list[int],
    series: list[float],
    floor: float | None,
    texts: list[str],
) -> None:
    color = run_colors(at)[0]
    label = f"{run} {line.label}".strip()
    smooth = plot.smooth and len(series) > 2 * SMOOTHED_STEPS
    drawn = [floor if floor is not None and value <= 0 else value for value in series]
    few = len(series) <= 3 or plot.sparse
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=drawn,
            name=label,
            mode="lines+markers" if few else "lines",
            line={"color": color, "width": 1 if smooth else 2, "dash": line.dash},
            marker={"size": 7, "color": color},
            opacity=0.4 if smooth else 1,
            text=texts,
            hovertemplate=f"{label}: %{{text}}<extra></extra>",
            meta={"run": at},
            showlegend=False,
        )
    )
    if smooth:
        figure.add_trace(
            go.Scatter(
                x=steps,
                y=moving_mean(series),
                name=label + SMOOTHED,
                mode="lines",
                line={"color": color, "width": 2.5},
                hoverinfo="skip",
                meta={"run": at},
                showlegend=False,
            )
        )


def moving_mean(values: Sequence[float]) -> list[float]:
    """Mean over up to `SMOOTHED_STEPS` values centred on each, fewer at the ends, so that nothing shifts."""
    reach = SMOOTHED_STEPS // 2
    means = []
    for at in range(len(values)):
        side = min(reach, at, len(values) - 1 - at)
        means.append(fmean(values[at - side : at + side + 1]))
    return means


def _layout(plot: Plot, values: Sequence[float], floor: float | None, steps: tuple[float, float]) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": 250,
        "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "dragmode": False,
        "showlegend": False,
        "xaxis": {
            "title": {"text": "step", "standoff": 4, "font": {"size": 11}},
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
            "ticks": "outside",
            "ticklen": 4,
            "tickformat": "d",
            "range": list(steps),
            "nticks": 8,
            "hoverformat": "d",
            "unifiedhovertitle": {"text": "step %{x}"},
            "fixedrange": True,
            "showspikes": True,
            "spikemode": "across",
            "spikedash": "dot",
            "spikethickness": -2,  # negative: plotly then leaves out the contrasting border around the line
        },
        "yaxis": {"automargin": True, "zeroline": False, "nticks": 6, "fixedrange": True, "showspikes": False},
    }
    if steps[1] - steps[0] < 9:
        layout["xaxis"] |= {"tick0": 0, "dtick": 1}  # no ticks between steps
    axis = layout["yaxis"]
    if plot.log and any(value > 0 for value in values):
        top = math.log10(max(values))
        bottom = math.log10(min(value for value in values if value > 0))
        first, last = math.floor(bottom), math.ceil(top)
        ticks = list(range(first, last + 1))
        ticks = ticks[:: max(1, math.ceil(len(ticks) / 5))]
        tickvals, ticktext = [10.0**t for t in ticks], [_decade(t) for t in ticks]
        low = bottom - 0.08 * max(1.0, top - bottom)
        if floor is not None:
            row = math.log10(floor)
            tickvals, ticktext = [floor, *tickvals], ["0", *ticktext]
            low = row - 0.35
            # A band of its own: between it and the decades above, the axis is broken.
            layout["shapes"] = [_band(10 ** (row - 0.35), 10 ** (row + 0.35)), _horizontal(floor)]
        axis |= {
            "type": "log",
            "tickvals": tickvals,
            "ticktext": ticktext,
            "range": [low, top + 0.08 * max(1.0, top - low)],
        }
        return layout
    if plot.whole:
        axis |= {"range": [-0.03, 1.05], "tickvals": [0, 0.25, 0.5, 0.75, 1], "tickformat": ",.0%"}
        return layout
    if plot.kind == "share":
        axis["tickformat"] = ",.0%" if max(values, default=0) - min(values, default=0) > 0.03 else ",.1%"
    if values and min(values) == max(values):
        _flat_range(axis, plot, values[0])
    if min(values, default=0) <= 0 <= max(values, default=0):
        layout["shapes"] = [_horizontal(0)]
    return layout


def _flat_range(axis: dict[str, Any], plot: Plot, value: float) -> None:
    """A constant needs a range that says so, rather than plotly's arbitrary one."""
    if plot.kind == "share":
        axis |= {"range": [-0.05, 1.05], "tickvals": [0, 0.5, 1], "tickformat": ",.0%"}
    elif value == 0:
        axis |= {"range": [-1, 1], "tickvals": [0], "ticktext": ["0"]}
    else:
        axis["range"] = sorted((0.0, 2 * value))


def _horizontal(y: float) -> dict[str, Any]:
    """The zero line. Its colour follows the theme."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": "y",
        "y0": y,
        "y1": y,
        "line": {"width": 1},
        "layer": "below",
        "name": "zero",
    }


def _band(low: float, high: float) -> dict[str, Any]:
    """The background of the zero row."""
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": "y",
        "y0": low,
        "y1": high,
        "line": {"width": 0},
        "layer": "below",
        "name": "band",
    }


def _decade(exponent: int) -> str:
    if -2 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return f"10<sup>{exponent}</sup>".replace("-", "−")
