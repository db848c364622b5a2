"""Importance weights: from d to a truncated or band-limited weight per token."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .config import RolloutCorrectionConfig
from .metrics import MetricSums, row_total, total
from .ratios import bounded_exp
from .thresholds import Band
from .tokens import Tokens


@dataclasses.dataclass(frozen=True)
class ImportanceWeights:
    """Weights before rejection, batch normalisation and masking. (B, T) at token level, (B, 1) at sequence levels.

    Attributes:
        by_token: whether there is one weight per token, or one per row.
        log_raw: unclamped log weight: d, its sum, or its mean over the row's known tokens.
        raw: its exponential, clamped at +-20 in the exponent.
        value: truncated at the threshold, or 0 outside the band.
        in_band: False where the band zeroes the weight; such tokens are dropped from the loss. None without a band.
        counted: where statistics look: known tokens, or rows with a known token.
    """

    by_token: bool
    log_raw: Tensor
    raw: Tensor
    value: Tensor
    in_band: Tensor | None
    counted: Tensor


def importance_weights(config: RolloutCorrectionConfig, tokens: Tokens) -> ImportanceWeights | None:
    """Weights exp(d), exp(sum d) or exp(mean d); None when ``rollout_is`` is null.

    A missing token has weight 1 at token level and its row's weight at sequence levels; a row without any known token
    has weight 1, whatever the threshold.
    """
    if config.rollout_is is None:
        return None
    dtype = tokens.delta.dtype
    if config.rollout_is == "token":
        log_raw, counted, raw = tokens.delta, tokens.known, tokens.ratio
    else:
        known_in_row = tokens.known_in_row.unsqueeze(-1)
        row_log = row_total(tokens.delta).unsqueeze(-1)
        if config.rollout_is == "sequence_mean":
            row_log = row_log / known_in_row.clamp(min=1)
        log_raw, counted, raw = row_log.to(dtype), known_in_row > 0, bounded_exp(row_log).to(dtype)
    threshold = config.rollout_is_threshold
    if isinstance(threshold, Band):
        in_band = within(log_raw, threshold) | ~counted
        value = torch.where(in_band, raw, raw.new_zeros(()))
    else:
        in_band = None
        value = torch.where(counted, raw.clamp(max=threshold), raw.new_ones(()))
    return ImportanceWeights(config.rollout_is == "token", log_raw, raw, value, in_band, counted)


def within(log_value: Tensor, band: Band) -> Tensor:
    """lo <= r <= hi, compared as logs; an open end always holds."""
    inside = torch.ones_like(log_value, dtype=torch.bool)
    if band.log_lower is not None:
        inside = inside & (log_value >= band.log_lower)
    if band.log_upper is not None:
        inside = inside & (log_value <= band.log_upper)
    return inside


def weight_mean_parts(weights: ImportanceWeights, tokens: Tokens, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count (fp64 scalars) of the truncated weights over kept, known tokens, or over rows that have one."""
    kept = mask & tokens.known
    if not weights.by_token:
        kept = kept.any(dim=-1, keepdim=True)
    return total(weights.value, kept), total(kept).to(torch.float64)


def normalised(weights: ImportanceWeights, mean: Tensor) -> Tensor:
    """Truncated weights over their mean. What has no known log-prob keeps weight 1; a mean of 0 (nothing kept) divides
    nothing."""
    divisor = torch.where(mean > 0, mean, torch.ones_like(mean)).to(weights.value.dtype)
    return torch.where(weights.counted, weights.value / divisor, weights.value)


def record_weights(
    sums: MetricSums, config: RolloutCorrectionConfig, weights: ImportanceWeights, tokens: Tokens
) -> None:
    """Metrics of the truncated weights, over known tokens (at sequence levels the weight counts once per token, in the
    effective sample size and the threshold shares once per sequence), before rejection zeroes any and without what the
    band zeroed; the raw extremes stand beside them."""
    value, in_band = weights.value.expand_as(tokens.delta), weights.in_band
    if in_band is None:
        seen, factor, seen_in_row, unit_seen = tokens.known, tokens.known_factor, tokens.known_in_row, weights.counted
    else:
        seen, unit_seen = tokens.known & in_band, weights.counted & in_band
        factor, seen_in_row = seen.to(value.dtype), seen.sum(dim=-1)
    w_row = row_total(value, factor)
    sums.add_total("weighted_tokens", seen_in_row.sum())
    squares = squares_around_one(value, factor, w_row.sum(), seen_in_row.sum())
    sums.spread("rollout_is", w_row.sum(), squares, "weighted_tokens")
    sums.maximum("rollout_is_max", value, seen)
    sums.minimum("rollout_is_min", value, seen)
    sums.maximum("rollout_is_raw_max", weights.raw, weights.counted)
    sums.minimum("rollout_is_raw_min", weights.raw, weights.counted)

    unit = "known_tokens" if weights.by_token else "known_sequences"
    unit_value = weights.value * (factor if weights.by_token else unit_seen)
    sums.effective_size("rollout_is_eff_sample_size", total(unit_value), total(unit_value.square()), unit)

    threshold = config.rollout_is_threshold
    band = threshold if isinstance(threshold, Band) else Band(1 / threshold, threshold)
    if band.log_upper is not None:
        high = (weights.log_raw > band.log_upper) & weights.counted
        sums.mean("rollout_is_ratio_fraction_high", total(high), unit)
    if band.log_lower is not None:
        low = (weights.log_raw < band.log_lower) & weights.counted
        sums.mean("rollout_is_ratio_fraction_low", total(low), unit)
    if in_band is not None:
        sums.mean("rollout_is_oob_ratio", total(~in_band), unit)

    has_weight = seen_in_row > 0
    row_mean = w_row / seen_in_row.clamp(min=1)
    sums.add_total("weighted_sequences", total(has_weight))
    squares = squares_around_one(row_mean, has_weight, row_mean.sum(), has_weight.sum())
    sums.spread("rollout_is_seq", row_mean.sum(), squares, "weighted_sequences")
    sums.maximum("rollout_is_seq_max", row_mean, has_weight)
    sums.minimum("rollout_is_seq_min", row_mean, has_weight)
    sums.maximum("rollout_is_seq_max_deviation", (row_mean - 1).abs(), has_weight)

    # Of the raw mean weight: truncated weights never exceed the threshold, so their mean would show nothing.
    if weights.by_token:
        raw_row = row_total(weights.raw, tokens.known_factor) / tokens.known_in_row.clamp(min=1)
    else:
        raw_row = weights.raw.squeeze(-1).double()
    has_known = tokens.known_in_row > 0
    if band.upper is not None:
        sums.mean("rollout_is_seq_fraction_high", total((raw_row > band.upper) & has_known), "known_sequences")
    if band.lower is not None:
        sums.mean("rollout_is_seq_fraction_low", total((raw_row < band.lower) & has_known), "known_sequences")


def squares_around_one(values: Tensor, where: Tensor, summed: Tensor, count: Tensor) -> Tensor:
    """Sum of (w - 1)^2 where the mask is set, given the sum of w and the count.

    Taken around the mean and then moved: of equal fp32 weights, the squares' rounding alone would look like a spread of
    1e-4.
    """
    mean = summed / count.clamp(min=1)
    return total((values - mean.to(values.dtype)).square(), where) + count * (mean - 1).square()


def record_normalisation(
    sums: MetricSums, config: RolloutCorrectionConfig, mean: Tensor, final: Tensor, kept: Tensor
) -> None:
    """The divisor and by how much normalised weights exceed the cap that truncation had set."""
    threshold = config.rollout_is_threshold
    cap = threshold.upper if isinstance(threshold, Band) else threshold
    sums.maximum("rollout_is_batch_norm_factor", mean, mean > 0)
    if cap is not None:
        sums.mean("rollout_is_batch_norm_over_cap", total((final > cap) & kept), "kept_known_tokens")
        sums.maximum("rollout_is_batch_norm_excess_max", (final - cap).clamp(min=0), kept)
