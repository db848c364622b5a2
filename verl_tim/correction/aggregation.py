"""Loss aggregation as a numerator and counts, so that splitting a batch never changes its gradient.

Every mode is ``numerator / divisor``, where both are plain sums over sequences. Each micro-batch on each rank
contributes a numerator (with gradient) and counts (without); the counts of the whole mini-batch give the one divisor
for all of them. When the counts are not known before the backward pass, because the mask depends on the forward, run
it with any provisional divisor and multiply the accumulated gradient once, before clipping, by :func:`gradient_scale`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class LossCounts(NamedTuple):
    """What a mini-batch's loss is divided by; integer scalars on the device, added over micro-batches and ranks."""

    tokens: Tensor
    sequences: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> LossCounts:
        """Tokens, and sequences with a token, of a (B, T) bool mask."""
        return cls(mask.sum(), mask.any(dim=-1).sum())

    def merge(self, other: LossCounts) -> LossCounts:
        """The counts of both parts together."""
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)

    def divisor(self, mode: str) -> Tensor:
        """What the mode divides the numerator by; at least 1, so that an empty mini-batch gives 0 and not NaN."""
        return self._raw_divisor(mode).clamp(min=1)

    def _raw_divisor(self, mode: str) -> Tensor:
        check_mode(mode)
        if mode == "token-sum":
            return torch.ones_like(self.tokens)
        return self.tokens if mode == "token-mean" else self.sequences


def check_mode(mode: str) -> None:
    """Raises:
    ValueError: not one of verl's modes; names them.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"loss_agg_mode={mode!r} is unknown; known modes: {', '.join(LOSS_AGG_MODES)}")


def loss_numerator(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    counted: Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """The sum over a part of the batch that the mode's divisor turns into the loss; a scalar that carries the gradient.

    Args:
        values: (B, T) per-token loss, entropy or KL; anything may stand where the mask is False, and gets no gradient.
        mask: (B, T) bool, the kept tokens.
        mode: verl's ``loss_agg_mode``.
        counted: (B, T) bool, the tokens that a row's own mean (seq-mean-token-mean) divides by; default ``mask``.
        loss_scale_factor: for seq-mean-token-sum-norm; None is the mask's width. Parts padded to different widths need
            the same number here.

    Raises:
        ValueError: unknown mode, or a factor that is not positive.
    """
    check_mode(mode)
    kept = torch.where(mask, values, values.new_zeros(()))
    if mode == "seq-mean-token-mean":
        per_row = (mask if counted is None else counted).sum(dim=-1).clamp(min=1)
        return (kept.sum(dim=-1) / per_row).sum()
    summed = kept.sum()
    if mode != "seq-mean-token-sum-norm":
        return summed
    if loss_scale_factor is None:
        return summed / max(mask.shape[-1], 1)
    if loss_scale_factor <= 0:
        raise ValueError(f"loss_scale_factor={loss_scale_factor!r} must be positive, or null for the response length")
    return summed / loss_scale_factor


def gradient_scale(provisional: LossCounts, final: LossCounts, mode: str) -> Tensor:
    """What turns a gradient accumulated with the provisional counts into the one of the final counts: their divisors'
    ratio in fp64, and 0 when nothing was kept.

    Args:
        provisional: the counts whose divisor stood in every backward pass of the mini-batch.
        final: the counts summed over its micro-batches and ranks.
    """
    raw = final._raw_divisor(mode)
    ratio = provisional.divisor(mode).to(torch.float64) / raw.clamp(min=1).to(torch.float64)
    nothing = (final.tokens if mode == "token-sum" else raw) == 0
    return torch.where(nothing, torch.zeros_like(ratio), ratio)
