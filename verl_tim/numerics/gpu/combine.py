"""Combine: each token's expert outputs times their weights, float32 in slot order, one rounding. No atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.operand import require_rows
from verl_tim.numerics.gpu.overlap import begin, launch

_BLOCK = 1024


@triton.jit
def _combine(
    y, row, weight, out, columns,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        source = token * TOP_K + slot
        if ROWS:
            source = tl.load(row + source).to(tl.int64)
        term = tl.load(y + source * columns + column, mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            term = term * tl.load(weight + token * TOP_K + slot)
        total = term if slot == 0 else total + term
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=live)


def combine(y_RD: Tensor, row_TK: Tensor | None, weight_TK: Tensor | None, top_k: int) -> Tensor:
    """[T, D]: the sum over slots of weight * y.

    Args:
        y_RD: bfloat16 expert outputs, contiguous: dispatched rows, or (token, slot) order when row_TK is None.
        row_TK: int32 dispatched row of each pair.
        weight_TK: float32, or None for a plain sum (the gradient of a gather).
    """
    require_rows("combine", y=y_RD)
    rows, columns = y_RD.shape
    out = torch.empty(rows // top_k, columns, dtype=y_RD.dtype, device=y_RD.device)
    if rows:
        _combine[(rows // top_k, triton.cdiv(columns, _BLOCK))](
            y_RD, row_TK, weight_TK, out, columns, TOP_K=top_k, ROWS=row_TK is not None,
            WEIGHTED=weight_TK is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False, **launch(),
        )  # fmt: skip
    return out
