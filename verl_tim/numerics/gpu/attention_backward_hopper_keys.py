"""dk and dv of packed causal attention on Hopper: one program per key tile and key-value head.

The program walks the queries behind its keys, all heads of the group: one warp copies, two warpgroups sum 64 keys each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


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
def key_gradients(
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
