"""Statistics over flat float64 tensors: population moments, linear quantiles, mean ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def ascending(x_N: Tensor) -> Tensor:
    """The values sorted; on a CPU by NumPy, whose sort of float64 is vectorised (PyTorch took twelve times as long)."""
    if x_N.device.type == "cpu":
        return torch.from_numpy(np.sort(x_N.detach().numpy()))
    return x_N.sort().values


def sorted_quantiles(sorted_N: Tensor, quantiles: Sequence[float]) -> list[Tensor]:
    """Quantiles with linear interpolation between order statistics (numpy's default method).

    `torch.quantile` refuses more than 16 million elements, which one step's tokens can exceed; one sort serves all
    quantiles.

    Args:
        sorted_N: (N,) ascending, N >= 1.
        quantiles: each in [0, 1].
    Returns:
        One 0-d tensor per quantile.
    """
    last = sorted_N.numel() - 1
    values = []
    for quantile in quantiles:
        at = quantile * last
        low = min(int(at), last)
        high = min(low + 1, last)
        values.append(sorted_N[low] + (sorted_N[high] - sorted_N[low]) * (at - low))
    return values


def population_std(x_N: Tensor) -> Tensor:
    """Population standard deviation, exactly 0 for a constant vector (where the mean's own rounding would show)."""
    spread = (x_N - x_N.mean()).square().mean().sqrt()
    return torch.where(x_N.min() == x_N.max(), torch.zeros_like(spread), spread)


def pearson(x_N: Tensor, y_N: Tensor) -> Tensor | None:
    """Pearson's correlation in [-1, 1], or None where it has no value: fewer than two points, or a constant vector."""
    if x_N.numel() < 2 or bool(x_N.min() == x_N.max()) or bool(y_N.min() == y_N.max()):
        return None
    x_N = x_N - x_N.mean()
    y_N = y_N - y_N.mean()
    # Scaled before squaring, so that neither huge nor tiny magnitudes leave the range of float64.
    x_N = x_N / x_N.abs().max()
    y_N = y_N / y_N.abs().max()
    return ((x_N * y_N).sum() / (x_N.square().sum().sqrt() * y_N.square().sum().sqrt())).clamp(-1.0, 1.0)


def mean_ranks(x_N: Tensor) -> Tensor:
    """Ranks 1..N as float64; tied values share the mean of their ranks."""
    _, inverse_N, counts_U = torch.unique(x_N, return_inverse=True, return_counts=True)
    rank_U = counts_U.cumsum(0).to(torch.float64) - (counts_U - 1).to(torch.float64) / 2
    return rank_U[inverse_N]


def spearman(x_N: Tensor, y_N: Tensor, sample: int | None = None) -> Tensor | None:
    """Spearman's correlation with mean ranks for ties; None where `pearson` of the ranks has no value.

    `sample`: of more pairs than that, the correlation of so many drawn with a fixed seed (with replacement).
    """
    if x_N.numel() < 2:
        return None
    if sample is not None and x_N.numel() > sample:
        generator = torch.Generator(x_N.device).manual_seed(0)
        drawn = torch.randint(x_N.numel(), (sample,), generator=generator, device=x_N.device)
        x_N, y_N = x_N[drawn], y_N[drawn]
    return pearson(mean_ranks(x_N), mean_ranks(y_N))


def group_sums(group_N: Tensor, values_N: Tensor, groups: int) -> Tensor:
    """Sum of `values_N` per group id: (groups,), dtype of the values.

    `index_add_` rather than `bincount(weights=...)`: the latter refuses to run on CUDA under deterministic algorithms.
    """
    return torch.zeros(groups, dtype=values_N.dtype, device=values_N.device).index_add_(0, group_N, values_N)


def group_counts(group_N: Tensor, groups: int) -> Tensor:
    """Number of entries per group id: (groups,) int64."""
    return group_sums(group_N, torch.ones_like(group_N, dtype=torch.int64), groups)
