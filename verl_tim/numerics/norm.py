"""RMSNorm, as Hugging Face's Qwen and Llama modules write it.

Rule: x in float32; r = rsqrt(mean(x * x) + eps) with one fixed reduction tree per hidden size; x * r rounded to the
operand dtype *before* the multiply by the weight; that product rounded again. Row by row, so any batching is free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import exact_region


def _normalised(x_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x_TD.to(torch.float32)
    scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x, scale


def rms_norm_inference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` without autograd. `weight_D` may be any shape that broadcasts to x's last dimensions."""
    x, scale = _normalised(x_TD, eps)
    return (x * scale).to(x_TD.dtype) * weight_D


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        with exact_region(x_TD.device.type):
            return rms_norm_inference(x_TD, weight_D, eps)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        x_TD, weight_D = ctx.saved_tensors
        with exact_region(grad_TD.device.type):
            x, scale = _normalised(x_TD, ctx.eps)
            g = grad_TD.to(torch.float32)
            unit = x * scale
            gw = g * weight_D.to(torch.float32)
            grad_x = scale * (gw - unit * (gw * unit).mean(-1, keepdim=True))
            rounded = unit.to(x_TD.dtype).to(torch.float32)
            grad_w = (g * rounded).reshape(-1, weight_D.shape[-1]).sum(0)
        return grad_x.to(x_TD.dtype), grad_w.to(weight_D.dtype), None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Differentiable contract RMSNorm over the last dimension. x [..., D] and weight [D] in the operand dtype."""
    return _RMSNorm.apply(x_TD, weight_D, eps)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Slow: row by row, as the Hugging Face module is written."""
    rows = []
    for x_D in x_TD.reshape(-1, x_TD.shape[-1]):
        x = x_D.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        rows.append(weight_D * (x * torch.rsqrt(variance + eps)).to(x_D.dtype))
    return torch.stack(rows).view(x_TD.shape)
