"""RMSNorm, as Hugging Face's Qwen and Llama modules write it.

Rule: x in float32; r = rsqrt(mean(x * x) + eps) with one fixed reduction tree per hidden size; x * r rounded to the
operand dtype *before* the multiply by the weight; that product rounded again. Row by row, so any batching is free.
`add_rms_norm` is the residual add, rounded to the operand dtype, and the norm of the sum, in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import exact_region, kernels, on_gpu


def _normalised(x_TD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x_TD.to(torch.float32)
    scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x, scale


def rms_norm_inference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` without autograd. On a CPU `weight_D` may be any shape that broadcasts to x's last dimensions."""
    if on_gpu(x_TD):
        return kernels("norm").rms_norm(x_TD, weight_D, eps)[0]
    x, scale = _normalised(x_TD, eps)
    return (x * scale).to(x_TD.dtype) * weight_D


def add_rms_norm_inference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` without autograd."""
    if on_gpu(x_TD):
        return kernels("norm").rms_norm(x_TD, weight_D, eps, residual_TD)
    total_TD = residual_TD + x_TD
    return rms_norm_inference(total_TD, weight_D, eps), total_TD


def _backward(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of the norm alone: (float32 or operand dtype [T, D], [D]); on a CPU not yet rounded."""
    x, scale = _normalised(x_TD, eps)
    g = grad_TD.to(torch.float32)
    unit = x * scale
    gw = g * weight_D.to(torch.float32)
    grad_x = scale * (gw - unit * (gw * unit).mean(-1, keepdim=True))
    rounded = unit.to(x_TD.dtype).to(torch.float32)
    return grad_x, (g * rounded).reshape(-1, weight_D.shape[-1]).sum(0)


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
            if on_gpu(grad_TD):
                return *kernels("norm").rms_norm_backward(grad_TD, x_TD, weight_D, ctx.eps), None
            grad_x, grad_w = _backward(grad_TD, x_TD, weight_D, ctx.eps)
        return grad_x.to(x_TD.dtype), grad_w.to(weight_D.dtype), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.eps = eps
        with exact_region(x_TD.device.type):
            normed_TD, total_TD = add_rms_norm_inference(x_TD, residual_TD, weight_D, eps)
        ctx.save_for_backward(total_TD, weight_D)
        return normed_TD, total_TD

    @staticmethod
    def backward(ctx, grad_TD: Tensor, grad_total_TD: Tensor):
        total_TD, weight_D = ctx.saved_tensors
        with exact_region(grad_TD.device.type):
            if on_gpu(grad_TD):
                grad_x, grad_w = kernels("norm").rms_norm_backward(
                    grad_TD, total_TD, weight_D, ctx.eps, grad_residual_TD=grad_total_TD
                )
                return grad_x, grad_x, grad_w, None
            grad_x, grad_w = _backward(grad_TD, total_TD, weight_D, ctx.eps)
            grad_x = (grad_x + grad_total_TD.to(torch.float32)).to(total_TD.dtype)
        return grad_x, grad_x, grad_w.to(weight_D.dtype), None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Differentiable contract RMSNorm over the last dimension. x [..., D] and weight [D] in the operand dtype."""
    return _RMSNorm.apply(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Differentiable (rms_norm(residual + x), residual + x); all [T, D] in the operand dtype."""
    return _AddRMSNorm.apply(x_TD, residual_TD, weight_D, eps)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Slow: row by row, as the Hugging Face module is written."""
    rows = []
    for x_D in x_TD.reshape(-1, x_TD.shape[-1]):
        x = x_D.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        rows.append(weight_D * (x * torch.rsqrt(variance + eps)).to(x_D.dtype))
    return torch.stack(rows).view(x_TD.shape)
