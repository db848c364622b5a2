"""Token embedding: a row look-up, exact by nature, and its gradient.

GPU schedules: `gpu/row_lookup.py`, and of the gradient `gpu/embedding.py`, deterministic, rounded once. A CPU takes
PyTorch's, deterministic too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.numerics.contract import kernels, on_gpu


class _Embedding(torch.autograd.Function):
    """The GPU form; a CPU's is autograd's own."""

    @staticmethod
    def forward(ctx, token_T: Tensor, weight_VD: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(token_T)
        ctx.vocab_size, ctx.padding_idx = weight_VD.shape[0], padding_idx
        return F.embedding(token_T, weight_VD)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (token_T,) = ctx.saved_tensors
        grad_VD = kernels("embedding").embedding_backward(grad_TD, token_T, ctx.vocab_size)
        if ctx.padding_idx is not None:
            grad_VD[ctx.padding_idx] = 0
        return None, grad_VD, None


def embedding(token_T: Tensor, weight_VD: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of `weight_VD` [V, D] for int64 token ids [T]; differentiable in the weight.

    `padding_idx`: row whose gradient is zero, as `nn.Embedding` has it (not negative).
    """
    if on_gpu(weight_VD):
        return _Embedding.apply(token_T, weight_VD, padding_idx)
    return F.embedding(token_T, weight_VD, padding_idx)


def embedding_inference(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """`embedding` without autograd."""
    if on_gpu(weight_VD):
        return kernels("row_lookup").take(weight_VD, token_T)
    return F.embedding(token_T, weight_VD)


def embedding_reference(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Slow: one token at a time."""
    return weight_VD.new_tensor([weight_VD[token].tolist() for token in token_T.tolist()])
