"""Rejection: which tokens each rule keeps. Rejection shrinks the mask for the loss and nothing else."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .config import RolloutCorrectionConfig
from .metrics import MetricSums, row_total, total
from .ratios import ESTIMATORS, two_outcome_kl
from .rules import TOKEN, Rule, registered_statistic
from .thresholds import Band
from .tokens import Tokens
from .weights import within


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one rule said. (B, T) for token rules, (B, 1) for sequence rules.

    Attributes:
        keep: False where the rule rejects. What has no known token to look at is kept.
        statistic: the rule's statistic, K1 as -log r.
        counted: where the statistic exists.
    """

    rule: Rule
    keep: Tensor
    statistic: Tensor
    counted: Tensor


def verdicts(config: RolloutCorrectionConfig, tokens: Tokens) -> list[Verdict]:
    """Every rule's verdict, in the order configured.

    Statistics cover known tokens only; a sequence's verdict goes for all of its tokens, missing ones included.
    """
    if not config.rules:
        return []
    log_p, log_q, log_r = _signal(config, tokens)
    known_in_row = tokens.known_in_row.unsqueeze(-1)
    return [_verdict(rule, tokens, log_p, log_q, log_r, known_in_row) for rule in config.rules]


def _signal(config: RolloutCorrectionConfig, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """log of numerator, denominator and ratio that the rules look at."""
    if config.rollout_rs_signal == "r_corr":
        return tokens.trainer, tokens.rollout, tokens.delta
    log_r = tokens.ppo_log_ratio
    assert tokens.current is not None  # prepare_tokens required log_prob
    assert tokens.previous is not None
    assert log_r is not None
    return tokens.current.detach(), tokens.previous, log_r


def _verdict(rule: Rule, tokens: Tokens, log_p: Tensor, log_q: Tensor, log_r: Tensor, known_in_row: Tensor) -> Verdict:
    if rule.estimator == "opsm":
        return _off_policy_sequence(rule, tokens, known_in_row)
    statistic_of = registered_statistic(rule.estimator)
    if statistic_of is not None:
        per_token = torch.where(tokens.known, statistic_of(log_p, log_q, log_r), log_p.new_zeros(()))
        assert per_token.shape == log_r.shape, f"{rule.name}: {tuple(per_token.shape)} is not {tuple(log_r.shape)}"
    elif rule.estimator == "kpop":
        per_token = torch.where(tokens.known, two_outcome_kl(log_p, log_q), log_p.new_zeros(()))
    else:
        per_token = ESTIMATORS[rule.estimator](log_r)  # 0 where not known, as log_r is
    if rule.level == TOKEN:
        statistic, counted = per_token, tokens.known
    else:
        statistic, counted = _reduced(rule, per_token, tokens.known, known_in_row), known_in_row > 0
    bound = rule.bound
    inside = within(-statistic, bound) if isinstance(bound, Band) else statistic <= bound
    return Verdict(rule, inside | ~counted, statistic, counted)


def _reduced(rule: Rule, per_token: Tensor, known: Tensor, known_in_row: Tensor) -> Tensor:
    """(B, T) -> (B, 1): the row's sum, mean or maximum over known tokens, rounded to the input's precision."""
    if rule.reduction == "max":
        if per_token.shape[-1] == 0:
            return per_token.new_zeros(per_token.shape[0], 1)
        return per_token.amax(dim=-1, keepdim=True)  # K2 and K3 are never negative, and 0 where not known
    summed = row_total(per_token).unsqueeze(-1)
    if rule.reduction == "mean":
        summed = summed / known_in_row.clamp(min=1)
    return summed.to(per_token.dtype)


def _off_policy_sequence(rule: Rule, tokens: Tokens, known_in_row: Tensor) -> Verdict:
    """Drop a whole sequence iff its mean advantage is negative and its mean (log q - log p) exceeds the threshold."""
    assert tokens.current is not None  # prepare_tokens required both
    assert tokens.advantages is not None
    assert not isinstance(rule.bound, Band)
    count = known_in_row.clamp(min=1)
    gap = torch.where(tokens.known, tokens.rollout - tokens.current.detach(), tokens.rollout.new_zeros(()))
    mean_gap = (row_total(gap).unsqueeze(-1) / count).to(gap.dtype)
    mean_advantage = row_total(tokens.advantages, tokens.known).unsqueeze(-1) / count
    keep = ~((mean_advantage < 0) & (mean_gap > rule.bound))
    return Verdict(rule, keep, mean_gap, known_in_row > 0)


def record_rejection(sums: MetricSums, found: list[Verdict], tokens: Tokens) -> None:
    """Per rule and for all rules together: the share of valid tokens rejected and of valid sequences that lost a token;
    per rule also its statistic's mean and extremes, and the shares beyond each bound."""
    together: Tensor | None = None
    for verdict in found:
        name = f"rollout_rs_{verdict.rule.name}"
        together = verdict.keep if together is None else together & verdict.keep
        _record_shares(sums, name, verdict.keep, tokens)
        unit = "known_tokens" if verdict.rule.level == TOKEN else "known_sequences"
        sums.mean(f"{name}_mean", total(verdict.statistic, verdict.counted), unit)
        sums.maximum(f"{name}_max", verdict.statistic, verdict.counted)
        sums.minimum(f"{name}_min", verdict.statistic, verdict.counted)
        bound = verdict.rule.bound
        if not isinstance(bound, Band):
            sums.mean(f"{name}_fraction_high", total((verdict.statistic > bound) & verdict.counted), unit)
            continue
        if bound.log_upper is not None:  # of the ratio, whose log is minus the statistic
            sums.mean(f"{name}_fraction_high", total((-verdict.statistic > bound.log_upper) & verdict.counted), unit)
        if bound.log_lower is not None:
            sums.mean(f"{name}_fraction_low", total((-verdict.statistic < bound.log_lower) & verdict.counted), unit)
    if together is not None:
        _record_shares(sums, "rollout_rs", together, tokens)


def _record_shares(sums: MetricSums, name: str, keep: Tensor, tokens: Tokens) -> None:
    if keep.shape == tokens.valid.shape:
        lost_in_row = (tokens.valid & ~keep).sum(dim=-1)
    else:  # (B, 1): whole rows
        lost_in_row = torch.where(keep.squeeze(-1), 0, tokens.valid_in_row)
    sums.mean(f"{name}_masked_fraction", lost_in_row.sum(), "valid_tokens")
    sums.mean(f"{name}_seq_masked_fraction", total(lost_in_row > 0), "valid_sequences")
