"""Sums whose order of rounding is written in the program.

`tl.sum` over a whole row adds in an order that follows the compiler's choice of layout, hence the tile, the number of
warps and even pointer alignment. A sum of two does not: so a row is added as a binary tree of sums over an axis of
length two, and any schedule gives the same bits. (Floating-point fusion must be off in kernels that form products
before such a sum: whether a product and an addition meet in one thread, and could fuse, is again a matter of layout.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tree_sum(x_RN, ROWS: tl.constexpr, LOG_N: tl.constexpr):
    """float32 [ROWS, 2 ** LOG_N] -> [ROWS]; halves are added down to 1024 columns, then neighbours."""
    TOP: tl.constexpr = LOG_N - 10 if LOG_N > 10 else 0
    for i in tl.static_range(TOP):
        x_RN = tl.sum(tl.reshape(x_RN, [ROWS, 2, 2 ** (LOG_N - 1 - i)]), axis=1)
    for i in tl.static_range(LOG_N - TOP):
        x_RN = tl.sum(tl.reshape(x_RN, [ROWS, 2 ** (LOG_N - TOP - 1 - i), 2]), axis=2)
    return tl.reshape(x_RN, [ROWS])


@triton.jit
def _column_sums(partial, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_R = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        live = (start + row_R < rows)[:, None] & (column_C < columns)[None, :]
        total += tl.load(partial + (start + row_R)[:, None] * columns + column_C[None, :], mask=live, other=0.0)
    tl.store(out + column_C, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column_C < columns)


def column_sums(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 [P, D] over P in a fixed order, one rounding to `dtype`: the second stage of a weight gradient."""
    rows, columns = partial_PD.shape
    out = torch.empty(columns, dtype=dtype, device=partial_PD.device)
    block = 8  # one memory sector: even 64 columns are then read by several programs
    _column_sums[(triton.cdiv(columns, block),)](partial_PD, out, rows, columns, ROWS=512, COLUMNS=block, num_warps=4)
    return out
