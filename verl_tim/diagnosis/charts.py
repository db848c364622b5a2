"""Plots that are not over steps: histogram, heat map, bars, threshold curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from verl_tim.diagnosis.curves import Plot
from verl_tim.diagnosis.figures import Drawing, frame, run_colors
from verl_tim.diagnosis.formats import percent, short

BINS_PER_DECADE = 4
PLACE_BINS, LENGTH_BINS = 24, 10


def _drawing(plot: Plot, figure: go.Figure) -> Drawing:
    return Drawing(plot, figure, [], [], [])


def histogram(size_N: np.ndarray) -> Drawing:
    """Counts of |d| (finite, >= 0) on two logarithmic axes; exact zeros are a bar of their own on the left."""
    positive = size_N[size_N > 0]
    zeros = int((size_N == 0).sum())
    low = math.floor(math.log10(positive.min())) if positive.size else -1
    high = max(math.ceil(math.log10(positive.max())), low + 1) if positive.size else 0
    edges = np.linspace(low, high, (high - low) * BINS_PER_DECADE + 1)
    counts = np.histogram(np.log10(positive), edges)[0] if positive.size else np.zeros(len(edges) - 1, int)
    x = [*((edges[:-1] + edges[1:]) / 2).tolist()]
    y = counts.tolist()
    text = [
        f"|d| from {short(10.0**a)} to {short(10.0**b)}: {n:,} tokens, {percent(n / size_N.size)}"
        for a, b, n in zip(edges[:-1], edges[1:], y, strict=True)
    ]
    width = [1 / BINS_PER_DECADE] * len(y)
    if zeros:
        x, y, width = [low - 1.0, *x], [zeros, *y], [0.6, *width]
        text = [f"|d| exactly 0: {zeros:,} tokens, {percent(zeros / size_N.size)}", *text]
    figure = go.Figure(
        go.Bar(
            x=x,
            y=[n if n else None for n in y],
            width=width,
            text=text,
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
            marker={"color": run_colors(0)[0]},
            meta={"run": 0, "role": "bar"},
        )
    )
    layout = frame("|d|, nats")
    decades = list(range(low, high + 1))[:: max(1, math.ceil((high - low) / 6))]
    layout["xaxis"] |= {
        "tickvals": [low - 1.0] * bool(zeros) + decades,
        "ticktext": ["0"] * bool(zeros) + [_power(decade) for decade in decades],
    }
    layout["yaxis"] |= {"type": "log", "dtick": 1, "title": {"text": "tokens", "font": {"size": 11}}}
    figure.update_layout(layout)
    return _drawing(
        Plot("histogram", "Histogram of |d|", (), about="Both axes logarithmic, so that the tail is seen."), figure
    )


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"10<sup>{exponent}</sup>".replace("-", "−")


def heat_map(place_N: np.ndarray, length_N: np.ndarray, size_N: np.ndarray) -> Drawing:
    """Mean |d| over place among the response's tokens (right) and their number (up), on a grid of even bins."""
    x_edges, y_edges = _even(place_N, PLACE_BINS, 0), _even(length_N, LENGTH_BINS, int(length_N.min()))
    counts = np.histogram2d(length_N, place_N, (y_edges, x_edges))[0]
    sums = np.histogram2d(length_N, place_N, (y_edges, x_edges), weights=size_N)[0]
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    x_names, y_names = _ranges(x_edges), _ranges(y_edges)
    text = [
        [
            ""
            if not counts[i, j]
            else f"place {x}, length {y}<br>mean |d| {short(means[i, j])}, {int(counts[i, j]):,} tokens"
            for j, x in enumerate(x_names)
        ]
        for i, y in enumerate(y_names)
    ]
    figure = go.Figure(
        go.Heatmap(
            x=x_edges.tolist(),
            y=y_edges.tolist(),
            z=[[None if math.isnan(value) else value for value in row] for row in means.tolist()],
            zmin=0,
            zmax=float(np.nanmax(means)) or 1.0,
            text=text,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorbar={"thickness": 10, "outlinewidth": 0, "tickformat": ".1~e" if np.nanmax(means) < 1e-2 else ""},
            meta={"role": "heat"},
        )
    )
    layout = frame("place in the response, tokens")
    layout["yaxis"] |= {"title": {"text": "response length", "font": {"size": 11}}}
    figure.update_layout(layout)
    return _drawing(
        Plot(
            "heat",
            "Mean |d| by place and length",
            (),
            unit="nats",
            about="Drift to the right: the mismatch grows along the response. Drift upwards: with its length.",
        ),
        figure,
    )


def _even(values_N: np.ndarray, bins: int, first: int) -> np.ndarray:
    """Edges of at most `bins` bins of whole numbers from `first` to the largest."""
    span = int(values_N.max()) + 1 - first
    width = max(1, math.ceil(span / bins))
    return np.arange(first, first + width * math.ceil(span / width) + 1, width)


def _ranges(edges: np.ndarray) -> list[str]:
    ends = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), strict=True)
    return [str(low) if low == high else f"{low}–{high}" for low, high in ends]


def layer_bars(flips: dict[int, float]) -> Drawing:
    """Share of tokens whose set of experts differs, per layer."""
    figure = go.Figure(
        go.Bar(
            x=list(flips),
            y=list(flips.values()),
            text=[f"layer {layer}: {percent(share)}" for layer, share in flips.items()],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
            marker={"color": run_colors(0)[0]},
            meta={"run": 0, "role": "bar"},
        )
    )
    layout = frame("layer")
    layout["xaxis"] |= {"tickformat": "d", "tick0": 0, "dtick": max(1, len(flips) // 12)}
    # a share of nothing is a line at 0, not an arbitrary range
    layout["yaxis"] |= {"tickformat": ",.1%", "range": [0, max([*flips.values(), 1e-3]) * 1.1]}
    figure.update_layout(layout)
    return _drawing(
        Plot("layers", "Router flips per layer", (), about="Share of tokens with another set of experts."), figure
    )


def threshold_curves(
    id: str, title: str, about: str, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], limit: float
) -> Drawing:
    """One line per rule over the share of tokens rejected (logarithmic), with the allowed share marked."""
    figure = go.Figure()
    for at, (rule, (x, y)) in enumerate(curves.items()):
        color = run_colors(at)[0]
        figure.add_trace(
            go.Scatter(
                x=list(x),
                y=list(y),
                name=rule,
                mode="lines+markers",
                line={"color": color, "width": 1.5, "dash": "solid" if at < 8 else "dash"},
                marker={"size": 5, "color": color},
                text=[f"{rule}: rejects {percent(share)}, {short(value)}" for share, value in zip(x, y, strict=True)],
                hovertemplate="%{text}<extra></extra>",
                meta={"run": at, "role": "line"},
                showlegend=False,
            )
        )
    layout = frame("share of tokens rejected") | {"hovermode": "closest"}
    layout["height"] = 320
    layout["xaxis"] |= {"type": "log", "tickformat": ",.3~%", "dtick": 1}
    layout["shapes"] = [
        {
            "type": "line",
            "x0": limit,
            "x1": limit,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"width": 1.5, "dash": "dot"},
            "name": "limit",
        }
    ]
    figure.update_layout(layout)
    return _drawing(Plot(id, title, (), about=about), figure)
