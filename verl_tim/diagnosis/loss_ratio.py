"""The ratio that the loss used, over all mini-batches and epochs of a step: `tim/ppo_k*` and `tim/clipped_share_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_tim.diagnosis.estimators import RatioSums, ratio_minus_one
from verl_tim.diagnosis.tokens import as_mask, finite_fp32


@dataclass(frozen=True)
class LossRatioSums:
    """Mergeable: add those of a step's micro-batches.

    Attributes:
        ratio: of all tokens.
        positive, negative: tokens with an advantage above and below zero.
        clipped_positive, clipped_negative: those of them for which PPO's clip binds.
    """

    ratio: RatioSums = field(default_factory=RatioSums)
    positive: int = 0
    negative: int = 0
    clipped_positive: int = 0
    clipped_negative: int = 0

    @classmethod
    def of(
        cls,
        log_prob: Tensor,
        reference_log_probs: Tensor,
        response_mask: Tensor,
        advantages: Tensor,
        clip: tuple[float, float],
    ) -> LossRatioSums:
        """Over the tokens with mask 1 where all three are finite, (B, T) each; the clip is at 1 - low and 1 + high.

        `reference_log_probs`: log p_old under recomputation, log q under bypass.
        """
        use = (
            as_mask(response_mask) & finite_fp32(advantages) & finite_fp32(log_prob) & finite_fp32(reference_log_probs)
        )
        if not bool(use.all()):
            log_prob, reference_log_probs, advantages = log_prob[use], reference_log_probs[use], advantages[use]
        log_ratio = log_prob.detach().to(torch.float64) - reference_log_probs.detach().to(torch.float64)
        excess = ratio_minus_one(log_ratio)
        positive, negative = advantages > 0, advantages < 0
        low, high = clip
        counts = [positive, negative, positive & (excess > high), negative & (excess < -low)]
        return cls(RatioSums.over(log_ratio, excess), *(int(count.count_nonzero()) for count in counts))

    def __add__(self, other: LossRatioSums) -> LossRatioSums:
        return LossRatioSums(
            self.ratio + other.ratio,
            self.positive + other.positive,
            self.negative + other.negative,
            self.clipped_positive + other.clipped_positive,
            self.clipped_negative + other.clipped_negative,
        )

    def metrics(self) -> dict[str, float]:
        """What has a value, under `tim/`."""
        metrics = self.ratio.metrics()
        if self.positive:
            metrics["tim/clipped_share_pos_adv"] = self.clipped_positive / self.positive
        if self.negative:
            metrics["tim/clipped_share_neg_adv"] = self.clipped_negative / self.negative
        return metrics
