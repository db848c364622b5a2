"""The pictures of the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl_tim.diagnosis.figures import BAND_OPACITY, run_colors
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.png import write_png
from verl_tim.evidence.names import BASELINE
from verl_tim.evidence.runs import Pair

# Of the compare page.
CURVES = ("reward", "skew", "mismatch", "r_corr_k3", "ppo_k3", "grad_norm")
BINS = 10


def curves(pair: Pair, path: Path) -> None:
    """Reward, contribution skew, |d| tail, K3, K3 of the PPO ratio, gradient norm over steps, with seed bands."""
    write_png(pair.comparison, path, dpi=110, plots=CURVES, title=pair.title)


def position(pair: Pair, path: Path) -> None:
    """Mean |d| by place in the response: tenths of each response's own length."""
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for at, group in enumerate(pair.comparison.groups):
        seeds = by_position(group)
        if group.name == BASELINE or not len(seeds):
            continue
        color, x = run_colors(at)[0], np.arange(BINS) + 0.5
        mean = seeds.mean(axis=0)
        axis.plot(x, mean, color=color, marker="o", markersize=3, label=group.name)
        if len(seeds) > 1:
            spread = seeds.std(axis=0, ddof=1)
            axis.fill_between(x, mean - spread, mean + spread, color=color, alpha=BAND_OPACITY, linewidth=0)
    axis.set_xticks(np.arange(BINS + 1), [f"{10 * tenth} %" for tenth in range(BINS + 1)])
    axis.set_xlabel("place in the response", fontsize=8)
    axis.set_ylabel("mean |d|, nats", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_title(pair.title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.lines:
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.text(0.5, 0.5, "no run with a mismatch logged it", transform=axis.transAxes, ha="center", fontsize=8)
    figure.savefig(path, dpi=110)


def by_position(group: Group) -> np.ndarray:
    """(seeds, BINS): means over steps of the mean |d| of each tenth; seeds that logged none are left out."""
    rows = []
    for log in group.logs:
        bins = [log.series(f"tim/delta_abs_mean_by_position_{tenth}")[1] for tenth in range(BINS)]
        if all(bins):
            rows.append([float(np.mean(values)) for values in bins])
    return np.array(rows)


PICTURES: dict[str, Callable[[Pair, Path], None]] = {"curves": curves, "position": position}
