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
    low, high = x_N.aminmax()
    spread = (x_N - x_N.mean()).square_().mean().sqrt()
    return torch.where(low == high, torch.zeros_like(spread), spread)


def pearson(x_N: Tensor, y_N: Tensor) -> Tensor | None:
    """Pearson's correlation in [-1, 1], or None where it has no value: fewer than two points, or a constant vector."""
    if x_N.numel() < 2:
        return None
    scaled = []
    for values_N in (x_N, y_N):
        low, high = values_N.aminmax()
        if bool(low == high):
            return None
        mean = values_N.mean()
        # Scaled before squaring, so that neither huge nor tiny magnitudes leave the range of float64.
        scaled.append((values_N - mean).div_(torch.maximum(high - mean, mean - low)))
    x_N, y_N = scaled
    return ((x_N * y_N).sum() / (x_N.square_().sum().sqrt() * y_N.square_().sum().sqrt())).clamp(-1.0, 1.0)


def mean_ranks(x_N: Tensor) -> Tensor:
    """Ranks 1..N as float64; tied values share the mean of their ranks.

    Neighbours of one value are ranked as one: an advantage is often the same throughout a row.
    """
    if x_N.numel() == 0:
        return x_N.to(torch.float64)
    starts_N = _starts_of_runs(x_N)
    first_R = places(starts_N)
    alone = len(first_R) == len(x_N)
    value_R = x_N if alone else x_N.index_select(0, first_R)
    order_R = _order(value_R)
    starts_R = _starts_of_runs(value_R.index_select(0, order_R))
    first_U = places(starts_R)
    if alone:
        before_U = first_U
    else:
        length_R = _lengths(first_R, len(x_N)).index_select(0, order_R)
        before_U = (length_R.cumsum(0) - length_R).index_select(0, first_U)  # smaller values
    counts_U = _lengths(before_U, len(x_N))
    rank_U = before_U + (counts_U + 1).to(torch.float64) / 2
    sorted_R = rank_U if len(rank_U) == len(order_R) else rank_U.index_select(0, starts_R.cumsum(0) - 1)
    rank_R = torch.empty_like(sorted_R).scatter_(0, order_R, sorted_R)
    return rank_R if alone else rank_R.index_select(0, starts_N.cumsum(0) - 1)


def _starts_of_runs(x_N: Tensor) -> Tensor:
    """bool, the first of each run of equal values."""
    starts_N = torch.ones(x_N.shape, dtype=torch.bool, device=x_N.device)
    torch.ne(x_N[1:], x_N[:-1], out=starts_N[1:])
    return starts_N


def _lengths(first_R: Tensor, total: int) -> Tensor:
    """int64 length of each of the runs that begin at these indices."""
    return torch.diff(first_R, append=first_R.new_tensor([total]))


def places(mask_N: Tensor) -> Tensor:
    """int64 index of each true entry; on a CPU by NumPy, which takes a tenth of PyTorch's time."""
    if mask_N.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask_N.numpy()))
    return mask_N.nonzero().squeeze(1)


def _order(x_N: Tensor) -> Tensor:
    """int64 indices that sort the values; ties in any order."""
    if x_N.device.type == "cpu":
        return torch.from_numpy(np.argsort(x_N.detach().numpy()))
    return x_N.argsort()


def spearman(x_N: Tensor, y_N: Tensor, sample: int | None = None) -> Tensor | None:
    """Spearman's correlation with mean ranks for ties; None where `pearson` of the ranks has no value.

    `sample`: of more pairs than that, the correlation of so many drawn with a fixed seed (with replacement).
    """
    if x_N.numel() < 2 or any(bool(low == high) for low, high in (x_N.aminmax(), y_N.aminmax())):
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


def segment_sums(values_N: Tensor, counts_S: Tensor) -> Tensor:
    """Sums of stretches of float64 `values_N` that follow each other, 0 for an empty one: (S,).

    Args:
        counts_S: int64, how many values each stretch has; N in all.
    """
    if values_N.device.type == "cpu":
        sums_S = torch.zeros(counts_S.shape, dtype=values_N.dtype)
        some_S = counts_S > 0
        if values_N.numel():
            first_S = (counts_S.cumsum(0) - counts_S)[some_S]  # empty stretches apart, each ends where the next begins
            sums_S[some_S] = torch.from_numpy(np.add.reduceat(values_N.detach().numpy(), first_S.numpy()))
        return sums_S
    stretches = counts_S.numel()
    group_N = torch.arange(stretches, device=values_N.device).repeat_interleave(counts_S, output_size=len(values_N))
    return group_sums(group_N, values_N, stretches)


def group_counts(group_N: Tensor, groups: int) -> Tensor:
    """Number of entries per group id: (groups,) int64."""
    return group_sums(group_N, torch.ones_like(group_N, dtype=torch.int64), groups)
