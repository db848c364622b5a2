"""Gradient of the token embedding (whose forward is a row look-up): deterministic, summed in float32.

The tokens are sorted (stable), and each run of one token is summed in pieces of `_PIECE` rows: a run of one piece goes
straight to the table, a longer one through float32 partial sums that a second kernel adds in order. No atomics, and
one rounding per row. (torch's own gradient rounds to bfloat16 in between for up to 3072 tokens.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.operand import require_rows, require_shape, whole_rows

_PIECE = 64
_BLOCK = 1024


@triton.jit
def _slot(position, first, PIECE: tl.constexpr):
    """Row of the partial sums: in any PIECE positions at most one long run begins and at most one continues."""
    return 2 * (position // PIECE) + (position == first).to(tl.int32)


@triton.jit
def _sum_pieces(
    grad, token, order, first, table, partial, tokens, grad_stride, size, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    position = tl.program_id(0)
    start = tl.load(first + position)
    if (position - start) % PIECE != 0:
        return
    mine = tl.load(token + position)
    step_P = position + tl.arange(0, PIECE)
    rows = tl.sum((tl.load(token + step_P, mask=step_P < tokens, other=-1) == mine).to(tl.int32), axis=0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(0, rows):
        source = tl.load(order + position + row).to(tl.int64)
        total += tl.load(grad + source * grad_stride + column, mask=live, other=0.0).to(tl.float32)
    after = position + PIECE
    is_long = start < position
    if after < tokens:
        is_long = is_long | (tl.load(token + after) == mine)
    if is_long:
        tl.store(partial + _slot(position, start, PIECE).to(tl.int64) * size + column, total, mask=live)
    else:
        tl.store(table + mine.to(tl.int64) * size + column, total.to(table.dtype.element_ty), mask=live)


@triton.jit
def _join_pieces(token, first, table, partial, tokens, size, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    position_P = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = position_P + PIECE < tokens
    same = tl.load(token + position_P, mask=there, other=-1) == tl.load(
        token + position_P + PIECE, mask=there, other=-2
    )
    begins = same & (tl.load(first + position_P, mask=there, other=-1) == position_P)
    start = tl.min(tl.where(begins, position_P, tokens), axis=0)
    if start < tokens:
        mine = tl.load(token + start)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = column < size
        total = tl.zeros([BLOCK], tl.float32)
        position = start
        more = start < tokens
        while more:
            total += tl.load(partial + _slot(position, start, PIECE).to(tl.int64) * size + column, mask=live, other=0.0)
            position += PIECE
            more = tl.load(token + position, mask=position < tokens, other=-1) == mine
        tl.store(table + mine.to(tl.int64) * size + column, total.to(table.dtype.element_ty), mask=live)


def embedding_backward(grad_TD: Tensor, token_T: Tensor, vocab: int) -> Tensor:
    """Gradient of the table, bfloat16 [V, D], from bfloat16 grad [T, D] and integer tokens [T] in 0..V-1."""
    grad_TD = whole_rows(grad_TD)
    require_rows("embedding_backward", grad=grad_TD)
    tokens, size = grad_TD.shape
    require_shape("embedding_backward", "tokens", token_T, (tokens,))
    table_VD = torch.zeros(vocab, size, dtype=grad_TD.dtype, device=grad_TD.device)
    if not tokens:
        return table_VD
    ranked_T, order_T = token_T.to(torch.int32).sort(stable=True)
    first_T = torch.searchsorted(ranked_T, ranked_T, out_int32=True)
    slots = 2 * triton.cdiv(tokens, _PIECE)
    partial = torch.empty(slots, size, dtype=torch.float32, device=grad_TD.device)
    blocks = triton.cdiv(size, _BLOCK)
    _sum_pieces[(tokens, blocks)](
        grad_TD, ranked_T, order_T, first_T, table_VD, partial, tokens, grad_TD.stride(0), size, PIECE=_PIECE,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _join_pieces[(triton.cdiv(tokens, _PIECE), blocks)](
        ranked_T, first_T, table_VD, partial, tokens, size, PIECE=_PIECE, BLOCK=_BLOCK, num_warps=4
    )
    return table_VD
