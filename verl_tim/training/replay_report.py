"""What routing replay changed, from the workers to the metrics of a step.

Reports are plain objects under one metric key, as `correction_report`'s are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_tim.diagnosis.estimators import k3
from verl_tim.replay import Agreement

REPLAY_METRIC = "tim/replay_reports"
PREFIX = "tim/replay_"

Phase = Literal["old", "update"]
"""Of the old log-probs, or of the policy."""


@dataclass(frozen=True)
class Gap:
    """Sums of d = log p - log q, trainer minus rollout, nats, over the tokens of probed sequences."""

    tokens: int = 0
    abs_sum: float = 0.0
    abs_max: float = 0.0
    k3: float = 0.0

    @classmethod
    def of(cls, log_prob: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Gap:
        """Tensors of one shape; tokens with mask 0 or without finite log-probs are left out."""
        rollout_log_probs, mask = rollout_log_probs.to(log_prob.device), mask.to(log_prob.device)
        valid = mask.bool() & log_prob.isfinite() & rollout_log_probs.isfinite()
        d_N = log_prob.detach()[valid].double() - rollout_log_probs[valid].double()
        if not d_N.numel():
            return cls()
        return cls(d_N.numel(), *torch.stack([d_N.abs().sum(), d_N.abs().max(), k3(d_N).sum()]).tolist())

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            self.tokens + other.tokens,
            self.abs_sum + other.abs_sum,
            max(self.abs_max, other.abs_max),
            self.k3 + other.k3,
        )


@dataclass(frozen=True)
class ReplayReport:
    """One phase of a step, or a part of it, on one rank.

    Attributes:
        before: the routes against what the router would have chosen in the same forward.
        after: the routes against what it handed on to its experts.
        host_bytes: most memory of recorded routes on the host (r2), bytes.
        live, replayed: the probed sequences with the router's own choice, and with the routes; empty where nothing
            was probed.
    """

    phase: Phase
    before: Agreement
    after: Agreement
    host_bytes: int = 0
    live: Gap = Gap()
    replayed: Gap = Gap()


def replay_metrics(reports: Sequence[ReplayReport]) -> dict[str, float]:
    """Metrics of one step, over all ranks and mini-batches; empty where nothing was replayed.

    The agreement is that of the forward of the old log-probs, where routes were replayed in it: its weights are those
    that drew the batch. Else it is that of the policy's forwards. `flip_rate_policy` is always theirs: the weights of
    later mini-batches have moved, and the routes have not.
    """
    if not reports:
        return {}
    old = [report for report in reports if report.phase == "old"]
    counted = old or list(reports)
    before = functools.reduce(operator.add, (report.before for report in counted))
    after = functools.reduce(operator.add, (report.after for report in counted))
    metrics = {
        "pairs": before.pairs,
        "live_pairs": before.live,
        "host_mb": max(report.host_bytes for report in reports) / 1e6,
    }
    for name, one in (("before", before), ("after", after)):
        if one.pairs:
            metrics[f"flip_rate_{name}"] = one.flips / one.pairs
            metrics[f"order_mismatch_{name}"] = one.order / one.pairs
            metrics[f"expert_mismatch_{name}"] = one.missing / one.pairs
    policy = functools.reduce(
        operator.add, (report.before for report in reports if report.phase == "update"), Agreement()
    )
    if policy.pairs:
        metrics["flip_rate_policy"] = policy.flips / policy.pairs
    for name, sums in (
        ("before", functools.reduce(operator.add, (report.live for report in reports))),
        ("after", functools.reduce(operator.add, (report.replayed for report in reports))),
    ):
        if sums.tokens:
            metrics["probed_tokens"] = float(sums.tokens)
            metrics[f"d_abs_mean_{name}"] = sums.abs_sum / sums.tokens
            metrics[f"d_abs_max_{name}"] = sums.abs_max
            metrics[f"k3_{name}"] = sums.k3 / sums.tokens
    return {f"{PREFIX}{name}": float(value) for name, value in metrics.items()}
