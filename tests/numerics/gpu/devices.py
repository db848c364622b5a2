"""Where a test of this folder runs, and its inputs there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ..bits import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.gpu


def values(*size: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return randn(*size, dtype=dtype, seed=seed, scale=scale).to(DEVICE)


def weights(*size: int, seed: int = 0) -> Tensor:
    """Around one, as norm weights are."""
    return (1 + values(*size, seed=seed, scale=0.2, dtype=torch.float32)).bfloat16()


def close(got: Tensor, want: Tensor, tolerance: float = 1e-2) -> None:
    """The largest error, over the largest value: bfloat16 results against float64 ones."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-9)
    assert error < tolerance, f"relative error {error:.2e}"


def mostly_equal(got: Tensor, want: Tensor) -> None:
    """Same roundings as another implementation whose float32 sums have another order: a rare last bit may differ."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    differing = (got != want).double().mean()
    assert differing < 2e-3, f"{differing:.2%} of the elements differ"
    close(got, want)
