"""Decode: one query row per sequence over paged keys, one program per run of key chunks, an ordered merge by
the last of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import CHUNK_KEYS, KEY_BLOCK
from verl_tim.numerics.gpu.attention_block import (
    LOG2_E,
    add_block,
    empty_state,
    finish,
    merge,
    merge_chunk,
)
from verl_tim.numerics.gpu.attention_keys import key_pages, key_rows, load_block
from verl_tim.numerics.gpu.attention_plan import DecodePlan
from verl_tim.numerics.gpu.overlap import begin, launch


@triton.jit
def _merge_states(
    state_ptr, first_slot, chunks, num_slots, num_heads, head, dims, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """Fold the stored states of a sequence's chunks in ascending order: head [ROWS], dims [D] -> (total, acc).

    Reads go to the second-level cache: other multiprocessors wrote the states.
    """
    peaks = state_ptr + num_slots * num_heads * DIM
    totals = peaks + num_slots * num_heads
    mask = (head < num_heads)[:, None] & (dims < DIM)[None, :]
    merged_peak = tl.full([ROWS], -float("inf"), tl.float32)
    merged_total = tl.zeros([ROWS], tl.float32)
    merged_acc = tl.zeros([ROWS, dims.shape[0]], tl.float32)
    for start in range(0, chunks, 8):
        for i in tl.static_range(8):  # a chunk beyond the last is empty: merging it changes nothing
            inside = start + i < chunks
            at = (first_slot + start + i).to(tl.int64) * num_heads + head
            one = inside & (head < num_heads)
            peak = tl.load(peaks + at, mask=one, other=-float("inf"), cache_modifier=".cg")
            total = tl.load(totals + at, mask=one, other=0.0, cache_modifier=".cg")
            acc_at = state_ptr + at[:, None] * DIM + dims[None, :]
            acc = tl.load(acc_at, mask=mask & inside, other=0.0, cache_modifier=".cg")
            merged_peak, merged_total, merged_acc = merge(merged_peak, merged_total, merged_acc, peak, total, acc)
    return merged_total, merged_acc


@triton.jit
def _walk_chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    state_ptr,
    items_ptr,
    arrived_ptr,
    table_ptr,
    scale_log2,
    num_slots,
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
    stride_table,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """State layout, float32: acc [slots, heads, D], then peak [slots, heads], then total [slots, heads]."""
    begin(OVERLAP)
    item = items_ptr + tl.program_id(1).to(tl.int64) * 8
    chunks = tl.load(item + 2)
    if chunks == 0:
        return
    sequence = tl.load(item)
    first_chunk = tl.load(item + 1)
    slot = tl.load(item + 3)
    context = tl.load(item + 4)
    query_row = tl.load(item + 5).to(tl.int64)
    num_items = tl.load(item + 6)
    kv_head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    k_base = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_v_head

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    lane = tl.arange(0, BLOCK)
    head = kv_head * GROUP + row
    live = (row < GROUP)[:, None] & (dims < DIM)[None, :]
    q = tl.load(q_ptr + query_row * stride_q_row + head[:, None] * stride_q_head + dims[None, :], mask=live, other=0.0)

    first_block = first_chunk * CHUNK_BLOCKS
    last_block = tl.minimum((first_chunk + chunks) * CHUNK_BLOCKS, tl.cdiv(context, BLOCK)) - 1
    peak, total, acc = empty_state(ROWS, PADDED)
    merged_peak = peak
    merged_total = tl.zeros([ROWS], tl.float32)
    merged_acc = acc
    table = table_ptr + sequence.to(tl.int64) * stride_table
    pages = key_pages(first_block * BLOCK, context, table, PAGE, BLOCK)
    for j in tl.range(first_block, last_block + 1, num_stages=STAGES):
        start = j * BLOCK
        k_rows = key_rows(start, context, pages, 0, stride_k_page, stride_k_row, PAGE, BLOCK)
        v_rows = key_rows(start, context, pages, 0, stride_v_page, stride_v_row, PAGE, BLOCK)
        pages = key_pages(start + BLOCK, context, table, PAGE, BLOCK)  # for the next block: hides the look-up
        valid = start + lane < context
        k = load_block(k_base, k_rows, dims, valid, DIM, PADDED, True)
        v = load_block(v_base, v_rows, dims, valid, DIM, PADDED, True)
        peak, total, acc = add_block(q, k, v, valid[None, :], peak, total, acc, scale_log2, True)
        if (j % CHUNK_BLOCKS == CHUNK_BLOCKS - 1) | (j == last_block):
            if slot >= 0:
                at = (slot + j // CHUNK_BLOCKS - first_chunk).to(tl.int64) * num_heads + head
                tl.store(state_ptr + at[:, None] * DIM + dims[None, :], acc, mask=live)
                sums = state_ptr + num_slots * num_heads * DIM
                tl.store(sums + at, peak, mask=row < GROUP)
                tl.store(sums + num_slots * num_heads + at, tl.max(total, 1), mask=row < GROUP)
            merged_peak, merged_total, merged_acc, peak, total, acc = merge_chunk(
                merged_peak, merged_total, merged_acc, peak, total, acc
            )

    if slot < 0:
        out = finish(merged_total, merged_acc)
        out_at = out_ptr + query_row * stride_out_row + head[:, None] * stride_out_head + dims[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live)
    else:
        # The program that stores the last state of a sequence merges them all: who does it is chance, the order is not.
        counter = arrived_ptr + sequence * tl.num_programs(0) + kv_head
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == num_items - 1:
            tl.store(counter, 0)  # ready for the next layer
            few = tl.arange(0, GROUP_ROWS)
            few_head = tl.where(few < GROUP, kv_head * GROUP + few, num_heads)
            total_G, acc_GD = _merge_states(
                state_ptr,
                slot - first_chunk,
                tl.cdiv(tl.cdiv(context, BLOCK), CHUNK_BLOCKS),
                num_slots,
                num_heads,
                few_head,
                dims,
                GROUP_ROWS,
                DIM,
            )
            few_at = out_ptr + query_row * stride_out_row + few_head[:, None] * stride_out_head + dims[None, :]
            few_live = (few < GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(few_at, finish(total_G, acc_GD).to(out_ptr.dtype.element_ty), mask=few_live)


def scratch_elements(num_slots: int, heads: int, head_dim: int) -> int:
    """float32 elements of the scratch that `decode` needs for a plan with `num_slots`."""
    return num_slots * heads * (head_dim + 2)


def decode_config(head_dim: int, plan: DecodePlan) -> dict[str, int]:
    """Launch options: free, they change no bit. Deeper pipelines where their shared memory costs no occupancy.

    The plan's choice counts for head_dim 65 to 128, for which it was measured.
    """
    if 64 < head_dim <= 128:
        return {"STAGES": plan.stages, "num_warps": plan.warps}
    return {"STAGES": 4 if head_dim <= 64 else 2, "num_warps": 4}


def decode(
    q_THD: Tensor,
    k_pages_PSHD: Tensor,
    v_pages_PSHD: Tensor,
    block_table_SM: Tensor,
    out_THD: Tensor,
    plan: DecodePlan,
    scratch: Tensor,
) -> None:
    """Attention of every sequence with one query row, into out. Other rows of `out` are left alone.

    Arguments as `attention.paged_forward`; scratch: float32, `scratch_elements` of them. Capturable in a CUDA graph.
    """
    heads, dim = q_THD.shape[1:]
    num_kv_heads = k_pages_PSHD.shape[2]
    group = heads // num_kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    _walk_chunks[(num_kv_heads, plan.items_W8.shape[0])](
        q_THD,
        k_pages_PSHD,
        v_pages_PSHD,
        out_THD,
        scratch,
        plan.items_W8,
        plan.arrived,
        block_table_SM,
        dim**-0.5 * LOG2_E,
        plan.num_slots,
        *q_THD.stride()[:2],
        *k_pages_PSHD.stride()[:3],
        *v_pages_PSHD.stride()[:3],
        *out_THD.stride()[:2],
        block_table_SM.stride(0),
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        PADDED=padded,
        PAGE=k_pages_PSHD.shape[1],
        BLOCK=KEY_BLOCK,
        CHUNK_BLOCKS=CHUNK_KEYS // KEY_BLOCK,
        **decode_config(dim, plan),
        **launch(),
    )
