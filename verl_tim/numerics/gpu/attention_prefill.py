"""Prefill by plain Triton: packed or paged keys, any head dim and page size. The schedule that always works."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import CHUNK_KEYS, KEY_BLOCK
from verl_tim.numerics.gpu.attention_block import (
    LOG2_E,
    add_block,
    empty_state,
    finish,
    log_sum_exp,
    merge_chunk,
)
from verl_tim.numerics.gpu.attention_keys import key_pages, key_rows, load_block
from verl_tim.numerics.gpu.processor import shared_bytes


@triton.jit
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    table_ptr,
    scale_log2,
    group,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_row,
    stride_k_head,
    stride_v_page,
    stride_v_row,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    stride_lse_head,
    stride_table,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64) * 4
    live = tl.load(tiles_ptr + tile + 1)
    if live == 0:
        return
    first_row = tl.load(tiles_ptr + tile).to(tl.int64)
    position = tl.load(tiles_ptr + tile + 2)
    origin = first_row - position
    table = table_ptr
    if PAGE != 0:
        table += tl.load(tiles_ptr + tile + 3).to(tl.int64) * stride_table
    head = tl.program_id(0)
    k_base = k_ptr + (head // group) * stride_k_head
    v_base = v_ptr + (head // group) * stride_v_head

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    lane = tl.arange(0, BLOCK)
    q_at = q_ptr + (first_row + row)[:, None] * stride_q_row + head * stride_q_head + dims[None, :]
    q = tl.load(q_at, mask=(row < live)[:, None] & (dims < DIM)[None, :], other=0.0)
    row_position = position + tl.minimum(row, live - 1)  # rows beyond the live ones repeat the last: finite, not stored
    num_keys = position + live
    num_blocks = tl.cdiv(num_keys, BLOCK)
    num_whole = (position + 1) // BLOCK  # blocks that every row sees whole

    peak, total, acc = empty_state(ROWS, PADDED)
    merged_peak = peak
    merged_total = tl.zeros([ROWS], tl.float32)
    merged_acc = acc
    for j in tl.range(0, num_whole, num_stages=STAGES):
        if (j % CHUNK_BLOCKS == 0) & (j > 0):
            merged_peak, merged_total, merged_acc, peak, total, acc = merge_chunk(
                merged_peak, merged_total, merged_acc, peak, total, acc
            )
        start = j * BLOCK
        pages = key_pages(start, num_keys, table, PAGE, BLOCK)
        k_rows = key_rows(start, num_keys, pages, origin, stride_k_page, stride_k_row, PAGE, BLOCK)
        v_rows = key_rows(start, num_keys, pages, origin, stride_v_page, stride_v_row, PAGE, BLOCK)
        k = load_block(k_base, k_rows, dims, lane, DIM, PADDED, False)
        v = load_block(v_base, v_rows, dims, lane, DIM, PADDED, False)
        peak, total, acc = add_block(q, k, v, lane, peak, total, acc, scale_log2, False)
    for j in tl.range(num_whole, num_blocks, num_stages=1):
        if (j % CHUNK_BLOCKS == 0) & (j > 0):
            merged_peak, merged_total, merged_acc, peak, total, acc = merge_chunk(
                merged_peak, merged_total, merged_acc, peak, total, acc
            )
        start = j * BLOCK
        pages = key_pages(start, num_keys, table, PAGE, BLOCK)
        k_rows = key_rows(start, num_keys, pages, origin, stride_k_page, stride_k_row, PAGE, BLOCK)
        v_rows = key_rows(start, num_keys, pages, origin, stride_v_page, stride_v_row, PAGE, BLOCK)
        valid = start + lane < num_keys
        k = load_block(k_base, k_rows, dims, valid, DIM, PADDED, True)
        v = load_block(v_base, v_rows, dims, valid, DIM, PADDED, True)
        visible = (start + lane)[None, :] <= row_position[:, None]
        peak, total, acc = add_block(q, k, v, visible, peak, total, acc, scale_log2, True)
    merged_peak, merged_total, merged_acc, peak, total, acc = merge_chunk(
        merged_peak, merged_total, merged_acc, peak, total, acc
    )

    out = finish(merged_total, merged_acc)
    out_at = out_ptr + (first_row + row)[:, None] * stride_out_row + head * stride_out_head + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(row < live)[:, None] & (dims < DIM)[None, :])
    if WITH_LSE:
        lse_at = lse_ptr + head.to(tl.int64) * stride_lse_head + first_row + row
        tl.store(lse_at, log_sum_exp(merged_peak, merged_total), mask=row < live)


def prefill_config(head_dim: int, device: torch.device) -> dict[str, int]:
    """Rows of a query tile and launch options: free, they change no bit."""
    if head_dim > 128:
        return {"ROWS": 64 if shared_bytes(device) > 110 << 10 else 32, "STAGES": 2, "num_warps": 8}
    return {"ROWS": 128, "STAGES": 3, "num_warps": 8}


def prefill(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor | None,
    tiles_N4: Tensor,
    block_table_SM: Tensor | None,
    config: dict[str, int] | None = None,
) -> None:
    """Attention of the query tiles `tiles_N4` into out and lse.

    Args:
        q_THD, out_THD: [T, heads, D]; k, v: packed rows [T, kv heads, D], or pages [P, page size, kv heads, D] with
            `block_table_SM`. Last dimensions contiguous.
        tiles_N4: int32 (first row, rows, position of the first row, sequence where keys are paged); rows <= the
            configuration's ROWS, 0 for an empty tile.
    """
    heads, dim = q_THD.shape[1:]
    options = config or prefill_config(dim, q_THD.device)
    paged = block_table_SM is not None
    _prefill[(heads, tiles_N4.shape[0])](
        q_THD,
        k,
        v,
        out_THD,
        out_THD if lse_HT is None else lse_HT,
        tiles_N4,
        tiles_N4 if block_table_SM is None else block_table_SM,
        dim**-0.5 * LOG2_E,
        heads // k.shape[-2],
        *q_THD.stride()[:2],
        k.stride(0) if paged else 0,
        *k.stride()[-3:-1],
        v.stride(0) if paged else 0,
        *v.stride()[-3:-1],
        *out_THD.stride()[:2],
        0 if lse_HT is None else lse_HT.stride(0),
        0 if block_table_SM is None else block_table_SM.stride(0),
        DIM=dim,
        PADDED=max(16, triton.next_power_of_2(dim)),
        PAGE=k.shape[1] if paged else 0,
        BLOCK=KEY_BLOCK,
        CHUNK_BLOCKS=CHUNK_KEYS // KEY_BLOCK,
        WITH_LSE=lse_HT is not None,
        **options,
    )
