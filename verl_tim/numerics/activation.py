"""SwiGLU: silu(gate) * up.

Rule: silu in float32 as x / (1 + exp(-x)), rounded to the operand dtype, then the product with `up`, rounded again.
(The SIMD tail of a fused silu differs from its body on some CPUs, so that bits would depend on the position in the
flat tensor; exp and division do not.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import exact_region, kernels, on_gpu
from verl_tim.numerics.linear import PreparedLinear


def swiglu_inference(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """`swiglu` without autograd."""
    if on_gpu(gate_TI):
        return kernels("activation").swiglu(gate_TI, up_TI)
    g = gate_TI.to(torch.float32)
    denominator = torch.neg(g).exp_().add_(1.0)
    return torch.div(g, denominator, out=denominator).to(gate_TI.dtype) * up_TI


def gate_up_inference(x_TD: Tensor, gate_up: PreparedLinear) -> Tensor:
    """[T, D] -> silu(gate) * up [T, I] through a fused linear of two equal parts, gate first. No autograd."""
    if on_gpu(x_TD) and gate_up.bias_N is None:
        few_rows = kernels("few_rows")
        if 0 < x_TD.shape[0] <= few_rows.SWIGLU_ROWS:
            fused_TI = few_rows.swiglu(x_TD, gate_up.weight_PK)
            if fused_TI is not None:
                return fused_TI
    both_TJ, inner = gate_up(x_TD), gate_up.parts[0]
    return swiglu_inference(both_TJ[:, :inner], both_TJ[:, inner:])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        with exact_region(gate_TI.device.type):
            return swiglu_inference(gate_TI, up_TI)

    @staticmethod
    def backward(ctx, grad_TI: Tensor):
        gate_TI, up_TI = ctx.saved_tensors
        with exact_region(grad_TI.device.type):
            return swiglu_backward(grad_TI, gate_TI, up_TI)


def swiglu_backward(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` with respect to gate and up, in their dtypes."""
    if on_gpu(grad_TI):
        return kernels("activation").swiglu_backward(grad_TI, gate_TI, up_TI)
    g, u, d = gate_TI.to(torch.float32), up_TI.to(torch.float32), grad_TI.to(torch.float32)
    sigmoid = 1.0 / (1.0 + torch.exp(-g))
    silu = g * sigmoid
    grad_gate = d * u * (sigmoid * (1.0 + g * (1.0 - sigmoid)))
    return grad_gate.to(gate_TI.dtype), (d * silu).to(up_TI.dtype)


def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """Differentiable contract SwiGLU; both [T, I] in the operand dtype."""
    return _SwiGLU.apply(gate_TI, up_TI)


def swiglu_reference(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """Slow: element by element."""
    out = torch.empty_like(gate_TI)
    for index in range(gate_TI.numel()):
        g = gate_TI.reshape(-1)[index].to(torch.float32)
        silu = (g / (1.0 + torch.exp(-g))).to(gate_TI.dtype)
        out.view(-1)[index] = silu * up_TI.reshape(-1)[index]
    return out
