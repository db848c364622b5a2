"""Gradients of packed causal attention for Hopper (sm_90), deterministic.

Two kernels of the same build as `attention_hopper`: one warp copies, two warpgroups compute 64 rows each. dk and dv
walk the queries behind a key tile, all heads of the group in one program; dq walks the keys before a query tile. Scores
are computed in both: seven products instead of five, and no atomics. Head dims 64 and 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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


@gluon.jit
def _load_queries(
    descriptors,
    buffers,
    barriers,
    first_row,
    sequence_row,
    first_block,
    num_blocks,
    kv_head,
    group,
    stats_head,
    stats_copy,
    stats_delta,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_desc, g_desc, k_desc, v_desc, stats_desc = descriptors
    k_buffers, v_buffers, q_buffers, g_buffers, lse_buffers, delta_buffers = buffers
    kv_ready, q_ready, q_free, g_ready, g_free = barriers
    mbarrier.expect(kv_ready, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
    for half in gl.static_range(2):
        row = first_row + half * 64
        tma.async_copy_global_to_shared(k_desc, [row, kv_head * DIM], kv_ready, k_buffers.index(half))
        tma.async_copy_global_to_shared(v_desc, [row, kv_head * DIM], kv_ready, v_buffers.index(half))
    for i in range(group * num_blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        head = kv_head * group + i // num_blocks
        row = sequence_row + (first_block + i % num_blocks) * BLOCK
        at = head * stats_head + row % 4 * stats_copy + row // 4 * 4
        mbarrier.wait(q_free.index(stage), phase ^ 1)
        mbarrier.expect(q_ready.index(stage), q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row, head * DIM], q_ready.index(stage), q_buffers.index(stage))
        tma.async_copy_global_to_shared(stats_desc, [at], q_ready.index(stage), lse_buffers.index(stage))
        mbarrier.wait(g_free.index(stage), phase ^ 1)
        mbarrier.expect(g_ready.index(stage), g_desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(g_desc, [row, head * DIM], g_ready.index(stage), g_buffers.index(stage))
        tma.async_copy_global_to_shared(
            stats_desc, [at + stats_delta], g_ready.index(stage), delta_buffers.index(stage)
        )


@gluon.jit
def _sum_queries(
    half: gl.constexpr,
    buffers,
    barriers,
    dk_ptr,
    dv_ptr,
    first_row,
    live,
    position,
    length,
    first_block,
    num_blocks,
    kv_head,
    group,
    scale,
    scale_log2,
    stride_dk_row,
    stride_dk_head,
    stride_dv_row,
    stride_dv_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: the gradients of keys half * 64 .. half * 64 + 63 of the tile. Products are [keys, queries]."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    k_buffers, v_buffers, q_buffers, g_buffers, lse_buffers, delta_buffers = buffers
    kv_ready, q_ready, q_free, g_ready, g_free = barriers
    k = k_buffers.index(half)
    v = v_buffers.index(half)
    my_position = position + half * 64
    key = my_position + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
    lane = gl.arange(0, BLOCK, layout=columns)
    zero_scores = gl.zeros([64, BLOCK], gl.float32, layout=score_layout)
    dk = gl.zeros([64, DIM], gl.float32, layout=value_layout)
    dv = gl.zeros([64, DIM], gl.float32, layout=value_layout)
    mbarrier.wait(kv_ready, 0)
    block = num_blocks * 0
    for i in range(group * num_blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        start = (first_block + block) * BLOCK
        block = gl.where(block + 1 == num_blocks, 0, block + 1)
        q = q_buffers.index(stage)
        g = g_buffers.index(stage)
        mbarrier.wait(q_ready.index(stage), phase)
        mbarrier.wait(g_ready.index(stage), phase)
        if start + BLOCK > my_position:  # some query of the block sees some key of mine
            s_next = warpgroup_mma(k, q.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            dp_next = warpgroup_mma(v, g.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            lse = lse_buffers.index(stage).load(columns)
            s = warpgroup_mma_wait(1, deps=(s_next,))
            exponent = gl.fma(s, scale_log2 + gl.zeros_like(s), -lse[None, :] + gl.zeros_like(s))
            if (start < my_position + 64) | (start + BLOCK > length):
                query = start + lane
                seen = (key[:, None] <= query[None, :]) & (query < length)[None, :]
                exponent = gl.where(seen, exponent, -float("inf"))
            p = gl.exp2(exponent)
            p_values = gl.convert_layout(p.to(gl.bfloat16), p_layout)
            dv_next = warpgroup_mma(p_values, g, dv, is_async=True)
            delta = delta_buffers.index(stage).load(columns)
            dp = warpgroup_mma_wait(1, deps=(dp_next,))
            ds = gl.convert_layout((p * (dp - delta[None, :])).to(gl.bfloat16), p_layout)
            dk_next = warpgroup_mma(ds, q, dk, is_async=True)
            dv, p_values = warpgroup_mma_wait(1, deps=(dv_next, p_values))
            mbarrier.arrive(g_free.index(stage), count=1)
            dk, ds = warpgroup_mma_wait(0, deps=(dk_next, ds))
            mbarrier.arrive(q_free.index(stage), count=1)
        else:
            mbarrier.arrive(g_free.index(stage), count=1)
            mbarrier.arrive(q_free.index(stage), count=1)
    lane_row = gl.arange(0, 64, layout=gl.SliceLayout(1, value_layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, value_layout))
    row = (first_row + half * 64 + lane_row).to(gl.int64)
    mask = (half * 64 + lane_row < live)[:, None]
    dk_at = (row * stride_dk_row + kv_head * stride_dk_head)[:, None] + dims[None, :]
    dv_at = (row * stride_dv_row + kv_head * stride_dv_head)[:, None] + dims[None, :]
    gl.store(dk_ptr + dk_at, (dk * scale).to(gl.bfloat16), mask=mask)
    gl.store(dv_ptr + dv_at, dv.to(gl.bfloat16), mask=mask)


@gluon.jit
def _load_keys(
    descriptors,
    buffers,
    barriers,
    first_row,
    sequence_row,
    num_blocks,
    head,
    kv_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_desc, g_desc, k_desc, v_desc = descriptors
    q_buffers, g_buffers, k_buffers, v_buffers = buffers
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes + 2 * g_desc.block_type.nbytes)
    for half in gl.static_range(2):
        row = first_row + half * 64
        tma.async_copy_global_to_shared(q_desc, [row, head * DIM], q_ready, q_buffers.index(half))
        tma.async_copy_global_to_shared(g_desc, [row, head * DIM], q_ready, g_buffers.index(half))
    for j in range(num_blocks):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        row = sequence_row + j * BLOCK
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, kv_head * DIM], k_ready.index(stage), k_buffers.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, kv_head * DIM], v_ready.index(stage), v_buffers.index(stage))


@gluon.jit
def _sum_keys(
    half: gl.constexpr,
    buffers,
    barriers,
    stats_ptr,
    dq_ptr,
    first_row,
    live,
    position,
    num_blocks,
    head,
    stats_head,
    stats_delta,
    scale,
    scale_log2,
    stride_dq_row,
    stride_dq_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: the gradients of query rows half * 64 .. half * 64 + 63 of the tile."""
    gl.static_assert(STAGES >= 3)  # the next keys are waited for while the last ones are still in use
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    q_buffers, g_buffers, k_buffers, v_buffers = buffers
    q_ready, k_ready, k_free, v_ready, v_free = barriers
    q = q_buffers.index(half)
    g = g_buffers.index(half)
    my_first = half * 64
    my_live = gl.minimum(live - my_first, 64)
    my_blocks = num_blocks * 0
    if my_live > 0:
        my_blocks = (position + my_first + my_live + BLOCK - 1) // BLOCK
        num_whole = (position + my_first + 1) // BLOCK
        row = gl.arange(0, 64, layout=rows)
        row_position = position + my_first + row
        lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, score_layout))
        stats_at = stats_ptr + head.to(gl.int64) * stats_head + first_row + my_first + row
        lse = gl.load(stats_at, mask=row < my_live, other=0.0)
        delta = gl.load(stats_at + stats_delta, mask=row < my_live, other=0.0)
        zero_scores = gl.zeros([64, BLOCK], gl.float32, layout=score_layout)
        dq = gl.zeros([64, DIM], gl.float32, layout=value_layout)

        mbarrier.wait(q_ready, 0)
        mbarrier.wait(k_ready.index(0), 0)
        s_next = warpgroup_mma(q, k_buffers.index(0).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(0), 0)
        dp_next = warpgroup_mma(g, v_buffers.index(0).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=(s_next, dp_next))
        mbarrier.arrive(v_free.index(0), count=1)
        first_exponent = gl.fma(s, scale_log2 + gl.zeros_like(s), -lse[:, None] + gl.zeros_like(s))
        if num_whole == 0:
            first_exponent = gl.where(lane[None, :] <= row_position[:, None], first_exponent, -float("inf"))
        ds = (gl.exp2(first_exponent) * (dp - delta[:, None])).to(gl.bfloat16)
        ds_values = gl.convert_layout(ds, ds_layout)
        mbarrier.wait(k_ready.index(1), 0, pred=my_blocks > 1)
        for j in range(1, my_blocks):
            stage = j % STAGES
            before = (j - 1) % STAGES
            phase = (j // STAGES) & 1
            s_next = warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(stage), phase)
            dp_next = warpgroup_mma(
                g, v_buffers.index(stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True
            )
            dq_next = warpgroup_mma(ds_values, k_buffers.index(before), dq, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s_next,))
            exponent = gl.fma(s, scale_log2 + gl.zeros_like(s), -lse[:, None] + gl.zeros_like(s))
            if j >= num_whole:
                exponent = gl.where((j * BLOCK + lane)[None, :] <= row_position[:, None], exponent, -float("inf"))
            p = gl.exp2(exponent)
            dp, p = warpgroup_mma_wait(1, deps=(dp_next, p))
            mbarrier.arrive(v_free.index(stage), count=1)
            ds_next = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), ds_layout)
            # Waiting here for the keys of the next step splits the code: the assembler would otherwise move the
            # arithmetic above behind the wait for the matrix unit.
            after = j + 1
            mbarrier.wait(k_ready.index(after % STAGES), (after // STAGES) & 1, pred=after < my_blocks)
            dq, ds_values, ds_next = warpgroup_mma_wait(0, deps=(dq_next, ds_values, ds_next))
            mbarrier.arrive(k_free.index(before), count=1)
            ds_values = ds_next
        last = (my_blocks - 1) % STAGES
        dq_next = warpgroup_mma(ds_values, k_buffers.index(last), dq, is_async=True)
        dq, ds_values = warpgroup_mma_wait(0, deps=(dq_next, ds_values))
        mbarrier.arrive(k_free.index(last), count=1)
        out_row = gl.arange(0, 64, layout=gl.SliceLayout(1, value_layout))
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, value_layout))
        at = (first_row + my_first + out_row).to(gl.int64) * stride_dq_row + head * stride_dq_head
        gl.store(dq_ptr + at[:, None] + dims[None, :], (dq * scale).to(gl.bfloat16), mask=(out_row < my_live)[:, None])
    for j in range(my_blocks, num_blocks):  # blocks that only the other half needs
        stage = j % STAGES
        phase = (j // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)


@gluon.jit
def _sum_queries_first(
    buffers,
    barriers,
    dk_ptr,
    dv_ptr,
    first_row,
    live,
    position,
    length,
    first_block,
    num_blocks,
    kv_head,
    group,
    scale,
    scale_log2,
    stride_dk_row,
    stride_dk_head,
    stride_dv_row,
    stride_dv_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    _sum_queries(
        0,
        buffers,
        barriers,
        dk_ptr,
        dv_ptr,
        first_row,
        live,
        position,
        length,
        first_block,
        num_blocks,
        kv_head,
        group,
        scale,
        scale_log2,
        stride_dk_row,
        stride_dk_head,
        stride_dv_row,
        stride_dv_head,
        DIM,
        BLOCK,
        STAGES,
    )


@gluon.jit
def _sum_queries_second(
    buffers,
    barriers,
    dk_ptr,
    dv_ptr,
    first_row,
    live,
    position,
    length,
    first_block,
    num_blocks,
    kv_head,
    group,
    scale,
    scale_log2,
    stride_dk_row,
    stride_dk_head,
    stride_dv_row,
    stride_dv_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    _sum_queries(
        1,
        buffers,
        barriers,
        dk_ptr,
        dv_ptr,
        first_row,
        live,
        position,
        length,
        first_block,
        num_blocks,
        kv_head,
        group,
        scale,
        scale_log2,
        stride_dk_row,
        stride_dk_head,
        stride_dv_row,
        stride_dv_head,
        DIM,
        BLOCK,
        STAGES,
    )


@gluon.jit
def _sum_keys_first(
    buffers,
    barriers,
    stats_ptr,
    dq_ptr,
    first_row,
    live,
    position,
    num_blocks,
    head,
    stats_head,
    stats_delta,
    scale,
    scale_log2,
    stride_dq_row,
    stride_dq_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    _sum_keys(
        0,
        buffers,
        barriers,
        stats_ptr,
        dq_ptr,
        first_row,
        live,
        position,
        num_blocks,
        head,
        stats_head,
        stats_delta,
        scale,
        scale_log2,
        stride_dq_row,
        stride_dq_head,
        DIM,
        BLOCK,
        STAGES,
    )


@gluon.jit
def _sum_keys_second(
    buffers,
    barriers,
    stats_ptr,
    dq_ptr,
    first_row,
    live,
    position,
    num_blocks,
    head,
    stats_head,
    stats_delta,
    scale,
    scale_log2,
    stride_dq_row,
    stride_dq_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    _sum_keys(
        1,
        buffers,
        barriers,
        stats_ptr,
        dq_ptr,
        first_row,
        live,
        position,
        num_blocks,
        head,
        stats_head,
        stats_delta,
        scale,
        scale_log2,
        stride_dq_row,
        stride_dq_head,
        DIM,
        BLOCK,
        STAGES,
    )


@gluon.jit
def _key_gradients(
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    stats_desc,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    scale,
    scale_log2,
    group,
    stats_head,
    stats_copy,
    stats_delta,
    stride_dk_row,
    stride_dk_head,
    stride_dv_row,
    stride_dv_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    tile = tiles_ptr + gl.program_id(1) * 4
    live = gl.load(tile + 1)
    if live == 0:
        return
    first_row = gl.load(tile)
    position = gl.load(tile + 2)
    length = gl.load(tile + 3)
    sequence_row = first_row - position
    kv_head = gl.program_id(0)
    first_block = position // BLOCK
    num_blocks = (length + BLOCK - 1) // BLOCK - first_block

    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], v_desc.layout)
    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], q_desc.layout)
    g_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], g_desc.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], stats_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], stats_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(g_ready.index(i), count=1)
        mbarrier.init(g_free.index(i), count=2)

    descriptors = (q_desc, g_desc, k_desc, v_desc, stats_desc)
    buffers = (k_buffers, v_buffers, q_buffers, g_buffers, lse_buffers, delta_buffers)
    barriers = (kv_ready, q_ready, q_free, g_ready, g_free)
    gl.warp_specialize(
        [
            (
                _sum_queries_first,
                (
                    buffers,
                    barriers,
                    dk_ptr,
                    dv_ptr,
                    first_row,
                    live,
                    position,
                    length,
                    first_block,
                    num_blocks,
                    kv_head,
                    group,
                    scale,
                    scale_log2,
                    stride_dk_row,
                    stride_dk_head,
                    stride_dv_row,
                    stride_dv_head,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _sum_queries_second,
                (
                    buffers,
                    barriers,
                    dk_ptr,
                    dv_ptr,
                    first_row,
                    live,
                    position,
                    length,
                    first_block,
                    num_blocks,
                    kv_head,
                    group,
                    scale,
                    scale_log2,
                    stride_dk_row,
                    stride_dk_head,
                    stride_dv_row,
                    stride_dv_head,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _load_queries,
                (
                    descriptors,
                    buffers,
                    barriers,
                    first_row,
                    sequence_row,
                    first_block,
                    num_blocks,
                    kv_head,
                    group,
                    stats_head,
                    stats_copy,
                    stats_delta,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _query_gradients(
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    stats_ptr,
    dq_ptr,
    tiles_ptr,
    scale,
    scale_log2,
    group,
    stats_head,
    stats_delta,
    stride_dq_row,
    stride_dq_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    tile = tiles_ptr + gl.program_id(1) * 4
    live = gl.load(tile + 1)
    if live == 0:
        return
    first_row = gl.load(tile)
    position = gl.load(tile + 2)
    sequence_row = first_row - position
    head = gl.program_id(0)
    kv_head = head // group
    num_blocks = (position + live + BLOCK - 1) // BLOCK

    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], q_desc.layout)
    g_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], g_desc.layout)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)

    descriptors = (q_desc, g_desc, k_desc, v_desc)
    buffers = (q_buffers, g_buffers, k_buffers, v_buffers)
    barriers = (q_ready, k_ready, k_free, v_ready, v_free)
    gl.warp_specialize(
        [
            (
                _sum_keys_first,
                (
                    buffers,
                    barriers,
                    stats_ptr,
                    dq_ptr,
                    first_row,
                    live,
                    position,
                    num_blocks,
                    head,
                    stats_head,
                    stats_delta,
                    scale,
                    scale_log2,
                    stride_dq_row,
                    stride_dq_head,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _sum_keys_second,
                (
                    buffers,
                    barriers,
                    stats_ptr,
                    dq_ptr,
                    first_row,
                    live,
                    position,
                    num_blocks,
                    head,
                    stats_head,
                    stats_delta,
                    scale,
                    scale_log2,
                    stride_dq_row,
                    stride_dq_head,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
            (
                _load_keys,
                (
                    descriptors,
                    buffers,
                    barriers,
                    first_row,
                    sequence_row,
                    num_blocks,
                    head,
                    kv_head,
                    DIM,
                    BLOCK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


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
    _key_gradients[(num_kv_heads, tiles_N4.shape[0])](
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
    _query_gradients[(heads, tiles_N4.shape[0])](
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
