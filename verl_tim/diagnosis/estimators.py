"""Estimators of a log-ratio: K1, K2, K3, chi-square. Ratios are clamped to exp(+-20) only where they are exponentiated.

Definitions and signs as in verl's rollout correction (trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics),
with K3's exponential clamped, which verl 0.9.1 leaves out (a log-ratio of 199 is infinite there). K1 to K3 are the
correction's own functions, so that a metric and a rejection rule of one name see one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.correction.ratios import k1, k2, k3
from verl_tim.diagnosis.tokens import as_mask, check_field, finite_fp32

__all__ = [
    "LOG_RATIO_BOUND",
    "RatioSums",
    "chi_square",
    "clamped",
    "k1",
    "k2",
    "k3",
    "ratio_minus_one",
    "trainer_self_delta",
]

LOG_RATIO_BOUND = 20.0  # nats; exp(20) = 4.9e8


def clamped(log_ratio: Tensor) -> Tensor:
    """The log-ratio as it may be exponentiated."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_minus_one(log_ratio: Tensor) -> Tensor:
    """r - 1 without the cancellation of exp(x) - 1 at small x; clamped."""
    return torch.expm1(clamped(log_ratio))


def chi_square(log_ratio: Tensor) -> Tensor:
    """r^2 - 1, elementwise; its mean under q is the chi-square divergence."""
    return torch.expm1(2.0 * clamped(log_ratio))


@dataclass(frozen=True)
class RatioSums:
    """Mergeable sums for `tim/ppo_k1..k3`: add those of all micro-batches, mini-batches and ranks of a step.

    The ratio is the one the loss uses: log p - log p_old under recomputation, log p - log q under bypass.
    """

    tokens: int = 0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    abs_max: float = 0.0

    @classmethod
    def of(cls, log_prob: Tensor, reference_log_probs: Tensor, response_mask: Tensor) -> RatioSums:
        """Sums over the tokens with mask 1 where both sides are finite. Tensors of one shape; log-probs in nats."""
        check_field("log_prob", log_prob, log_prob.shape, floating=True)
        check_field("reference_log_probs", reference_log_probs, log_prob.shape, floating=True)
        reference_log_probs = reference_log_probs.detach().to(log_prob.device)
        valid = as_mask(response_mask.to(log_prob.device)) & finite_fp32(log_prob) & finite_fp32(reference_log_probs)
        log_ratio_N = log_prob.detach()[valid].to(torch.float64) - reference_log_probs[valid].to(torch.float64)
        return cls.over(log_ratio_N, ratio_minus_one(log_ratio_N))

    @classmethod
    def over(cls, log_ratio_N: Tensor, excess_N: Tensor) -> RatioSums:
        """Sums over float64 log-ratios, all of them finite; `excess_N` is `ratio_minus_one` of them."""
        if log_ratio_N.numel() == 0:
            return cls()
        sums = [-log_ratio_N.sum(), k2(log_ratio_N).sum(), k3(log_ratio_N, excess_N).sum(), log_ratio_N.abs().max()]
        return cls(log_ratio_N.numel(), *torch.stack(sums).tolist())

    def __add__(self, other: RatioSums) -> RatioSums:
        return RatioSums(
            tokens=self.tokens + other.tokens,
            k1=self.k1 + other.k1,
            k2=self.k2 + other.k2,
            k3=self.k3 + other.k3,
            abs_max=max(self.abs_max, other.abs_max),
        )

    def metrics(self) -> dict[str, float]:
        """`tim/ppo_k1`, `tim/ppo_k2`, `tim/ppo_k3`, means over tokens; empty when there were none."""
        if self.tokens == 0:
            return {}
        return {f"tim/ppo_{name}": getattr(self, name) / self.tokens + 0.0 for name in ("k1", "k2", "k3")}


def trainer_self_delta(log_prob: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """`tim/trainer_self_delta_max`: max |log p - log p_old| of a forward made before the step's first optimiser update.

    Both sides are the trainer's under the same weights, so anything above 0 is the trainer's own noise (other
    micro-batch shapes, say) and not rollout mismatch. Empty when no token is valid.
    """
    check_field("log_prob", log_prob, log_prob.shape, floating=True)
    check_field("old_log_probs", old_log_probs, log_prob.shape, floating=True)
    valid = as_mask(response_mask) & finite_fp32(log_prob) & finite_fp32(old_log_probs)
    if not bool(valid.any()):
        return {}
    size = (log_prob.detach().to(torch.float64) - old_log_probs.detach().to(torch.float64)).abs_()
    return {"tim/trainer_self_delta_max": float(size.masked_fill_(~valid, 0.0).max())}
