"""SwiGLU: silu(gate) * up, forward and backward.

Rounding order as `verl_tim.numerics.activation`: silu in float32 as x / (1 + exp(-x)), rounded, times `up`, rounded.
`silu_times` is shared with the grouped GEMM's epilogue, so that both compile the same expression.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.operand import require_rows, require_shape, whole_rows
from verl_tim.numerics.gpu.overlap import begin, launch

_BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """bfloat16 gate and up -> bfloat16."""
    g = gate.to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(tl.bfloat16).to(tl.float32)
    return (silu * up.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def silu_times_grad(grad, gate, up):
    """All float32: (grad gate, grad up)."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return grad_gate, grad * (gate * sigmoid)


@triton.jit
def _forward(gate, up, out, columns, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=live)
    u = tl.load(up + row * up_stride + column, mask=live)
    tl.store(out + row * out_stride + column, silu_times(g, u), mask=live)


@triton.jit
def _backward(
    grad, gate, up, grad_gate, grad_up, columns, grad_stride, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < columns
    d = tl.load(grad + row * grad_stride + column, mask=live).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=live).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=live).to(tl.float32)
    dg, du = silu_times_grad(d, g, u)
    tl.store(grad_gate + row * out_stride + column, dg.to(tl.bfloat16), mask=live)
    tl.store(grad_up + row * out_stride + column, du.to(tl.bfloat16), mask=live)


def swiglu(gate_TI: Tensor, up_TI: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up. Both bfloat16 [T, I], rows may be strided (halves of one tensor). Returns bfloat16 [T, I]."""
    require_rows("swiglu", gate=gate_TI, up=up_TI, out=out)
    require_shape("swiglu", "up", up_TI, tuple(gate_TI.shape))
    rows, columns = gate_TI.shape
    out_TI = torch.empty(rows, columns, dtype=gate_TI.dtype, device=gate_TI.device) if out is None else out
    if rows:
        _forward[(rows, triton.cdiv(columns, _BLOCK))](
            gate_TI, up_TI, out_TI, columns, gate_TI.stride(0), up_TI.stride(0), out_TI.stride(0), BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False, **launch(),
        )  # fmt: skip
    return out_TI


def swiglu_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to gate and up: the two halves [T, I] of one contiguous bfloat16 [T, 2 I] tensor."""
    grad_TI = whole_rows(grad_TI)
    require_rows("swiglu_backward", grad=grad_TI, gate=gate_TI, up=up_TI)
    require_shape("swiglu_backward", "up", up_TI, tuple(gate_TI.shape))
    require_shape("swiglu_backward", "grad", grad_TI, tuple(gate_TI.shape))
    rows, columns = gate_TI.shape
    both = torch.empty(rows, 2 * columns, dtype=gate_TI.dtype, device=gate_TI.device)
    grad_gate, grad_up = both[:, :columns], both[:, columns:]
    if rows:
        _backward[(rows, triton.cdiv(columns, _BLOCK))](
            grad_TI, gate_TI, up_TI, grad_gate, grad_up, columns, grad_TI.stride(0), gate_TI.stride(0), up_TI.stride(0),
            both.stride(0), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return grad_gate, grad_up
