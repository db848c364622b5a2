"""y = x W^T for few rows, in Triton: the weights stream through every multiprocessor once, rows ride along.

The order of rounding is the contract's: one float32 accumulator per output, ascending K, no split. `swap` makes the
weights the left operand of the matrix unit (wgmma wants 64 rows there; x then needs only 16), which changes the
instruction and not the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def accumulate(
    x_ptr, w_ptr, row_M, live_M, col_N, stride_x, stride_w, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN] (SWAP: [BN, BM]) of x[row_M] W[col_N]^T in one ascending pass over K; zeros where not live_M."""
    k = tl.arange(0, BK)
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
        x_ptrs = x_ptr + row_M[None, :] * stride_x + k[:, None]
        w_ptrs = w_ptr + col_N[:, None] * stride_w + k[None, :]
    else:
        acc = tl.zeros((BM, BN), tl.float32)
        x_ptrs = x_ptr + row_M[:, None] * stride_x + k[None, :]
        w_ptrs = w_ptr + col_N[None, :] * stride_w + k[:, None]
    live = live_M[None, :] if SWAP else live_M[:, None]
    for start in range(0, K, BK):
        if K % BK == 0:
            x, w = tl.load(x_ptrs, mask=live, other=0.0), tl.load(w_ptrs)
        else:
            inside = start + k < K
            x = tl.load(x_ptrs, mask=live & (inside[:, None] if SWAP else inside[None, :]), other=0.0)
            w = tl.load(w_ptrs, mask=inside[None, :] if SWAP else inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc) if SWAP else tl.dot(x, w, acc)
        x_ptrs += BK
        w_ptrs += BK
    return acc


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, stride_x, stride_w, stride_y, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    # Columns past the end repeat the last one: cheaper than masks, and never stored.
    row_M, col_N = tl.minimum(row, M - 1).to(tl.int64), tl.minimum(col, N - 1).to(tl.int64)
    acc = accumulate(x_ptr, w_ptr, row_M, row < M, col_N, stride_x, stride_w, K, BM, BN, BK, SWAP)
    if SWAP:
        if BIAS:
            acc += tl.load(bias_ptr + col_N).to(tl.float32)[:, None]
        y_ptrs = y_ptr + row_M[None, :] * stride_y + col[:, None]
        inside = (row[None, :] < M) & (col[:, None] < N)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + col_N).to(tl.float32)[None, :]
        y_ptrs = y_ptr + row_M[:, None] * stride_y + col[None, :]
        inside = (row[:, None] < M) & (col[None, :] < N)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside)


def run(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor, *,
    bm: int, bn: int, bk: int, swap: bool, warps: int, stages: int,
) -> None:  # fmt: skip
    """Write x W^T (+ bias) to `out_TN`, whatever its dtype. Last dimensions contiguous."""
    rows, inner = x_TK.shape
    outputs = weight_NK.shape[0]
    _few_rows[(triton.cdiv(outputs, bn), triton.cdiv(rows, bm))](
        x_TK, weight_NK, bias_N, out_TN, rows, outputs, x_TK.stride(0), weight_NK.stride(0), out_TN.stride(0),
        K=inner, BM=bm, BN=bn, BK=bk, SWAP=swap, BIAS=bias_N is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
