"""The metrics that figures and tables of the page read: what a small archive keeps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from verl_tim.diagnosis.curves import PLOTS
from verl_tim.diagnosis.early_warning import SIGNALS
from verl_tim.diagnosis.metric_log import Record, read_metrics_file
from verl_tim.diagnosis.speed import STAGES, STEP_TIME

DIGITS = 6
# Beside the plots' and signals' own names: shares, flips, places, corrections, times.
_MORE = (
    *STEP_TIME,
    *(f"timing_s/{stage}" for stage in STAGES),
    "timing_per_token_ms/gen",
    "perf/total_num_tokens",
    "response_length/mean",
    "tim/valid_tokens",
    "tim/delta_gt_0.01",
    "tim/delta_gt_0.1",
    "tim/delta_gt_1",
    "tim/top1_tokens",
    "tim/router_compared",
    "tim/rejected_share_pos_adv",
    "tim/rejected_share_neg_adv",
)
_PREFIXES = ("val-core/", "tim/delta_abs_mean_by_position_", "rollout_corr/rollout_rs")


def is_used(metric: str) -> bool:
    """Whether a figure or table of the page reads this metric."""
    return metric in _names() or metric.startswith(_PREFIXES)


@cache
def _names() -> frozenset[str]:
    plots = {name for _, section in PLOTS for plot in section for line in plot.lines for name in line.names}
    return frozenset({*plots, *(name for signal in SIGNALS for name in signal.names), *_MORE})


def thinned(path: Path) -> bytes:
    """A metrics file with those alone that are used, to `DIGITS` digits, whole numbers whole; a torn last line is left
    out.

    Raises:
        RunFolderError: a damaged file.
    """
    records, _ = read_metrics_file(path)
    return "".join(_line(record) for record in records).encode()


def _line(record: Record) -> str:
    data = {name: _short(value) for name, value in record.data.items() if is_used(name)}
    broken = dict.fromkeys(name for name in record.nonfinite if is_used(name))
    return json.dumps({"step": record.step, "data": {**data, **broken}}, separators=(",", ":")) + "\n"


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")
