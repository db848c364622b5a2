"""Group baselines beside rejection: which rows count, and statistics that survive low precision."""

from __future__ import annotations

import torch
from torch import Tensor

from .correction import Correction


def baseline_mask(result: Correction, response_mask: Tensor, scope: str = "all") -> Tensor:
    """The mask that a group's baseline is computed with, (B, T) bool.

    Rewards, returns and advantages are always taken over the original mask; only whole rows may leave the baseline.
    Row i counts iff ``mask[i].any()``.

    Args:
        result: of :func:`verl_tim.correction.correct`.
        response_mask: (B, T), the original mask.
        scope: "all": the original mask; "kept": rows of which nothing was kept are emptied, the others stay whole.

    Raises:
        ValueError: unknown scope, or shapes that differ.
    """
    if scope not in ("all", "kept"):
        raise ValueError(f"baseline_scope={scope!r} is unknown; known: all, kept")
    if response_mask.shape != result.mask.shape:
        raise ValueError(f"response_mask {tuple(response_mask.shape)} is not of the result {tuple(result.mask.shape)}")
    valid = response_mask != 0
    return valid if scope == "all" else valid & result.mask.any(dim=-1, keepdim=True)


def group_statistics(scores: Tensor, groups: Tensor, counted: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sample standard deviation and count per group, in fp32 or better whatever the scores' dtype.

    Args:
        scores: (B,) one number per row.
        groups: (B,) int64 in [0, num_groups).
        counted: (B,) bool, the rows that count.

    Returns:
        three (num_groups,) tensors. Mean and deviation are 0 for a group without a row, the deviation 0 for one row.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = torch.where(counted, scores, scores.new_zeros(()))

    def per_group(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups).index_add_(0, groups, values)

    count = per_group(counted.to(scores.dtype))
    mean = per_group(scores) / count.clamp(min=1)
    centred = torch.where(counted, scores - mean[groups], scores.new_zeros(()))
    deviation = (per_group(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return mean, deviation, count.to(torch.int64)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values shifted to mean 0 and sample standard deviation 1 over the mask, 0 elsewhere, in fp32 or better.

    One valid value becomes 0, an empty mask gives zeros: a batch that small is no error.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    valid = mask != 0
    values = torch.where(valid, values, values.new_zeros(()))
    count = valid.sum()
    centred = torch.where(valid, values - values.sum() / count.clamp(min=1), values.new_zeros(()))
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
