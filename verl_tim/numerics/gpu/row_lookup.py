"""Rows of a table by index: a copy, so exact by nature. For few rows torch's look-up takes several times as long."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.overlap import begin, launch

_BLOCK = 1024


@triton.jit
def _take(table, index, out, columns, table_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    source = tl.load(index + row).to(tl.int64)
    tl.store(out + row * columns + column, tl.load(table + source * table_stride + column, mask=live), mask=live)


def take(table_ND: Tensor, index_T: Tensor) -> Tensor:
    """[T, D] of the table's dtype: its rows at int64 or int32 index_T [T], each in 0..N-1 (not checked). No autograd.

    Raises:
        ContractError: the table is not a matrix with contiguous rows, or the index not a vector of integers.
    """
    if table_ND.dim() != 2 or table_ND.stride(1) != 1:
        raise ContractError(f"row look-up: table {tuple(table_ND.shape)} is not a matrix with contiguous rows")
    if index_T.dim() != 1 or index_T.dtype not in (torch.int64, torch.int32):
        raise ContractError(f"row look-up: index {tuple(index_T.shape)} {index_T.dtype}; want a vector of integers")
    rows, columns = index_T.shape[0], table_ND.shape[1]
    out = torch.empty(rows, columns, dtype=table_ND.dtype, device=table_ND.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(columns))
        _take[(rows, triton.cdiv(columns, block))](
            table_ND, index_T.contiguous(), out, columns, table_ND.stride(0), BLOCK=block, num_warps=4, **launch()
        )
    return out
