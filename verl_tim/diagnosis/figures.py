"""The plots over steps as plotly figures, one colour per run (or group of seeds) throughout.

Every trace carries in its `meta` the place of its run and its role: `line`, `smooth` or `band`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from verl_tim.diagnosis.curves import PLOTS, Line, Plot, first_logged, validation_label, validation_names
from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.groups import Curve, Group
from verl_tim.diagnosis.metric_log import MetricLog
from verl_tim.diagnosis.smoothing import Smoothing

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
SMOOTHED = ", smoothed"
MAX_VALIDATIONS = 4
BAND_OPACITY = 0.16
# Colours of a heat map, on light and on dark, from nothing to much.
HEAT = (
    ((0.0, "#eef3fb"), (0.5, "#5c8fe0"), (1.0, "#0b2f73")),
    ((0.0, "#182233"), (0.5, "#3f7fd8"), (1.0, "#d6e7ff")),
)


@dataclass(frozen=True)
class Overlay:
    """What is drawn beside the curves.

    Attributes:
        smoothing: None draws the values alone.
        baseline: place of the run whose band is shaded.
        bands: metric -> its band (columns low, high over steps), see early_warning.
        departures: metric -> (place of a run, step at which it leaves the band, or changes if that has no width).
    """

    smoothing: Smoothing | None = None
    baseline: int | None = None
    bands: dict[str, pd.DataFrame] = field(default_factory=dict)
    departures: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


PLAIN = Overlay()


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
    notes: list[str]


@dataclass(frozen=True)
class Section:
    """A titled group of plots; `absent` names those for which no run logged anything."""

    title: str
    drawings: list[Drawing]
    absent: list[str]


def run_colors(run: int) -> tuple[str, str]:
    """(on light, on dark) colour of the run at this place. The palette repeats."""
    return PALETTE[run % len(PALETTE)]


def build_sections(groups: Sequence[Group], overlay: Overlay = PLAIN) -> list[Section]:
    """All plots for which some run has data, in reading order."""
    logs = [log for group in groups for log in group.logs]
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
                drawing = draw(each, groups, overlay)
                if drawing is None:
                    absent.append(each.title)
                else:
                    drawings.append(drawing)
        sections.append(Section(title, drawings, absent))
    return sections


def draw(plot: Plot, groups: Sequence[Group], overlay: Overlay = PLAIN) -> Drawing | None:
    """One plot, or None when no run logged any of its metrics."""
    logs = [log for group in groups for log in group.logs]
    metrics = [(line, name) for line in plot.lines if (name := first_logged(line.names, logs))]
    if not metrics:
        return None
    # the first name of a line that a run logged, run by run: trainers and modes differ in what they call it
    curves = {(at, name): group.curve(line.names) for at, group in enumerate(groups) for line, name in metrics}
    bands = {name: overlay.bands[name] for _, name in metrics if name in overlay.bands} if len(metrics) == 1 else {}
    values = [v for curve in curves.values() for v in curve.values]
    if not plot.log:  # a logarithmic axis follows the curves: a band may reach down to zero
        values += [v for curve in curves.values() for side in (curve.low, curve.high) for v in side or ()]
        values += [v for band in bands.values() for side in (band.low, band.high) for v in side]
    floor = zero_row(values) if plot.log else None
    lowest = min((v for v in values if v > 0), default=None) if plot.log else None
    write = percent if plot.kind == "share" else short
    figure = go.Figure()
    notes = []
    for at, group in enumerate(groups):
        for line, name in metrics:
            curve = curves[at, name]
            if not curve.steps:
                continue
            if at == overlay.baseline and name in bands:
                band = bands[name]
                shade = Curve(band.index.tolist(), [], band.low.tolist(), band.high.tolist())
                _add_band(figure, at, shade, floor, lowest)
                notes.append("The baseline's shade is its band (table above).")
            elif curve.low is not None and curve.high is not None:
                _add_band(figure, at, curve, floor, lowest)
                notes.append("Shade: ± one standard deviation over seeds.")
            _add_line(figure, plot, line, at, group.name, curve, floor, [write(v) for v in curve.values], overlay)
    figure.update_layout(_layout(plot, values, floor, step_range(logs)))
    marks = [
        m for line, name in metrics if name in bands for each in line.names for m in overlay.departures.get(each, [])
    ]
    for at, step in marks:
        figure.add_shape(_vertical(at, step))
        notes.append("Vertical: where a run leaves it or, if it has no width, its own first steps.")
    if overlay.smoothing:
        notes.append(f"Bold: {overlay.smoothing} over the faint values.")
    legend = []
    for at in range(len(groups)):
        last = [(line.label, curves[at, name].values[-1:]) for line, name in metrics]
        legend.append(LegendEntry(at, [(label, write(series[0])) for label, series in last if series]))
    read = {first_logged(line.names, [log]) for line, _ in metrics for log in logs}
    used = [name for line, _ in metrics for name in line.names if name in read]
    return Drawing(plot, figure, legend, used, list(dict.fromkeys(notes)))


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
    curve: Curve,
    floor: float | None,
    texts: list[str],
    overlay: Overlay,
) -> None:
    color = run_colors(at)[0]
    label = f"{run} {line.label}".strip()
    few = len(curve.steps) <= 3 or plot.sparse
    smooth = overlay.smoothing
    figure.add_trace(
        go.Scatter(
            x=curve.steps,
            y=_on_axis(curve.values, floor),
            name=label,
            mode="lines+markers" if few else "lines",
            line={"color": color, "width": 1 if smooth else 2, "dash": line.dash},
            marker={"size": 7, "color": color},
            opacity=0.4 if smooth else 1,
            text=texts,
            hovertemplate=f"{label}: %{{text}}<extra></extra>",
            meta={"run": at, "role": "line"},
            showlegend=False,
        )
    )
    if smooth:
        figure.add_trace(
            go.Scatter(
                x=curve.steps,
                y=_on_axis(smooth.apply(curve.values), floor),
                name=label + SMOOTHED,
                mode="lines",
                line={"color": color, "width": 2.5, "dash": line.dash},
                hoverinfo="skip",
                meta={"run": at, "role": "smooth"},
                showlegend=False,
            )
        )


def _add_band(figure: go.Figure, at: int, curve: Curve, floor: float | None, lowest: float | None) -> None:
    """The area between `low` and `high` as one closed outline; on a log axis it ends just below the curves."""
    color = run_colors(at)[0]
    low, high = curve.low or [], curve.high or []
    if lowest is not None:
        low = [max(value, lowest / 2) if top > 0 else value for value, top in zip(low, high, strict=True)]
    figure.add_trace(
        go.Scatter(
            x=[*curve.steps, *reversed(curve.steps)],
            y=_on_axis([*high, *reversed(low)], floor),
            mode="lines",
            fill="toself",
            fillcolor=translucent(color),
            line={"color": color, "width": 0},
            hoverinfo="skip",
            meta={"run": at, "role": "band"},
            showlegend=False,
        )
    )


def _on_axis(values: Sequence[float], floor: float | None) -> list[float]:
    """On a log axis what is not positive lies in the zero row."""
    return [floor if floor is not None and value <= 0 else value for value in values]


def translucent(color: str) -> str:
    """A colour `#rrggbb` for areas."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"


def frame(x_title: str = "") -> dict[str, Any]:
    """What the layouts of all plots have in common."""
    return {
        "height": 250,
        "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
        "hoverlabel": {"namelength": -1},
        "dragmode": False,
        "showlegend": False,
        "xaxis": {
            "title": {"text": x_title, "standoff": 4, "font": {"size": 11}},
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
            "ticks": "outside",
            "ticklen": 4,
            "fixedrange": True,
        },
        "yaxis": {"automargin": True, "zeroline": False, "nticks": 6, "fixedrange": True, "showspikes": False},
    }


def _layout(plot: Plot, values: Sequence[float], floor: float | None, steps: tuple[float, float]) -> dict[str, Any]:
    layout = frame("step") | {"hovermode": "x unified", "meta": {"over": "steps"}}
    layout["xaxis"] |= {
        "tickformat": "d",
        "range": list(steps),
        "nticks": 8,
        "hoverformat": "d",
        "unifiedhovertitle": {"text": "step %{x}"},
        "showspikes": True,
        "spikemode": "across",
        "spikedash": "dot",
        "spikethickness": -2,  # negative: plotly then leaves out the contrasting border around the line
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


def _vertical(at: int, step: int) -> dict[str, Any]:
    """Where a run leaves the band, in the run's colour."""
    return {
        "type": "line",
        "x0": step,
        "x1": step,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"width": 1.5, "dash": "dot", "color": run_colors(at)[0]},
        "name": f"run {at}",
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
