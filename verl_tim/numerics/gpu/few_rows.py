"""y = x W^T for few rows, in Triton: the weights stream through every multiprocessor once, rows ride along.

The order of rounding is the contract's: one float32 accumulator per output, ascending K, no split. `swap` makes the
weights the left operand of the matrix unit (wgmma wants 64 rows there; x then needs only 16), which changes the
instruction and not the bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.activation import silu_times
from verl_tim.numerics.gpu.operand import require_rows, require_shape
from verl_tim.numerics.gpu.overlap import begin, launch

REFERENCE: dict[str, Any] = {"bm": 64, "bn": 64, "bk": 64, "swap": False, "warps": 4, "stages": 3}
"""Options of the plainest walk over K: serves every shape, and is what other schedules are compared with."""


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
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
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


@triton.jit(do_not_specialize=["M"])
def _few_rows_swiglu(
    x_ptr, w_ptr, y_ptr, M, N, stride_x, stride_w, stride_y, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = silu(x gate^T) * (x up^T), each product rounded as `_few_rows` rounds it; gate rows first in the weight."""
    begin(OVERLAP)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    row_M, col_N = tl.minimum(row, M - 1).to(tl.int64), tl.minimum(col, N - 1).to(tl.int64)
    live = (row < M)[:, None]
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + row_M[:, None] * stride_x + k[None, :]
    gate_ptrs = w_ptr + col_N[None, :] * stride_w + k[:, None]
    up_ptrs = gate_ptrs + N.to(tl.int64) * stride_w
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        x = tl.load(x_ptrs, mask=live, other=0.0)
        gate = tl.dot(x, tl.load(gate_ptrs), gate)
        up = tl.dot(x, tl.load(up_ptrs), up)
        x_ptrs += BK
        gate_ptrs += BK
        up_ptrs += BK
    y = silu_times(gate.to(tl.bfloat16), up.to(tl.bfloat16))
    tl.store(y_ptr + row_M[:, None] * stride_y + col[None, :], y, mask=live & (col < N)[None, :])


SWIGLU_ROWS = 16
"""Up to here `swiglu` beats a product and a pass over it."""
_SWIGLU = {"BM": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
SWIGLU = "swiglu in the product"
_forbidden: set[str] = set()


def forbid(name: str) -> None:
    """Never take `SWIGLU` again in this process: a product and a pass over it take its place.

    Raises:
        ContractError: another name.
    """
    if name != SWIGLU:
        raise ContractError(f"gate_up: no schedule {name!r} that can be forbidden; there is {SWIGLU!r}")
    _forbidden.add(name)


def swiglu(x_TK: Tensor, weight_JK: Tensor, config: dict[str, int] | None = None) -> Tensor | None:
    """silu(x gate^T) * (x up^T) in one kernel, bits as a contract linear and then SwiGLU.

    Args:
        x_TK: bfloat16 [T, K], T up to `SWIGLU_ROWS`; weight_JK: bfloat16 [2 I, K], gate rows first. Contiguous rows.

    Returns:
        bfloat16 [T, I]; None where K is no multiple of the kernel's step, or after `forbid`.

    Raises:
        ContractError: dtypes or shapes that do not fit.
    """
    require_rows("gate_up", x=x_TK, weight=weight_JK)
    require_shape("gate_up", "weight", weight_JK, (weight_JK.shape[0] // 2 * 2, x_TK.shape[1]))
    options = config or _SWIGLU
    rows, inner = x_TK.shape
    outputs = weight_JK.shape[0] // 2
    if inner % options["BK"] or SWIGLU in _forbidden:
        return None
    out_TI = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    _few_rows_swiglu[(triton.cdiv(outputs, options["BN"]), triton.cdiv(rows, options["BM"]))](
        x_TK, weight_JK, out_TI, rows, outputs, x_TK.stride(0), weight_JK.stride(0), outputs, K=inner, **options,
        enable_fp_fusion=False, **launch(),
    )  # fmt: skip
    return out_TI


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
        num_warps=warps, num_stages=stages, **launch(),
    )  # fmt: skip
