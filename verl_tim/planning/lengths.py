"""How long prompts and answers are assumed to be.

Lengths cannot be known before a run, and cost depends on them. The assumption: of the longest possible length and the
mean, which the user may give, and of nothing else; the distribution with the largest entropy under those two is an
exponential one cut at the longest (uniform where the mean is half of it). It has the tail that makes a batch wait for
its last answers; a model that runs into the limit often has a heavier one, which a larger mean approaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_tim.launch.errors import LaunchError

DEFAULT_MEAN_SHARE = 0.5  # of the longest; a guess, and said to be one wherever it is used


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens on [0, longest] with that mean, 0 < mean < longest."""

    mean: float
    longest: int

    @property
    def _slope(self) -> float:
        """b of the density exp(b u) on [0, 1]; 0 for a mean of a half."""
        wanted = self.mean / self.longest
        low, high = -700.0, 700.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if _unit_mean(middle) < wanted else (low, middle)
        return (low + high) / 2

    def quantiles(self, count: int) -> np.ndarray:
        """float64 [count], ascending: the lengths at (i + 1/2) / count, at least one token each."""
        p = (np.arange(count) + 0.5) / count
        b = self._slope
        if abs(b) < 1e-6:
            unit = p
        elif b > 0:  # log(1 + p (e^b - 1)) / b without overflow
            unit = 1 + np.log(p + (1 - p) * math.exp(-b)) / b
        else:
            unit = np.log1p(p * math.expm1(b)) / b
        return np.maximum(unit * self.longest, 1.0)

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        return float((self.quantiles(4096) ** 2).mean())


def _unit_mean(b: float) -> float:
    """Mean of the density exp(b u) on [0, 1]."""
    if abs(b) < 1e-6:
        return 0.5 + b / 12
    return 1 / (1 - math.exp(-b)) - 1 / b if b > 0 else 1 - _unit_mean(-b)


def lengths(longest: int, mean: float | None, option: str) -> Lengths:
    """Lengths up to `longest`; `mean` None takes half of it. Raises LaunchError for a mean that cannot be."""
    if mean is None:
        return Lengths(DEFAULT_MEAN_SHARE * longest, longest)
    if not 0.005 * longest <= mean <= 0.995 * longest:
        raise LaunchError.of(option, f"is {mean:g}", f"give a mean well between 0 and the longest, {longest}")
    return Lengths(float(mean), longest)
