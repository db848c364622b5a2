"""Operands whose products cancel: what tells one order of additions from another.

Every row product of `cancelling` is exactly zero, and half of its terms undo the other half in another order. So what a
kernel returns is its rounding error alone: a few units in the last place of the largest partial sum, which bfloat16 and
float32 both hold. Random operands show another order only where it reaches the last bit of a sum, and hardly ever after
rounding to bfloat16; here it shows in most elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPREAD = 4  # terms differ by up to 2 ** (2 * _SPREAD), so that most additions round


def cancelling(
    rows: int, outputs: int, inner: int, device: torch.device | str, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(x bfloat16 [rows, inner], weight bfloat16 [outputs, inner]) with x W^T = 0 in exact arithmetic.

    On the meta device, which has no generator, their shapes alone.
    """
    if torch.device(device).type == "meta":
        x, weight = (torch.empty(n, inner, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
        return x, weight
    generator = torch.Generator(device).manual_seed(seed)
    half = inner // 2

    def normal(count: int) -> Tensor:
        return torch.randn(count, half, generator=generator, device=device)

    power = torch.randint(-_SPREAD, _SPREAD + 1, (half,), generator=generator, device=device).float().exp2()
    order = torch.randperm(half, generator=generator, device=device)
    x_half, weight_half = (normal(rows) * power).bfloat16(), normal(outputs).bfloat16()
    x, weight = (torch.zeros(n, inner, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
    x[:, :half], x[:, half : 2 * half] = x_half, x_half[:, order]
    weight[:, :half], weight[:, half : 2 * half] = weight_half, -weight_half[:, order]
    return x, weight
