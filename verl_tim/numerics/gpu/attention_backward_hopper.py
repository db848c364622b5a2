"""Gradients of packed causal attention for Hopper (sm_90), deterministic.

Two kernels of the same build as `attention_hopper`: `attention_backward_hopper_keys` for dk and dv,
`attention_backward_hopper_queries` for dq. Scores are computed in both: seven products instead of five, and no atomics.
Head dims 64 and 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from verl_tim.numerics.gpu.attention_backward_hopper_keys import key_gradients
from verl_tim.numerics.gpu.attention_backward_hopper_queries import query_gradients
from verl_tim.numerics.gpu.attention_block import LOG2_E
from verl_tim.numerics.gpu.attention_hopper import row_descriptor
from verl_tim.numerics.gpu.attention_plan import PackedPlan

ROWS = 128
_BLOCK = 64


@triton.jit
def _row_statistics(
    out_ptr,
    grad_ptr,
    lse_ptr,
    stats_ptr,
    num_rows,
    stride_out_row,
    stride_out_head,
    stride_grad_row,
    stride_grad_head,
    stride_lse_head,
    stride_stats,
    stride_stats_head,
    stride_stats_copy,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """stats[0] = log-sum-exp in units of log2, stats[1] = sum over D of out * grad, each in four copies: copy c holds
    row r at r - c. Bulk copies start at a multiple of 16 bytes; sequences start at any row, aligned in one copy."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    inside = row < num_rows
    out_at = out_ptr + row[:, None] * stride_out_row + head * stride_out_head + dims[None, :]
    grad_at = grad_ptr + row[:, None] * stride_grad_row + head * stride_grad_head + dims[None, :]
    out = tl.load(out_at, mask=inside[:, None], other=0.0)
    grad = tl.load(grad_at, mask=inside[:, None], other=0.0)
    lse = tl.load(lse_ptr + head * stride_lse_head + row, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    for copy in tl.static_range(4):
        at = stats_ptr + head * stride_stats_head + copy * stride_stats_copy + row - copy
        tl.store(at, lse * 1.4426950408889634, mask=inside & (row >= copy))
        tl.store(at + stride_stats, delta, mask=inside & (row >= copy))


def backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    plan: PackedPlan,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """As `attention_backward.backward`, where `attention_hopper.supports` holds for q, k, v and the gradient."""
    num_rows, heads, dim = q_THD.shape
    num_kv_heads = k_THD.shape[1]
    dq, dk, dv = grads
    scale = dim**-0.5
    # zeros: what lies behind the last row is read, multiplied by 0 and must be finite
    stats_2H4T = torch.zeros(2, heads, 4, -(-num_rows // 4) * 4, device=q_THD.device)
    lse_HT = lse_HT.contiguous()
    _row_statistics[(triton.cdiv(num_rows, 32), heads)](
        out_THD,
        grad_THD,
        lse_HT,
        stats_2H4T,
        num_rows,
        *out_THD.stride()[:2],
        *grad_THD.stride()[:2],
        lse_HT.stride(0),
        *stats_2H4T.stride()[:3],
        ROWS=32,
        DIM=dim,
    )
    layout = gl.NVMMASharedLayout(0, 32, 1)
    stats_desc = TensorDescriptor(stats_2H4T, [stats_2H4T.numel()], [1], [_BLOCK], layout)
    descriptors = [row_descriptor(x, _BLOCK) for x in (q_THD, grad_THD, k_THD, v_THD)]
    constants = {"DIM": dim, "BLOCK": _BLOCK, "num_warps": 4, "maxnreg": 168}
    tiles_N4 = plan.key_tiles(ROWS)
    key_gradients[(num_kv_heads, tiles_N4.shape[0])](
        *descriptors,
        stats_desc,
        dk,
        dv,
        tiles_N4,
        scale,
        scale * LOG2_E,
        heads // num_kv_heads,
        stats_2H4T.stride(1),
        stats_2H4T.stride(2),
        stats_2H4T.stride(0),
        *dk.stride()[:2],
        *dv.stride()[:2],
        STAGES=4,
        **constants,
    )
    tiles_N4 = plan.query_tiles(ROWS)
    query_gradients[(heads, tiles_N4.shape[0])](
        *descriptors,
        stats_2H4T,
        dq,
        tiles_N4,
        scale,
        scale * LOG2_E,
        heads // num_kv_heads,
        stats_2H4T.stride(1),
        stats_2H4T.stride(0),
        *dq.stride()[:2],
        STAGES=3 if dim > 64 else 4,
        **constants,
    )
