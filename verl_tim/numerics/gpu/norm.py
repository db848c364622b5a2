"""RMSNorm, with or without the residual addition before it.

Rounding order as `verl_tim.numerics.norm` (Hugging Face's): x in float32, x * r rounded to bfloat16, times the weight,
rounded again; the residual sum is rounded to bfloat16 before it is normalised. The mean of squares has one tree for
every use (here, and per head in `rope.py`): element i of the first half is added to element i of the second, then
`sums.tree_sum`, zero-padded. Rows per program, warps and fusion are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.operand import require_rows, require_shape, whole_rows
from verl_tim.numerics.gpu.overlap import begin, launch
from verl_tim.numerics.gpu.sums import column_sums, tree_sum

_FORWARD_WARPS = 4
_STAGES = 3  # of a backward: rows on their way while one is worked on
_PROGRAMS = 512  # of a backward: enough to fill the device, few enough that the partial sums are small


@triton.jit
def inverse_rms(x1_RF, x2_RF, eps, D: tl.constexpr, ROWS: tl.constexpr, LOG_F: tl.constexpr):
    """1 / rms of rows given as two float32 halves [ROWS, 2 ** LOG_F], zero beyond D / 2. Returns [ROWS]."""
    total_R = tree_sum(x1_RF * x1_RF + x2_RF * x2_RF, ROWS, LOG_F)
    return tl.rsqrt(tl.div_rn(total_R, tl.full([ROWS], D, tl.float32)) + eps)


@triton.jit
def scaled(x_RF, scale_R, weight_1F):
    """x * r rounded, times the weight, rounded: float32 in, bfloat16 out."""
    unit = (x_RF * scale_R[:, None]).to(tl.bfloat16).to(tl.float32)
    return (unit * weight_1F).to(tl.bfloat16)


@triton.jit
def row_mask(row_R, rows, column_F, D: tl.constexpr, F: tl.constexpr):
    """Which elements of a half row exist; no column test where the half fills the tile."""
    live = (row_R < rows)[:, None] & (column_F >= 0)[None, :]
    if D // 2 != F:
        live = live & (column_F < D // 2)[None, :]
    return live


@triton.jit(do_not_specialize=["rows"])  # it only bounds whole rows: compiles nothing better
def _forward(
    x, residual, weight, y, residual_out, rows, x_stride, residual_stride, y_stride, out_stride, eps,
    D: tl.constexpr, LOG_F: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2**LOG_F
    HALF: tl.constexpr = D // 2
    column_F = tl.arange(0, F)
    # no step changes it, and in a decode step it comes from memory: on its way while the kernel before still works
    w1 = tl.load(weight + column_F, mask=column_F < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + column_F, mask=column_F < HALF, other=0.0).to(tl.float32)[None, :]
    begin(OVERLAP)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row_mask(row_R, rows, column_F, D, F)
    at = row_R[:, None] * x_stride + column_F[None, :]
    x1 = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(x + HALF + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        at = row_R[:, None] * residual_stride + column_F[None, :]
        x1 = (x1 + tl.load(residual + at, mask=live, other=0.0).to(tl.float32)).to(tl.bfloat16)
        x2 = (x2 + tl.load(residual + HALF + at, mask=live, other=0.0).to(tl.float32)).to(tl.bfloat16)
        at = row_R[:, None] * out_stride + column_F[None, :]
        tl.store(residual_out + at, x1, mask=live)
        tl.store(residual_out + HALF + at, x2, mask=live)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    scale_R = inverse_rms(x1, x2, eps, D, ROWS, LOG_F)
    at = row_R[:, None] * y_stride + column_F[None, :]
    tl.store(y + at, scaled(x1, scale_R, w1), mask=live)
    tl.store(y + HALF + at, scaled(x2, scale_R, w2), mask=live)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_grad(g1, g2, x1, x2, w1, w2, eps, D: tl.constexpr):
    """Gradient of one tile of rows: (grad x halves, addends of the weight's gradient halves), all float32.

    Nothing in the rollout answers to a gradient: both row sums share one reduction, in the compiler's order.
    """
    gw1, gw2 = g1 * w1, g2 * w2
    squares_R, product_R = tl.reduce((x1 * x1 + x2 * x2, gw1 * x1 + gw2 * x2), 1, _add_both)
    scale = tl.rsqrt(squares_R / D + eps)[:, None]
    mean = scale * product_R[:, None] / D
    u1, u2 = x1 * scale, x2 * scale
    dx1, dx2 = scale * (gw1 - u1 * mean), scale * (gw2 - u2 * mean)
    dw1 = g1 * u1.to(tl.bfloat16).to(tl.float32)
    dw2 = g2 * u2.to(tl.bfloat16).to(tl.float32)
    return dx1, dx2, dw1, dw2


@triton.jit
def _backward(
    grad, x, weight, grad_residual, grad_x, partial, rows, grad_stride, x_stride, residual_stride, eps,
    D: tl.constexpr, LOG_F: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2**LOG_F
    HALF: tl.constexpr = D // 2
    column_F = tl.arange(0, F)
    w1 = tl.load(weight + column_F, mask=column_F < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + column_F, mask=column_F < HALF, other=0.0).to(tl.float32)[None, :]
    total1 = tl.zeros([ROWS, F], tl.float32)
    total2 = tl.zeros([ROWS, F], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row_R = (start + tl.arange(0, ROWS)).to(tl.int64)
        live = row_mask(row_R, rows, column_F, D, F)
        at = row_R[:, None] * x_stride + column_F[None, :]
        x1 = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        x2 = tl.load(x + HALF + at, mask=live, other=0.0).to(tl.float32)
        at = row_R[:, None] * grad_stride + column_F[None, :]
        g1 = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
        g2 = tl.load(grad + HALF + at, mask=live, other=0.0).to(tl.float32)
        dx1, dx2, dw1, dw2 = norm_grad(g1, g2, x1, x2, w1, w2, eps, D)
        total1 += dw1
        total2 += dw2
        if ADD:
            at = row_R[:, None] * residual_stride + column_F[None, :]
            dx1 += tl.load(grad_residual + at, mask=live, other=0.0).to(tl.float32)
            dx2 += tl.load(grad_residual + HALF + at, mask=live, other=0.0).to(tl.float32)
        at = row_R[:, None] * D + column_F[None, :]
        tl.store(grad_x + at, dx1.to(tl.bfloat16), mask=live)
        tl.store(grad_x + HALF + at, dx2.to(tl.bfloat16), mask=live)
    at = tl.program_id(0) * D + column_F
    tl.store(partial + at, tl.sum(total1, axis=0), mask=column_F < HALF)
    tl.store(partial + HALF + at, tl.sum(total2, axis=0), mask=column_F < HALF)


def _tile(size: int) -> tuple[int, int]:
    """(log2 of the padded half, rows per program) for rows of `size` elements. Free: no forward bit depends on it."""
    log_half = triton.next_power_of_2(size // 2).bit_length() - 1
    return log_half, max(1, 1024 >> log_half)


def _rows(x: Tensor, op: str, name: str) -> Tensor:
    """[..., D] as [T, D]; strided rows stay strided."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise ContractError(
            f"{op}: {name} with strides {x.stride()} is not a matrix of rows; make it contiguous"
        ) from error


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm over the last dimension, of x or of x + residual.

    Args:
        x_TD: bfloat16 [..., D], D even, rows may be strided.
        weight_D: bfloat16 [D].
        residual_TD: bfloat16, x's shape; the sum is rounded to bfloat16, returned and normalised.
        out: where the result goes; a new contiguous tensor by default.

    Returns:
        (y, residual sum or None), bfloat16 of x's shape. No autograd.
    """
    require_rows("rms_norm", x=x_TD, weight=weight_D, residual=residual_TD, out=out)
    size = x_TD.shape[-1]
    require_shape("rms_norm", "weight", weight_D, (size,))
    if size % 2:
        raise ContractError(f"rms_norm: rows of {size} elements; the contract's tree needs an even size")
    x = _rows(x_TD, "rms_norm", "x")
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    y = _rows(y_TD, "rms_norm", "out")
    residual, total_TD = x, None
    if residual_TD is not None:
        require_shape("rms_norm", "residual", residual_TD, tuple(x_TD.shape))
        residual = _rows(residual_TD, "rms_norm", "residual")
        total_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    total = y if total_TD is None else _rows(total_TD, "rms_norm", "residual")
    if x.shape[0]:
        log_half, block = _tile(size)
        _forward[(triton.cdiv(x.shape[0], block),)](
            x, residual, weight_D, y, total, x.shape[0], x.stride(0), residual.stride(0), y.stride(0), total.stride(0),
            eps, D=size, LOG_F=log_half, ROWS=block, ADD=residual_TD is not None, num_warps=_FORWARD_WARPS,
            enable_fp_fusion=False, **launch(),
        )  # fmt: skip
    return y_TD, total_TD


def rms_norm_backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, grad_residual_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: deterministic, per-program partial sums added in a fixed order.

    Args:
        grad_TD: gradient of y.
        x_TD: the normalised input (the residual sum where there was one).
        grad_residual_TD: gradient of the residual sum from elsewhere; added in float32 before the one rounding.

    Returns:
        (grad x [..., D], which is also the gradient of the residual, and grad weight [D]), bfloat16.
    """
    grad_TD = whole_rows(grad_TD)
    if grad_residual_TD is not None:
        grad_residual_TD = whole_rows(grad_residual_TD)
    require_rows("rms_norm_backward", grad=grad_TD, x=x_TD, weight=weight_D, grad_residual=grad_residual_TD)
    size = x_TD.shape[-1]
    require_shape("rms_norm_backward", "grad", grad_TD, tuple(x_TD.shape))
    x, grad = _rows(x_TD, "rms_norm_backward", "x"), _rows(grad_TD, "rms_norm_backward", "grad")
    grad_residual = grad
    if grad_residual_TD is not None:
        require_shape("rms_norm_backward", "grad_residual", grad_residual_TD, tuple(x_TD.shape))
        grad_residual = _rows(grad_residual_TD, "rms_norm_backward", "grad_residual")
    grad_x_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if not x.shape[0]:
        return grad_x_TD, torch.zeros_like(weight_D)
    log_half, block = _tile(size)
    programs = min(_PROGRAMS, triton.cdiv(x.shape[0], block))
    partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, weight_D, grad_residual, grad_x_TD, partial, x.shape[0], grad.stride(0), x.stride(0),
        grad_residual.stride(0), eps, D=size, LOG_F=log_half, ROWS=block, ADD=grad_residual_TD is not None,
        STAGES=_STAGES, num_warps=min(16, max(4, (block << log_half) // 256)),
    )  # fmt: skip
    return grad_x_TD, column_sums(partial, weight_D.dtype)
