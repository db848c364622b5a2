"""One correction of one batch: weights, mask, metrics."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import row_blocks
from .config import RolloutCorrectionConfig
from .metrics import MetricSums
from .mismatch import record_mismatch, record_tokens
from .rejection import record_rejection, verdicts
from .tokens import Tokens, prepare_tokens
from .weights import (
    importance_weights,
    normalised,
    record_normalisation,
    record_weights,
    weight_mean_parts,
)


@dataclasses.dataclass(frozen=True)
class Correction:
    """What :func:`correct` found. Nothing here carries a gradient.

    Attributes:
        weights: (B, T) float32, finite, 0 where ``mask`` is False; None when ``rollout_is`` is null. Under bypass with
            ppo_clip they are for logging only; with ``rollout_is_in: ratio`` they stand inside the ratio.
        mask: (B, T) bool, the response mask after rejection: what the loss is taken over.
        usable: (B, T) bool, valid tokens with finite trainer log-probs: what ``denominator: all`` divides by.
        sums: the metrics as mergeable sums, still on the device.
        weight_sum, weight_count: fp64 scalars whose sums over ranks give the mean that batch normalisation divides by;
            None without weights.
    """

    weights: Tensor | None
    mask: Tensor
    usable: Tensor
    sums: MetricSums
    weight_sum: Tensor | None
    weight_count: Tensor | None

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by name, ``rollout_corr/...``. The first access waits for the device."""
        return self.sums.finalise()

    @classmethod
    def of_blocks(cls, parts: Sequence[Correction]) -> Correction:
        """The correction of a batch from those of its blocks of rows, in order."""
        if len(parts) == 1:
            return parts[0]
        joined = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("weights", "mask", "usable")
            if getattr(parts[0], name) is not None
        }
        summed = {
            name: torch.stack([getattr(part, name) for part in parts]).sum()
            for name in ("weight_sum", "weight_count")
            if getattr(parts[0], name) is not None
        }
        sums = functools.reduce(operator.add, [part.sums for part in parts])
        absent: dict[str, Any] = {"weights": None, "weight_sum": None, "weight_count": None}
        return cls(sums=sums, **{**absent, **joined, **summed})


def correct(
    config: RolloutCorrectionConfig,
    *,
    old_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    response_mask: Tensor,
    log_prob: Tensor | None = None,
    advantages: Tensor | None = None,
    old_forward_log_probs: Tensor | None = None,
    weight_mean: Tensor | float | None = None,
) -> Correction:
    """Weights, kept mask and metrics of one batch or part of it.

    Args:
        config: the settings.
        old_log_probs: (B, T) the trainer's, under recomputation. Under bypass the rollout's stand in for it, so it is
            not read.
        rollout_log_probs: (B, T) what the rollout recorded; NaN or infinite where it recorded nothing. May be absent
            only when nothing is corrected.
        response_mask: (B, T) bool, int or float; non-zero is a valid token.
        log_prob: (B, T) of the current weights; needed under bypass, for the signal r_ppo, and for the rule opsm.
        advantages: (B, T), for opsm.
        old_forward_log_probs: (B, T) under bypass, the trainer's log-probs of the extra forward that ``old_forward``
            asks
            for; d is taken from it. Without it d is taken from ``log_prob``, which must then come from a forward
            before the step's first optimiser update.
        weight_mean: the mean weight over all ranks that batch normalisation divides by; without it, this batch's own.

    Raises:
        ValueError: a needed tensor is absent (for rollout log-probs, naming the setting that records them), or shapes
            differ.
    """
    blocks = row_blocks(
        response_mask,
        whole=needs_whole_batch(config, weight_mean),
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        log_prob=log_prob,
        advantages=advantages,
        old_forward_log_probs=old_forward_log_probs,
    )
    parts = [apply_correction(config, prepare_tokens(config, **block), weight_mean=weight_mean)[0] for block in blocks]
    return Correction.of_blocks(parts)


def needs_whole_batch(config: RolloutCorrectionConfig, weight_mean: Tensor | float | None) -> bool:
    """Whether a token's weight depends on the other rows: batch normalisation by the batch's own mean."""
    return config.rollout_is is not None and config.rollout_is_batch_normalize and weight_mean is None


@torch.no_grad()
def apply_correction(
    config: RolloutCorrectionConfig, tokens: Tokens, *, weight_mean: Tensor | float | None = None
) -> tuple[Correction, Tensor | None]:
    """:func:`correct` on prepared tokens; the second value is the weights in the precision of the computation."""
    sums = MetricSums()
    found = verdicts(config, tokens)
    mask = tokens.usable
    for verdict in found:
        mask = mask & verdict.keep
    weights = importance_weights(config, tokens)
    if weights is not None and weights.in_band is not None and not config.weights_are_logged_only:
        mask = mask & weights.in_band

    record_tokens(sums, tokens, mask)
    record_mismatch(sums, tokens, mask, sequence_log_is_mean=config.rollout_is == "sequence_mean")
    record_rejection(sums, found, tokens)
    if weights is None:
        return Correction(None, mask, tokens.usable, sums, None, None), None

    record_weights(sums, config, weights, tokens)
    weight_sum, weight_count = weight_mean_parts(weights, tokens, mask)
    final = weights.value
    if config.rollout_is_batch_normalize:
        if weight_mean is None:
            mean = weight_sum / weight_count.clamp(min=1)
        else:
            mean = torch.as_tensor(weight_mean, dtype=torch.float64, device=mask.device)
        final = normalised(weights, mean)
        record_normalisation(sums, config, mean, final.expand_as(tokens.delta), mask & tokens.known)
    final = torch.where(mask, final, final.new_zeros(()))
    return Correction(final.to(torch.float32), mask, tokens.usable, sums, weight_sum, weight_count), final
