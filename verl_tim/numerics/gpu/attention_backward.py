"""Gradients of packed causal attention by Triton, deterministic: every element is summed by one program.

Probabilities are recomputed from the saved log-sum-exp. dk and dv are summed over the query heads of a kv head inside
the program, so that no atomics are needed. Nothing here has a counterpart in the rollout: the order of rounding is
fixed, but not part of the contract.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.attention_plan import PackedPlan
from verl_tim.numerics.gpu.processor import shared_bytes


@triton.jit
def _row_dots(
    out_ptr,
    grad_ptr,
    delta_ptr,
    num_rows,
    stride_out_row,
    stride_out_head,
    stride_grad_row,
    stride_grad_head,
    stride_delta_head,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """delta = sum over D of out * grad."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (dims < DIM)[None, :]
    out_at = out_ptr + row[:, None] * stride_out_row + head * stride_out_head + dims[None, :]
    out = tl.load(out_at, mask=mask, other=0.0)
    grad_at = grad_ptr + row[:, None] * stride_grad_row + head * stride_grad_head + dims[None, :]
    grad = tl.load(grad_at, mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * stride_delta_head + row, delta, mask=row < num_rows)


@triton.jit
def _key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    scale,
    group,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_grad_row,
    stride_grad_head,
    stride_lse_head,
    stride_dk_row,
    stride_dk_head,
    stride_dv_row,
    stride_dv_head,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64) * 4
    live = tl.load(tiles_ptr + tile + 1)
    if live == 0:
        return
    first_row = tl.load(tiles_ptr + tile).to(tl.int64)
    position = tl.load(tiles_ptr + tile + 2)
    length = tl.load(tiles_ptr + tile + 3)
    sequence_row = first_row - position
    kv_head = tl.program_id(0)

    lane = tl.arange(0, KEYS)
    query = tl.arange(0, QUERIES)
    dims = tl.arange(0, PADDED)
    mask = (lane < live)[:, None] & (dims < DIM)[None, :]
    k_at = k_ptr + (first_row + lane)[:, None] * stride_k_row + kv_head * stride_k_head + dims[None, :]
    v_at = v_ptr + (first_row + lane)[:, None] * stride_v_row + kv_head * stride_v_head + dims[None, :]
    k = tl.load(k_at, mask=mask, other=0.0)
    v = tl.load(v_at, mask=mask, other=0.0)
    key_position = position + lane

    dk = tl.zeros([KEYS, PADDED], tl.float32)
    dv = tl.zeros([KEYS, PADDED], tl.float32)
    first_tile = position // QUERIES
    tiles = tl.cdiv(length, QUERIES) - first_tile
    scale_log2 = scale * 1.4426950408889634
    for i in tl.range(0, group * tiles, num_stages=STAGES):
        head = (kv_head * group + i // tiles).to(tl.int64)
        queries = (first_tile + i % tiles) * QUERIES + query
        inside = queries < length
        rows = sequence_row + queries
        row_mask = inside[:, None] & (dims < DIM)[None, :]
        q_at = q_ptr + rows[:, None] * stride_q_row + head * stride_q_head + dims[None, :]
        q = tl.load(q_at, mask=row_mask, other=0.0)
        grad_at = grad_ptr + rows[:, None] * stride_grad_row + head * stride_grad_head + dims[None, :]
        grad = tl.load(grad_at, mask=row_mask, other=0.0)
        # rows beyond the sequence: exp2(-inf) = 0
        lse = tl.load(lse_ptr + head * stride_lse_head + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + head * stride_lse_head + rows, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q))
        p = tl.exp2(s * scale_log2 - (lse * 1.4426950408889634)[None, :])
        p = tl.where(key_position[:, None] <= queries[None, :], p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        dp = tl.dot(v, tl.trans(grad))
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)

    dk_at = dk_ptr + (first_row + lane)[:, None] * stride_dk_row + kv_head * stride_dk_head + dims[None, :]
    dv_at = dv_ptr + (first_row + lane)[:, None] * stride_dv_row + kv_head * stride_dv_head + dims[None, :]
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    tiles_ptr,
    scale,
    group,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_grad_row,
    stride_grad_head,
    stride_lse_head,
    stride_dq_row,
    stride_dq_head,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64) * 4
    live = tl.load(tiles_ptr + tile + 1)
    if live == 0:
        return
    first_row = tl.load(tiles_ptr + tile).to(tl.int64)
    position = tl.load(tiles_ptr + tile + 2)
    sequence_row = first_row - position
    head = tl.program_id(0).to(tl.int64)
    kv_head = head // group

    query = tl.arange(0, QUERIES)
    lane = tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED)
    mask = (query < live)[:, None] & (dims < DIM)[None, :]
    rows = first_row + query
    q = tl.load(q_ptr + rows[:, None] * stride_q_row + head * stride_q_head + dims[None, :], mask=mask, other=0.0)
    grad_at = grad_ptr + rows[:, None] * stride_grad_row + head * stride_grad_head + dims[None, :]
    grad = tl.load(grad_at, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + head * stride_lse_head + rows, mask=query < live, other=float("inf"))
    delta = tl.load(delta_ptr + head * stride_lse_head + rows, mask=query < live, other=0.0)
    lse = lse * 1.4426950408889634
    scale_log2 = scale * 1.4426950408889634

    dq = tl.zeros([QUERIES, PADDED], tl.float32)
    num_keys = position + live
    for start in tl.range(0, num_keys, KEYS, num_stages=STAGES):
        keys = start + lane
        key_mask = (keys < num_keys)[:, None] & (dims < DIM)[None, :]
        key_row = sequence_row + keys
        k_at = k_ptr + key_row[:, None] * stride_k_row + kv_head * stride_k_head + dims[None, :]
        v_at = v_ptr + key_row[:, None] * stride_v_row + kv_head * stride_v_head + dims[None, :]
        k = tl.load(k_at, mask=key_mask, other=0.0)
        v = tl.load(v_at, mask=key_mask, other=0.0)
        s = tl.dot(q, tl.trans(k))
        p = tl.exp2(s * scale_log2 - lse[:, None])
        p = tl.where(keys[None, :] <= (position + query)[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v))
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)

    dq_at = dq_ptr + rows[:, None] * stride_dq_row + head * stride_dq_head + dims[None, :]
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


def backward_config(head_dim: int, device: torch.device) -> dict[str, dict[str, int]]:
    """Tiles and launch options of the two kernels."""
    if head_dim > 128 and shared_bytes(device) < 116 << 10:
        return {
            "keys": {"KEYS": 32, "QUERIES": 32, "STAGES": 1, "num_warps": 4},
            "queries": {"QUERIES": 32, "KEYS": 32, "STAGES": 2, "num_warps": 4},
        }
    if head_dim > 128:
        return {
            "keys": {"KEYS": 64, "QUERIES": 32, "STAGES": 1, "num_warps": 8},
            "queries": {"QUERIES": 64, "KEYS": 32, "STAGES": 2, "num_warps": 8},
        }
    return {
        "keys": {"KEYS": 128, "QUERIES": 64, "STAGES": 2, "num_warps": 8},
        "queries": {"QUERIES": 128, "KEYS": 64, "STAGES": 2, "num_warps": 8},
    }


def backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    plan: PackedPlan,
    grads: tuple[Tensor, Tensor, Tensor],
    config: dict[str, dict[str, int]] | None = None,
) -> None:
    """Write dq, dk, dv into `grads` (shapes and dtypes of q, k, v); rows in no sequence are left alone.

    Args:
        grad_THD: gradient of out. out_THD, lse_HT: as `prefill` returned them (lse natural, float32 [heads, T]).
    """
    rows, heads, dim = q_THD.shape
    num_kv_heads = k_THD.shape[1]
    options = config or backward_config(dim, q_THD.device)
    padded = max(16, triton.next_power_of_2(dim))
    dq, dk, dv = grads
    delta_HT = torch.empty(lse_HT.shape, dtype=lse_HT.dtype, device=lse_HT.device)
    lse_HT = lse_HT.contiguous()
    _row_dots[(triton.cdiv(rows, 32), heads)](
        out_THD,
        grad_THD,
        delta_HT,
        rows,
        *out_THD.stride()[:2],
        *grad_THD.stride()[:2],
        delta_HT.stride(0),
        ROWS=32,
        DIM=dim,
        PADDED=padded,
    )
    inputs = (q_THD, k_THD, v_THD, grad_THD, lse_HT, delta_HT)
    strides = (
        *q_THD.stride()[:2],
        *k_THD.stride()[:2],
        *v_THD.stride()[:2],
        *grad_THD.stride()[:2],
        lse_HT.stride(0),
    )
    tiles = plan.key_tiles(options["keys"]["KEYS"])
    _key_gradients[(num_kv_heads, tiles.shape[0])](
        *inputs,
        dk,
        dv,
        tiles,
        dim**-0.5,
        heads // num_kv_heads,
        *strides,
        *dk.stride()[:2],
        *dv.stride()[:2],
        DIM=dim,
        PADDED=padded,
        **options["keys"],
    )
    tiles = plan.query_tiles(options["queries"]["QUERIES"])
    _query_gradients[(heads, tiles.shape[0])](
        *inputs,
        dq,
        tiles,
        dim**-0.5,
        heads // num_kv_heads,
        *strides,
        *dq.stride()[:2],
        DIM=dim,
        PADDED=padded,
        **options["queries"],
    )
