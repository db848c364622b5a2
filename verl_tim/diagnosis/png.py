"""The plots of a comparison as one picture, drawn with matplotlib from the figures of the page.

plotly's own export starts a browser; matplotlib needs none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl_tim.diagnosis.compare import Comparison
from verl_tim.diagnosis.figures import BAND_OPACITY, Drawing, build_sections, run_colors
from verl_tim.diagnosis.own_file import MARK
from verl_tim.diagnosis.page import overlay_of

COLUMNS = 3
DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def write_png(
    comparison: Comparison, path: Path, *, dpi: int = 150, plots: Sequence[str] | None = None, title: str = ""
) -> None:
    """Write the plots of the comparison, three in a row, with one legend.

    Args:
        plots: ids of those to draw, in this order (`curves.PLOTS`); None: all. One that no run logged is left out.
        title: above all of them.
    """
    drawings = [d for section in build_sections(comparison.groups, overlay_of(comparison)) for d in section.drawings]
    if plots is not None:
        drawings = [d for id in plots for d in drawings if d.plot.id == id]
    rows = max(1, math.ceil(len(drawings) / COLUMNS))
    figure = Figure(figsize=(4.6 * COLUMNS, 2.9 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, drawing in zip(axes, drawings, strict=False):
        _draw(axis, drawing)
    for axis in axes[len(drawings) :]:
        axis.set_visible(False)
    keys = [
        axes[0].plot([], [], color=run_colors(at)[0], label=group.name)[0] for at, group in enumerate(comparison.groups)
    ]
    smoothing = comparison.options.smoothing
    figure.legend(handles=keys, loc="outside lower center", ncols=min(4, len(keys)), frameon=False)
    values = f"bold: {smoothing}" if smoothing else "values as logged, not smoothed"
    figure.suptitle("; ".join(part for part in (title, values) if part), fontsize=9, color="#5b6472")
    figure.savefig(path, dpi=dpi, metadata={"Software": MARK})


def _draw(axis: Axes, drawing: Drawing) -> None:
    figure: go.Figure = drawing.figure
    for trace in figure.data:
        color = trace.line.color
        if trace.meta["role"] == "band":
            axis.fill(trace.x, trace.y, color=color, alpha=BAND_OPACITY, linewidth=0)
            continue
        axis.plot(
            trace.x,
            trace.y,
            color=color,
            linewidth=trace.line.width * 0.8,
            linestyle=DASHES[trace.line.dash or "solid"],
            alpha=trace.opacity if trace.opacity is not None else 1.0,
            marker="o" if "markers" in trace.mode else None,
            markersize=3,
        )
    layout = figure.layout
    for shape in layout.shapes:
        if shape.name == "zero":
            axis.axhline(shape.y0, color="#8b94a3", linewidth=0.7, zorder=0)
        elif shape.name.startswith("run "):
            axis.axvline(shape.x0, color=shape.line.color, linewidth=1, linestyle=":")
    if layout.yaxis.type == "log":
        axis.set_yscale("log")
        axis.set_ylim(*(10**end for end in layout.yaxis.range))
    elif layout.yaxis.range:
        axis.set_ylim(*layout.yaxis.range)
    if layout.yaxis.tickvals:
        labels = layout.yaxis.ticktext or [f"{value:.0%}" for value in layout.yaxis.tickvals]
        axis.set_yticks(layout.yaxis.tickvals, [_mathtext(label) for label in labels])
        axis.minorticks_off()
    axis.set_xlim(*layout.xaxis.range)
    plot = drawing.plot
    axis.set_title(f"{plot.title} ({plot.unit})" if plot.unit else plot.title, fontsize=10, loc="left")
    names = [f"{line.label} {line.dash}" for line in plot.lines] if len(plot.lines) > 1 else []
    axis.set_xlabel("step" + (f"   [{', '.join(names)}]" if names else ""), fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#eceef2")
    axis.set_axisbelow(True)


def _mathtext(label: str) -> str:
    """plotly's superscripts as matplotlib writes them."""
    return label.replace("<sup>", "$^{").replace("</sup>", "}$").replace("−", "-")
