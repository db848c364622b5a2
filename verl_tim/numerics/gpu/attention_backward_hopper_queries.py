"""dq of packed causal attention on Hopper: one program per query tile and head.

The program walks the keys before its queries: one warp copies, two warpgroups sum 64 rows each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


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
def query_gradients(
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
