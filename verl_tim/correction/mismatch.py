"""Metrics of the mismatch itself: token counts, KL estimators, perplexities, chi-square, and raw extremes of d."""

from __future__ import annotations

from torch import Tensor

from .metrics import MetricSums, row_total, total
from .ratios import SAFETY_LOG, bounded_exp, k3
from .tokens import Tokens

# What `record_mismatch` reports: numbers of d alone, whatever the loss then does with it.
MISMATCH_METRICS = (
    *("kl", "kl_kept", "k3_kl", "chi2_token", "chi2_seq"),
    *("log_ratio_abs_mean", "log_ratio_abs_max", "log_ratio_max", "log_ratio_min", "log_ratio_seq_abs_max"),
    *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
    *("clamped_tokens", "clamped_sequences"),
)


def record_tokens(sums: MetricSums, tokens: Tokens, mask: Tensor) -> None:
    """Counts of valid tokens (the response mask), of kept ones (after rejection and drops), and of those set aside.

    ``empty_step`` is 1 when nothing was kept: the optimiser step is to be skipped.
    """
    kept_in_row = mask.sum(dim=-1)
    sums.count("valid_tokens", tokens.valid_in_row.sum())
    sums.count("valid_sequences", total(tokens.valid_in_row > 0))
    sums.count("missing_tokens", total(tokens.missing))
    sums.count("nonfinite_trainer_tokens", total(tokens.valid & ~tokens.usable))
    sums.count("kept_tokens", kept_in_row.sum())
    sums.count("kept_sequences", total(kept_in_row > 0))
    sums.flag_zero("empty_step", "kept_tokens")
    sums.add_total("known_tokens", tokens.known_in_row.sum())
    sums.add_total("known_sequences", total(tokens.known_in_row > 0))
    sums.add_total("kept_known_tokens", total(tokens.known & mask))


def record_mismatch(sums: MetricSums, tokens: Tokens, mask: Tensor, *, sequence_log_is_mean: bool) -> None:
    """Metrics of d over known tokens, and of its sum or mean over sequences with a known token.

    Args:
        sequence_log_is_mean: whether the sequence-level log weight in use is the mean of d and not its sum; it decides
            what ``clamped_sequences`` counts.
    """
    d, known, factor = tokens.delta, tokens.known, tokens.known_factor  # d is 0 where not known
    abs_d, d_row = d.abs(), row_total(d)
    # `mask` is `usable` itself where nothing rejects
    d_kept = d_row.sum() if mask is tokens.usable else total(d, mask)
    sums.mean("kl", -d_row.sum(), "known_tokens")
    sums.mean("kl_kept", -d_kept, "kept_known_tokens")
    sums.mean("k3_kl", total(k3(d)), "known_tokens")
    sums.mean("chi2_token", total(tokens.ratio.square(), factor), "known_tokens", minus_one=True)
    sums.mean("log_ratio_abs_mean", total(abs_d), "known_tokens")
    sums.maximum("log_ratio_max", d, known)
    sums.minimum("log_ratio_min", d, known)
    sums.largest_size("log_ratio_abs_max", "log_ratio_max", "log_ratio_min")
    sums.count("clamped_tokens", total(abs_d > SAFETY_LOG))

    rows, count = tokens.known_in_row > 0, tokens.known_in_row.clamp(min=1)
    d_mean = d_row / count
    trainer_mean, rollout_mean = row_total(tokens.trainer, factor) / count, row_total(tokens.rollout) / count
    for side, mean in (("training", trainer_mean), ("rollout", rollout_mean)):
        sums.mean(f"{side}_ppl", total(bounded_exp(-mean), rows), "known_sequences")
        sums.mean(f"{side}_log_ppl", total(-mean, rows), "known_sequences")
    sums.mean("log_ppl_diff", total(-d_mean), "known_sequences")
    sums.mean("log_ppl_abs_diff", total(d_mean.abs()), "known_sequences")
    sums.maximum("log_ppl_diff_max", -d_mean, rows)
    sums.minimum("log_ppl_diff_min", -d_mean, rows)
    sums.mean("ppl_ratio", total(bounded_exp(-d_mean), rows), "known_sequences")
    sums.mean("chi2_seq", total(bounded_exp(d_row).square(), rows), "known_sequences", minus_one=True)
    sums.maximum("log_ratio_seq_abs_max", d_row.abs(), rows)
    in_use = d_mean if sequence_log_is_mean else d_row
    sums.count("clamped_sequences", total(in_use.abs() > SAFETY_LOG))
