"""Bit-pattern comparison for op tests."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def same_bits(got: Tensor, want: Tensor) -> bool:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.isfinite(want).all()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return torch.equal(got.contiguous().view(integer), want.contiguous().view(integer))


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close_to_double(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """The only tolerance in these tests: distance to a float64 computation on the same operands."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    scale = want.abs().max().clamp(min=1e-6)
    error = ((got.double() - want).abs() / scale).max()
    assert error < tolerance, f"relative error {error:.2e}"
