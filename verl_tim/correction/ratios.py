"""Log-ratios, their safe exponential, and the K1, K2, K3 and two-outcome estimators. All elementwise, shapes (B, T).

Everything is at least fp32: log-probs are up-cast before they are subtracted. Ratios live in log space and are clamped
to +-20 only where they are exponentiated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAFETY_LOG = 20.0  # exp(20) = 4.85e8, exp(-20) = 2.06e-9
LOG_RATIO_LIMIT = 1e18  # squares of fp32 log-ratios stay finite; nothing physical comes near
# A probability within half an fp32 step of 1 cannot be told from 1, so its complement is not resolved below this.
MIN_COMPLEMENT = 2.0**-24
_SERIES_BELOW = {torch.float32: 0.1, torch.float64: 0.01}


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor has it, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def finite(values: Tensor) -> Tensor:
    """`isfinite` in two passes over the tensor instead of four: neither NaN nor an infinity is below infinity."""
    return values.abs() < math.inf


def log_ratio(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """numerator - denominator of finite log-probs without gradient where the mask (or 0 and 1) is set, 0 elsewhere."""
    return (numerator - denominator).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).mul_(where)


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp of the value clamped to +-20: always finite, never 0."""
    return log_value.clamp(-SAFETY_LOG, SAFETY_LOG).exp()


def k1(log_r: Tensor) -> Tensor:
    """-log r."""
    return -log_r


def k2(log_r: Tensor) -> Tensor:
    """(log r)^2 / 2."""
    return log_r.square() * 0.5


def k3(log_r: Tensor, excess: Tensor | None = None) -> Tensor:
    """r - 1 - log r, accurate near r = 1 and never negative; `excess` is expm1 of the clamped log r where it is known.

    Only the exponential is clamped, not the linear term. Near 0 the plain formula cancels to noise in fp32 (at
    log r = 1e-4 the value is 5e-9, the rounding error of exp 6e-8), so a short series stands there. The clamp would
    make the value negative for log r > 4.9e8; |log r| - 1, a true lower bound of K3, holds it up there.
    """
    x, size = log_r, log_r.abs()
    # In place on tensors made here: these are the largest temporaries of the whole computation.
    series = (x * (1 / 720)).add_(1 / 120).mul_(x).add_(1 / 24).mul_(x).add_(1 / 6).mul_(x).add_(0.5).mul_(x).mul_(x)
    direct = x.clamp(-SAFETY_LOG, SAFETY_LOG).expm1_().sub_(x) if excess is None else excess - x
    direct = torch.maximum(direct, size - 1)
    return torch.where(size < _SERIES_BELOW[x.dtype], series, direct)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def two_outcome_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """max(KL(p||q), KL(q||p)) of the distributions over {this token, any other token}; inputs are log-probs."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    p, q = log_p.exp(), log_q.exp()
    rest_p = (-log_p.expm1()).clamp(min=MIN_COMPLEMENT)
    rest_q = (-log_q.expm1()).clamp(min=MIN_COMPLEMENT)
    token, rest = log_p - log_q, rest_p.log() - rest_q.log()
    return torch.maximum(p * token + rest_p * rest, -(q * token + rest_q * rest))
