"""What a correction does to sequences of a run that did nothing about its mismatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_tim.correction import RolloutCorrectionConfig, correct
from verl_tim.diagnosis.halves import Half


@dataclass(frozen=True)
class Effect:
    """What a correction does to one set of sequences.

    Attributes:
        tokens, sequences: shares that are rejected (of sequences: those that lose a token).
        cut: share of tokens whose weight the cap cuts.
        skew: by sign of the advantage, the mean over kept tokens of -(exp(d) - w) A, added up: what weights w leave of
            the contribution skew (w = 1 without weights).
        effective: effective sample size of the weights on what is kept, as a share of all tokens.
    """

    tokens: float
    sequences: float
    cut: float | None
    skew: float | None
    effective: float


def effect_of(preset: str, half: Half) -> Effect:
    """What a named correction does to sequences of a run that did nothing about its mismatch."""
    config = RolloutCorrectionConfig.from_mapping({"preset": preset})
    result = correct(config, old_log_probs=half.old, rollout_log_probs=half.rollout, response_mask=half.mask)
    kept = result.mask & half.mask
    lost = half.mask & ~kept
    delta = half.old.double() - half.rollout.double()
    weights = torch.ones_like(delta) if result.weights is None else result.weights.double()
    left = -(delta.exp() - weights) * half.advantages.double()
    signs = [left[kept & chosen] for chosen in (half.advantages > 0, half.advantages < 0)]
    w = weights[kept]
    cut = None
    if result.weights is not None:
        # a weight is exp(d) in fp32 unless the cap, or a sequence's own weight, is in its place
        cut = float(((weights - delta.exp()).abs() > 1e-5 * delta.exp())[kept].double().mean()) if w.numel() else 0.0
    return Effect(
        tokens=int(lost.sum()) / half.tokens,
        sequences=float(lost.any(dim=-1).double().mean()),
        cut=cut if config.rollout_is == "token" else None,
        skew=float(sum(part.mean() for part in signs)) if all(part.numel() for part in signs) else None,
        effective=float(w.sum() ** 2 / (w**2).sum()) / half.tokens if w.numel() and float((w**2).sum()) > 0 else 0.0,
    )
