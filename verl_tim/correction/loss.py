"""The policy loss: PPO's clip or REINFORCE, with the correction in it, as one worker computes it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .aggregation import LossCounts, check_mode, loss_numerator
from .blocks import row_blocks
from .config import RolloutCorrectionConfig
from .correction import Correction, apply_correction, needs_whole_batch
from .metrics import MetricSums, total
from .ratios import SAFETY_LOG, bounded_exp, k2, k3
from .tokens import Tokens, prepare_tokens


@dataclasses.dataclass(frozen=True)
class PolicyTerms:
    """One micro-batch's share of the policy loss, before any division.

    Attributes:
        numerator: scalar with gradient; see :mod:`verl_tim.correction.aggregation`.
        counts: what this micro-batch adds to the mini-batch's divisor.
        correction: mask, and metrics as sums (policy metrics included).
        mode, loss_scale_factor: how it was aggregated.
        counted: (B, T) bool, what ``counts`` counted: kept tokens, or all usable ones under ``denominator: all``.
    """

    numerator: Tensor
    counts: LossCounts
    correction: Correction
    mode: str
    loss_scale_factor: float | None
    counted: Tensor

    @classmethod
    def of_blocks(cls, parts: Sequence[PolicyTerms]) -> PolicyTerms:
        """The terms of a micro-batch from those of its blocks of rows, in order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            torch.stack([part.numerator for part in parts]).sum(),
            functools.reduce(LossCounts.merge, [part.counts for part in parts]),
            Correction.of_blocks([part.correction for part in parts]),
            first.mode,
            first.loss_scale_factor,
            torch.cat([part.counted for part in parts]),
        )

    def numerator_of(self, values: Tensor) -> Tensor:
        """The numerator of another (B, T) term, entropy or KL, over the policy term's mask.

        It shares the divisor, so that rescaling the accumulated gradient is exact for the sum of all terms.
        """
        return loss_numerator(
            values,
            self.correction.mask,
            self.mode,
            counted=self.counted,
            loss_scale_factor=self.loss_scale_factor,
        )

    def loss(self, counts: LossCounts | None = None, *, dp_size: int = 1) -> Tensor:
        """numerator / divisor * dp_size.

        Args:
            counts: of the whole mini-batch over all ranks, final or provisional; None takes this micro-batch's own.
            dp_size: ranks whose gradients are averaged afterwards, which the factor undoes.
        """
        divisor = (self.counts if counts is None else counts).divisor(self.mode)
        return self.numerator / divisor.to(self.numerator.dtype) * dp_size


def policy_terms(
    config: RolloutCorrectionConfig,
    *,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    old_forward_log_probs: Tensor | None = None,
    weight_mean: Tensor | float | None = None,
) -> PolicyTerms:
    """The policy loss of one micro-batch as numerator and counts; nothing waits for the device.

    Args:
        log_prob: (B, T) of the current weights, with gradient.
        advantages: (B, T), computed on the original mask.
        clip_ratio_low, clip_ratio_high: PPO keeps the ratio in [1 - low, 1 + high].
        clip_ratio_c: dual clip: for negative advantages the loss is at most -A c; None turns it off.
        loss_agg_mode, loss_scale_factor: see :func:`verl_tim.correction.aggregation.loss_numerator`.
        response_mask, old_log_probs, rollout_log_probs, old_forward_log_probs, weight_mean: see
            :func:`verl_tim.correction.correct`.

    Raises:
        ValueError: a needed tensor is absent, shapes differ, or a loss setting is out of range.
    """
    check_mode(loss_agg_mode)
    _check_clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    if log_prob is None or advantages is None:
        raise ValueError("policy_loss needs log_prob and advantages")
    blocks = row_blocks(
        response_mask,
        whole=needs_whole_batch(config, weight_mean),
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        log_prob=log_prob,
        advantages=advantages,
        old_forward_log_probs=old_forward_log_probs,
    )
    clip = (clip_ratio_low, clip_ratio_high, clip_ratio_c)
    parts = [
        _terms(config, prepare_tokens(config, **block), clip, loss_agg_mode, loss_scale_factor, weight_mean)
        for block in blocks
    ]
    return PolicyTerms.of_blocks(parts)


def _terms(
    config: RolloutCorrectionConfig,
    tokens: Tokens,
    clip: tuple[float, float, float | None],
    loss_agg_mode: str,
    loss_scale_factor: float | None,
    weight_mean: Tensor | float | None,
) -> PolicyTerms:
    """:func:`policy_terms` of one block of rows."""
    correction, weights = apply_correction(config, tokens, weight_mean=weight_mean)
    mask, sums = correction.mask, correction.sums
    assert tokens.current is not None
    assert tokens.advantages is not None
    if config.loss_type == "reinforce":
        losses = -tokens.advantages * tokens.current
    else:
        log_r = _log_ratio_in_loss(config, tokens)
        losses = _clipped(tokens.advantages, log_r, *clip, sums, mask & tokens.observed)
    if config.weights_multiply_loss:
        assert weights is not None
        losses = losses * weights
    record_policy(sums, tokens, mask)
    counted = mask if config.denominator == "kept" else tokens.usable
    numerator = loss_numerator(losses, mask, loss_agg_mode, counted=counted, loss_scale_factor=loss_scale_factor)
    return PolicyTerms(numerator, LossCounts.of(counted), correction, loss_agg_mode, loss_scale_factor, counted)


def policy_loss(
    config: RolloutCorrectionConfig,
    *,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    old_forward_log_probs: Tensor | None = None,
    weight_mean: Tensor | float | None = None,
    counts: LossCounts | None = None,
    dp_size: int = 1,
) -> tuple[Tensor, dict[str, float]]:
    """The whole loss of one mini-batch on one rank, and its metrics.

    Arguments and errors as :func:`policy_terms`; ``counts`` and ``dp_size`` as :meth:`PolicyTerms.loss`, for a part of
    a mini-batch whose counts are known.

    Returns:
        a scalar with a graph (zero with a zero gradient when nothing is kept), and metrics by name.
    """
    terms = policy_terms(
        config,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        old_forward_log_probs=old_forward_log_probs,
        weight_mean=weight_mean,
    )
    return terms.loss(counts, dp_size=dp_size), terms.correction.metrics


def _check_clip(low: float, high: float, dual: float | None) -> None:
    if low < 0 or high < 0:
        raise ValueError(f"clip_ratio_low={low!r} and clip_ratio_high={high!r} must not be negative")
    if dual is not None and dual <= 1:
        raise ValueError(f"clip_ratio_c={dual!r} must be above 1, or None for no dual clip")


def _log_ratio_in_loss(config: RolloutCorrectionConfig, tokens: Tokens) -> Tensor:
    """log of the ratio that PPO clips, with gradient.

    With ``rollout_is_in: ratio`` it is log r_train + min(d, log tau): where nothing is truncated that is log p - log q,
    formed as this one difference so that it has the bits of the bypass ratio.
    """
    assert tokens.current is not None
    assert tokens.previous is not None
    log_r = tokens.current - tokens.previous
    if config.rollout_is_in == "loss":
        return log_r
    log_cap = math.log(config.rollout_is_threshold)
    truncated = torch.where(tokens.delta > log_cap, log_r + log_cap, tokens.current - tokens.rollout)
    return torch.where(tokens.known, truncated, log_r)


def _clipped(
    advantages: Tensor,
    log_r: Tensor,
    low: float,
    high: float,
    dual: float | None,
    sums: MetricSums,
    seen: Tensor,
) -> Tensor:
    """PPO's clipped loss per token: max(-A r, -A clip(r)), for A < 0 at most -A c. Records how often either binds."""
    ratio, cost = bounded_exp(log_r), -advantages
    free = cost * ratio
    clipped = cost * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(free, clipped)
    with torch.no_grad():
        sums.add_total("kept_observed_tokens", total(seen))
        sums.mean("actor/pg_clipfrac", total((clipped > free) & seen), "kept_observed_tokens")
    if dual is None:
        return losses
    ceiling = cost * dual
    negative = advantages < 0
    with torch.no_grad():
        bound = (losses > ceiling) & negative & seen
        sums.mean("actor/pg_clipfrac_lower", total(bound), "kept_observed_tokens")
    return torch.where(negative, torch.minimum(ceiling, losses), losses)


@torch.no_grad()
def record_policy(sums: MetricSums, tokens: Tokens, mask: Tensor) -> None:
    """K1, K2, K3 of the ratio over the PPO pair: r_train under recomputation, r_rollout under bypass.

    They share no name with the estimators of r_corr: under recomputation r_train holds no mismatch.
    """
    log_r = tokens.ppo_log_ratio
    assert log_r is not None
    kept = mask & tokens.observed
    sums.add_total("observed_tokens", total(tokens.observed))
    sums.add_total("kept_observed_tokens", total(kept))
    sums.mean("actor/ppo_kl", -total(log_r, kept), "kept_observed_tokens")
    sums.mean("ppo_k1", -total(log_r), "observed_tokens")
    sums.mean("ppo_k2", total(k2(log_r)), "observed_tokens")
    sums.mean("ppo_k3", total(k3(log_r)), "observed_tokens")
    sums.count("ppo_clamped_tokens", total(log_r.abs() > SAFETY_LOG))
