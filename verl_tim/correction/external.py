"""A policy loss that somebody else computes, with this correction's weights, mask and denominators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .aggregation import LossCounts, check_mode
from .config import RolloutCorrectionConfig
from .correction import apply_correction
from .loss import PolicyTerms, record_policy
from .metrics import total
from .tokens import prepare_tokens


class ExternalLoss(Protocol):
    """The loss of one micro-batch, as a sum that the aggregation mode's divisor turns into a mean."""

    def __call__(
        self, *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Mapping[str, float]]:
        """Numerator (scalar with gradient) and metrics.

        Args:
            log_prob: (B, T) with gradient, 0 where the trainer's value is not usable.
            old_log_prob: (B, T) below the ratio: the trainer's, or under bypass the rollout's.
            advantages: (B, T).
            mask: (B, T) bool, the kept tokens: all that the loss may be taken over.
            weights: (B, T) to multiply the per-token loss by; None where nothing is to be multiplied.

        Returns:
            The numerator, and metrics by full name, each a mean over the mask.
        """


def external_terms(
    config: RolloutCorrectionConfig,
    loss: ExternalLoss,
    *,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    old_forward_log_probs: Tensor | None = None,
    weight_mean: Tensor | float | None = None,
) -> PolicyTerms:
    """As :func:`verl_tim.correction.policy_terms`, with the per-token loss and its sum left to `loss`.

    `loss_type` is not read, except that under bypass with ppo_clip, where q is below the ratio already, the weights
    are logged and not handed over.

    Raises:
        ValueError: a needed tensor is absent, shapes differ, or the mode is unknown.
    """
    check_mode(loss_agg_mode)
    tokens = prepare_tokens(
        config,
        response_mask=response_mask,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        log_prob=log_prob,
        advantages=advantages,
        old_forward_log_probs=old_forward_log_probs,
    )
    correction, weights = apply_correction(config, tokens, weight_mean=weight_mean)
    assert tokens.current is not None
    assert tokens.previous is not None
    assert tokens.advantages is not None
    mask, sums = correction.mask, correction.sums
    record_policy(sums, tokens, mask)
    numerator, metrics = loss(
        log_prob=tokens.current,
        old_log_prob=tokens.previous,
        advantages=tokens.advantages,
        mask=mask,
        weights=weights if config.weights_multiply_loss else None,
    )
    kept = total(mask).to(torch.float64)
    for name, value in metrics.items():
        sums.mean(name, value * kept, "kept_tokens")
    counted = mask if config.denominator == "kept" else tokens.usable
    return PolicyTerms(numerator, LossCounts.of(counted), correction, loss_agg_mode, loss_scale_factor, counted)
