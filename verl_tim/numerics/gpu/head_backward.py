"""Gradients of the head's log-prob and entropy: logits recomputed slab by slab, three products, nothing of size T x V.

With p = exp((z - max) - log_sum), g = d loss / d log_prob and h = d loss / d entropy:
    d z = g ([token] - p) - h p (log p + entropy);   d logits = d z / temperature, rounded to bfloat16.
A slab holds some vocabulary columns of all rows: d weight needs no accumulation, d hidden one float32 buffer.
Backward has no counterpart in the rollout: its order is free, but the same on every run (no atomics).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.gemm import gemm
from verl_tim.numerics.gpu.vocabulary_tile import divide

_SLAB_ELEMENTS = 1 << 26  # logits in flight: 256 MiB of float32 and 128 MiB of bfloat16 gradients
_COLUMN_UNIT = 1024
_BLOCK = 2048


_PER_ROW = ["temperature_ptr", "target_ptr", "max_ptr", "log_sum_ptr", "entropy_ptr", "g_ptr", "h_ptr"]


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _grad_logits(
    logits_ptr, grad_ptr, temperature_ptr, target_ptr, max_ptr, log_sum_ptr, entropy_ptr, g_ptr, h_ptr,
    first, width, stride, BLOCK: tl.constexpr, LOG_PROB: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """One row, BLOCK columns of a slab whose first column is `first`."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    inverse = tl.div_rn(1.0, divisor)
    z = divide(tl.load(logits_ptr + row * stride + col, mask=inside, other=0.0), divisor, inverse)
    log_p = (z - tl.load(max_ptr + row)) - tl.load(log_sum_ptr + row)
    p = tl.exp(log_p)
    grad = tl.zeros((BLOCK,), tl.float32)
    if LOG_PROB:
        g = tl.load(g_ptr + row)
        grad += g * (tl.where(first + col == tl.load(target_ptr + row), 1.0, 0.0) - p)
    if ENTROPY:
        grad -= tl.load(h_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(grad_ptr + row * stride + col, (grad * inverse).to(tl.bfloat16), mask=inside)


def _slab_columns(rows: int, vocab: int) -> int:
    return min(max(_SLAB_ELEMENTS // rows // _COLUMN_UNIT, 1) * _COLUMN_UNIT, vocab)


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a b (+ out): bfloat16 operands, float32 accumulation, out in its own dtype."""
    if a.device.type != "cuda":
        result = a.to(torch.float32) @ b.to(torch.float32)
        out.copy_(out + result if add else result)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    elif out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out=out)


def head_backward(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    max_T: Tensor,
    log_sum_T: Tensor,
    entropy_T: Tensor | None,
    grad_log_prob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    *,
    hidden_grad: bool = True,
    weight_grad: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """(d hidden [T, D], d weight [V, D]) in bfloat16, or None where not wanted.

    Args:
        hidden_TD, weight_VD, target_T, temperature_T: as given to `head.token_log_probs`.
        max_T, log_sum_T, entropy_T: what it returned; entropy_T is needed when grad_entropy_T is given.
        grad_log_prob_T, grad_entropy_T: float32 [T] or None.
    """
    if grad_log_prob_T is None and grad_entropy_T is None:
        return None, None
    rows, inner = hidden_TD.shape
    vocab, device = weight_VD.shape[0], hidden_TD.device
    hidden_TD, weight_VD = hidden_TD.contiguous(), weight_VD.contiguous()
    temperature_T, target_T = temperature_T.contiguous(), target_T.contiguous()
    columns = _slab_columns(max(rows, 1), vocab)
    several = columns < vocab
    grad_hidden = torch.empty(
        rows, inner, dtype=torch.float32 if several else hidden_TD.dtype, device=device
    ) if hidden_grad else None  # fmt: skip
    grad_weight = torch.empty_like(weight_VD, memory_format=torch.contiguous_format) if weight_grad else None
    if rows == 0:
        return grad_hidden, None if grad_weight is None else grad_weight.zero_()
    logits_buffer = torch.empty(rows * columns, dtype=torch.float32, device=device)
    grad_buffer = torch.empty(rows * columns, dtype=torch.bfloat16, device=device)
    g_T = None if grad_log_prob_T is None else grad_log_prob_T.to(torch.float32).contiguous()
    h_T = None if grad_entropy_T is None else grad_entropy_T.to(torch.float32).contiguous()
    for first in range(0, vocab, columns):
        slab = weight_VD[first : first + columns]
        width = slab.shape[0]
        logits = logits_buffer[: rows * width].view(rows, width)
        grad = grad_buffer[: rows * width].view(rows, width)
        gemm(hidden_TD, slab, out_dtype=torch.float32, out=logits)
        _grad_logits[(rows, triton.cdiv(width, _BLOCK))](
            logits, grad, temperature_T, target_T, max_T, log_sum_T, entropy_T, g_T, h_T,
            first, width, width, BLOCK=_BLOCK, LOG_PROB=g_T is not None, ENTROPY=h_T is not None, num_warps=4,
        )  # fmt: skip
        if grad_hidden is not None:
            _product(grad, slab, grad_hidden, add=first > 0)
        if grad_weight is not None:
            _product(grad.t(), hidden_TD, grad_weight[first : first + columns], add=False)
    return None if grad_hidden is None else grad_hidden.to(hidden_TD.dtype), grad_weight
