"""What a worker says of each mini-batch's loss, and the metrics of a step made of it.

Reports are plain objects under one metric key: verl gathers metric values over ranks and mini-batches as they are, and
the trainer takes them out before verl reduces the metrics. verl's own reduction would average, or take the maximum
by a metric's name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tim.correction import MISMATCH_METRICS, MetricSums, RolloutCorrectionConfig
from verl_tim.correction.metrics import PREFIX

REPORT_METRIC = "tim/loss_reports"


@dataclass(frozen=True)
class LossReport:
    """One mini-batch on one rank.

    Attributes:
        number: mini-batches since the rollout was given weights, from 0; equal on all ranks.
        fresh: True if no optimiser step happened since then, so that log p = log p_old.
        kept_tokens: over all ranks; with 0 the optimiser step was skipped.
        policy_loss: over all ranks, entropy and KL terms not included.
        sums: this rank's metrics, on the CPU.
    """

    number: int
    fresh: bool
    kept_tokens: int
    policy_loss: float
    sums: MetricSums


def step_metrics(
    reports: Sequence[LossReport], correction: RolloutCorrectionConfig, *, reused: bool = False
) -> dict[str, float]:
    """Metrics of one training step over all its mini-batches and ranks.

    Under bypass without `old_forward` later mini-batches hold real drift, so what measures the mismatch (of d, and of
    its weights) comes from the forwards that still saw the generating weights. `empty_step` is 1 if an optimiser step
    was skipped because nothing of its mini-batch was kept.
    """
    if not reports:
        return {}
    metrics = _merged(reports)
    if correction.mismatch_needs_forward:
        fresh = _merged([report for report in reports if report.fresh])
        metrics = {name: value for name, value in metrics.items() if not _is_mismatch(name)}
        metrics |= {name: value for name, value in fresh.items() if _is_mismatch(name)}
    if reused:
        metrics = {name: value for name, value in metrics.items() if not _is_mismatch(name)}
    metrics[f"{PREFIX}empty_step"] = float(any(report.kept_tokens == 0 for report in reports))
    return metrics


def _merged(reports: Sequence[LossReport]) -> dict[str, float]:
    if not reports:
        return {}
    return functools.reduce(operator.add, [report.sums for report in reports]).finalise()


def _is_mismatch(name: str) -> bool:
    bare = name.removeprefix(PREFIX)
    return name.startswith(PREFIX) and (bare in MISMATCH_METRICS or bare.startswith("rollout_is_"))
