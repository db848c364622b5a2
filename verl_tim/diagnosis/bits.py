"""fp32 bit patterns: equality and distance."""

from __future__ import annotations

import torch
from torch import Tensor


def bit_patterns(x: Tensor) -> Tensor:
    """int32 bit patterns of a tensor taken as fp32; exact for fp32, bf16 and fp16."""
    return x.to(torch.float32).contiguous().view(torch.int32)


def ordinals(x: Tensor) -> Tensor:
    """int64 place of each value in the order of all fp32 values: neighbours differ by 1, -0.0 stands below +0.0."""
    bits = bit_patterns(x).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable fp32 values between a and b, int64 >= 0; 0 exactly where the bit patterns agree."""
    return (ordinals(a) - ordinals(b)).abs()
