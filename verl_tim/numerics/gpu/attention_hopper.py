"""Prefill for Hopper (sm_90): bulk copies by one warp, two warpgroups of 64 query rows each, softmax behind the matrix
units, programs that stay and take tile after tile.

Same arithmetic as `attention_block`, operation by operation, in Gluon: `wgmma` for scores, row sums and values. A
warpgroup issues the scores of block j + 1 and the values of block j together and computes the softmax of block j + 1
while the values are still being added. Serves head dims 64 and 128, packed rows and pages of 16, 32 or a
multiple of 64.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from verl_tim.numerics.contract import CHUNK_KEYS, KEY_BLOCK, deciding_device
from verl_tim.numerics.gpu.attention_block import LOG2_E
from verl_tim.numerics.gpu.processor import is_hopper, multiprocessors

ROWS = 128
HEAD_DIMS = (64, 128)


@gluon.jit
def _tile(tiles_ptr, turn, num_work, num_heads):
    """This program's work in a turn: (first row, live rows, position of the first row, sequence, head).

    Tiles are sorted by work and every other turn goes backwards, so that no program gets the largest of every turn.
    Beyond the last tile live is 0.
    """
    programs = gl.num_programs(0)
    work = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    inside = work < num_work
    work = gl.where(inside, work, 0)
    tile = tiles_ptr + work // num_heads * 4
    live = gl.where(inside, gl.load(tile + 1), 0)
    return gl.load(tile), live, gl.load(tile + 2), gl.load(tile + 3), work % num_heads


@gluon.jit
def _load(
    descriptors,
    buffers,
    barriers,
    tiles_ptr,
    table_ptr,
    num_work,
    num_heads,
    group,
    stride_table,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: both halves of a query tile, then every key block, as buffers become free."""
    q_desc, k_desc, v_desc = descriptors
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    base = 0
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        first_row, live, position, sequence, head = _tile(tiles_ptr, turn, num_work, num_heads)
        column = head // group * DIM
        num_blocks = gl.where(live > 0, (position + live + BLOCK - 1) // BLOCK, 0)
        table = table_ptr + sequence.to(gl.int64) * stride_table
        slot = turn & 1
        mbarrier.wait(q_free.index(slot), (turn // 2 & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [first_row + half * 64, head * DIM], q_ready.index(slot), q_buffers.index(slot * 2 + half)
            )
        for j in range(num_blocks):
            stage = (base + j) % STAGES
            phase = (base + j) // STAGES & 1
            k_buffer = k_buffers.index(stage)
            v_buffer = v_buffers.index(stage)
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), BLOCK * DIM * 2)
            if PAGE == 0 or PAGE >= BLOCK:
                if PAGE == 0:
                    row = first_row - position + j * BLOCK
                else:
                    row = gl.load(table + j * BLOCK // PAGE) * PAGE + j * BLOCK % PAGE
                tma.async_copy_global_to_shared(k_desc, [row, column], k_ready.index(stage), k_buffer)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), BLOCK * DIM * 2)
                tma.async_copy_global_to_shared(v_desc, [row, column], v_ready.index(stage), v_buffer)
            else:
                last_page = (position + live - 1) // PAGE
                first_page = j * (BLOCK // PAGE)
                for i in gl.static_range(BLOCK // PAGE):  # pages beyond the last one: that one again, masked later
                    row = gl.load(table + gl.minimum(first_page + i, last_page)) * PAGE
                    part = k_buffer.slice(i * PAGE, PAGE)
                    tma.async_copy_global_to_shared(k_desc, [row, column], k_ready.index(stage), part)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), BLOCK * DIM * 2)
                for i in gl.static_range(BLOCK // PAGE):
                    row = gl.load(table + gl.minimum(first_page + i, last_page)) * PAGE
                    part = v_buffer.slice(i * PAGE, PAGE)
                    tma.async_copy_global_to_shared(v_desc, [row, column], v_ready.index(stage), part)
        base += num_blocks


@gluon.jit
def _merge(peak_a, total_a, acc_a, peak_b, total_b, acc_b):
    """As `attention_block.merge`; peaks and totals in the row layout of the values."""
    peak = gl.maximum(peak_a, peak_b)
    reference = gl.where(peak == -float("inf"), 0.0, peak)
    a = gl.exp2(peak_a - reference)
    b = gl.exp2(peak_b - reference)
    return peak, gl.fma(total_a, a, total_b * b), gl.fma(acc_a, a[:, None], acc_b * b[:, None])


@gluon.jit
def _attend(
    half: gl.constexpr,
    buffers,
    ones,
    barriers,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    num_work,
    num_heads,
    scale_log2,
    stride_out_row,
    stride_out_head,
    stride_lse_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK_BLOCKS: gl.constexpr,
    WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: rows half * 64 .. half * 64 + 63 of every tile of this program."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    p_total_layout: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    value_rows: gl.constexpr = gl.SliceLayout(1, value_layout)
    total_rows: gl.constexpr = gl.SliceLayout(1, total_layout)
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    my_first = half * 64
    zero_scores = gl.zeros([64, BLOCK], gl.float32, layout=score_layout)
    row = gl.arange(0, 64, layout=score_rows)
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, score_layout))
    base = 0
    first_row, live, position, _sequence, head = _tile(tiles_ptr, 0, num_work, num_heads)
    for turn in range((num_work + gl.num_programs(0) - 1) // gl.num_programs(0)):
        # the next tile's numbers arrive while this one is computed
        next_row, next_live, next_position, _sequence, next_head = _tile(tiles_ptr, turn + 1, num_work, num_heads)
        num_blocks = gl.where(live > 0, (position + live + BLOCK - 1) // BLOCK, 0)
        slot = turn & 1
        q = q_buffers.index(slot * 2 + half)
        mbarrier.wait(q_ready.index(slot), turn // 2 & 1)
        my_live = gl.minimum(live - my_first, 64)
        my_blocks = num_blocks * 0
        if my_live > 0:
            my_blocks = (position + my_first + my_live + BLOCK - 1) // BLOCK
            num_whole = (position + my_first + 1) // BLOCK  # blocks that every row sees whole
            row_position = position + my_first + gl.minimum(row, my_live - 1)
            acc = gl.zeros([64, DIM], gl.float32, layout=value_layout)
            total = gl.zeros([64, 8], gl.float32, layout=total_layout)
            merged_acc = gl.zeros([64, DIM], gl.float32, layout=value_layout)
            merged_total = gl.zeros([64], gl.float32, layout=value_rows)
            merged_peak = gl.full([64], -float("inf"), gl.float32, layout=value_rows)

            stage = base % STAGES
            mbarrier.wait(k_ready.index(stage), base // STAGES & 1)
            s = warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_free.index(stage), count=1)
            if num_whole == 0:
                s = gl.where(lane[None, :] <= row_position[:, None], s, -float("inf"))
            peak = gl.max(s, 1) * scale_log2  # every row sees key 0
            first_exponent = gl.fma(s, scale_log2 + gl.zeros_like(s), -peak[:, None] + gl.zeros_like(s))
            p_values = gl.convert_layout(gl.exp2(first_exponent).to(gl.bfloat16), p_layout)
            mbarrier.wait(v_ready.index(stage), base // STAGES & 1)
            for j in range(1, my_blocks):
                stage = (base + j) % STAGES
                phase = (base + j) // STAGES & 1
                before = (base + j - 1) % STAGES
                mbarrier.wait(k_ready.index(stage), phase)
                s_next = warpgroup_mma(
                    q, k_buffers.index(stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True
                )
                acc_next = warpgroup_mma(p_values, v_buffers.index(before), acc, is_async=True)
                p_total = gl.convert_layout(p_values, p_total_layout)
                total_next = warpgroup_mma(p_total, ones, total, is_async=True)
                s = warpgroup_mma_wait(2, deps=(s_next,))
                mbarrier.arrive(k_free.index(stage), count=1)
                if j >= num_whole:
                    s = gl.where((j * BLOCK + lane)[None, :] <= row_position[:, None], s, -float("inf"))
                fresh = j % CHUNK_BLOCKS == 0
                old_peak = gl.where(fresh, -float("inf"), peak)
                new_peak = gl.maximum(old_peak, gl.max(s, 1) * scale_log2)
                reference = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # a chunk may lie wholly behind a row
                exponent = gl.fma(s, scale_log2 + gl.zeros_like(s), -reference[:, None] + gl.zeros_like(s))
                p_next = gl.convert_layout(gl.exp2(exponent).to(gl.bfloat16), p_layout)
                factor = gl.exp2(old_peak - reference)
                # Waiting here for the values of the next step splits the code: the assembler would otherwise move the
                # exponentials behind the wait for the matrix unit.
                mbarrier.wait(v_ready.index(stage), phase)
                acc, total, p_values, p_next = warpgroup_mma_wait(0, deps=(acc_next, total_next, p_values, p_next))
                mbarrier.arrive(v_free.index(before), count=1)
                if fresh:
                    merged_peak, merged_total, merged_acc = _merge(
                        merged_peak,
                        merged_total,
                        merged_acc,
                        gl.convert_layout(peak, value_rows),
                        gl.convert_layout(gl.max(total, 1), value_rows),
                        acc,
                    )
                acc = acc * gl.convert_layout(factor, value_rows)[:, None]
                total = total * gl.convert_layout(factor, total_rows)[:, None]
                peak = new_peak
                p_values = p_next
            mbarrier.arrive(q_free.index(slot), count=1)
            last = (base + my_blocks - 1) % STAGES
            acc_next = warpgroup_mma(p_values, v_buffers.index(last), acc, is_async=True)
            total_next = warpgroup_mma(gl.convert_layout(p_values, p_total_layout), ones, total, is_async=True)
            acc, total, p_values = warpgroup_mma_wait(0, deps=(acc_next, total_next, p_values))
            mbarrier.arrive(v_free.index(last), count=1)
            last_peak = gl.convert_layout(peak, value_rows)
            last_total = gl.convert_layout(gl.max(total, 1), value_rows)
            if my_blocks > CHUNK_BLOCKS:
                merged_peak, merged_total, merged_acc = _merge(
                    merged_peak, merged_total, merged_acc, last_peak, last_total, acc
                )
            else:  # merging with nothing multiplies by 1 and adds 0, which short sequences need not wait for
                merged_peak, merged_total, merged_acc = last_peak, last_total, acc
            out = merged_acc / merged_total[:, None] + 0.0
            out_row = gl.arange(0, 64, layout=value_rows)
            dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, value_layout))
            at = (first_row + my_first + out_row).to(gl.int64) * stride_out_row + head * stride_out_head
            gl.store(out_ptr + at[:, None] + dims[None, :], out.to(gl.bfloat16), mask=(out_row < my_live)[:, None])
            if WITH_LSE:
                lse = (merged_peak + gl.log2(merged_total)) * 0.6931471805599453
                lse_at = lse_ptr + head.to(gl.int64) * stride_lse_head + first_row + my_first + out_row
                gl.store(lse_at, lse, mask=out_row < my_live)
        else:
            mbarrier.arrive(q_free.index(slot), count=1)
        for j in range(my_blocks, num_blocks):  # blocks that only the other half needs
            stage = (base + j) % STAGES
            phase = (base + j) // STAGES & 1
            mbarrier.wait(k_ready.index(stage), phase)
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.arrive(v_free.index(stage), count=1)
        base += num_blocks
        first_row = next_row
        live = next_live
        position = next_position
        head = next_head


@gluon.jit
def _attend_first(
    buffers,
    ones,
    barriers,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    num_work,
    num_heads,
    scale_log2,
    stride_out_row,
    stride_out_head,
    stride_lse_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK_BLOCKS: gl.constexpr,
    WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    _attend(
        0,
        buffers,
        ones,
        barriers,
        out_ptr,
        lse_ptr,
        tiles_ptr,
        num_work,
        num_heads,
        scale_log2,
        stride_out_row,
        stride_out_head,
        stride_lse_head,
        DIM,
        BLOCK,
        CHUNK_BLOCKS,
        WITH_LSE,
        STAGES,
    )


@gluon.jit
def _attend_second(
    buffers,
    ones,
    barriers,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    num_work,
    num_heads,
    scale_log2,
    stride_out_row,
    stride_out_head,
    stride_lse_head,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK_BLOCKS: gl.constexpr,
    WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    _attend(
        1,
        buffers,
        ones,
        barriers,
        out_ptr,
        lse_ptr,
        tiles_ptr,
        num_work,
        num_heads,
        scale_log2,
        stride_out_row,
        stride_out_head,
        stride_lse_head,
        DIM,
        BLOCK,
        CHUNK_BLOCKS,
        WITH_LSE,
        STAGES,
    )


@gluon.jit
def _prefill(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    table_ptr,
    scale_log2,
    num_work,
    num_heads,
    group,
    stride_out_row,
    stride_out_head,
    stride_lse_head,
    stride_table,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK_BLOCKS: gl.constexpr,
    WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [4, 64, DIM], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], v_desc.layout)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    fill_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [BLOCK, 8], ones_layout, gl.full([BLOCK, 8], 1.0, gl.bfloat16, layout=fill_layout)
    )
    fence_async_shared()
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)

    descriptors = (q_desc, k_desc, v_desc)
    buffers = (q_buffers, k_buffers, v_buffers)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    gl.warp_specialize(
        [
            (
                _attend_first,
                (
                    buffers,
                    ones,
                    barriers,
                    out_ptr,
                    lse_ptr,
                    tiles_ptr,
                    num_work,
                    num_heads,
                    scale_log2,
                    stride_out_row,
                    stride_out_head,
                    stride_lse_head,
                    DIM,
                    BLOCK,
                    CHUNK_BLOCKS,
                    WITH_LSE,
                    STAGES,
                ),
            ),
            (
                _attend_second,
                (
                    buffers,
                    ones,
                    barriers,
                    out_ptr,
                    lse_ptr,
                    tiles_ptr,
                    num_work,
                    num_heads,
                    scale_log2,
                    stride_out_row,
                    stride_out_head,
                    stride_lse_head,
                    DIM,
                    BLOCK,
                    CHUNK_BLOCKS,
                    WITH_LSE,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    descriptors,
                    buffers,
                    barriers,
                    tiles_ptr,
                    table_ptr,
                    num_work,
                    num_heads,
                    group,
                    stride_table,
                    DIM,
                    PAGE,
                    BLOCK,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def supports(q_THD: Tensor, k: Tensor, v: Tensor, paged: bool) -> bool:
    """Whether this schedule serves these tensors: sm_90, head dim 64 or 128, heads side by side in a row, whole rows
    contiguous in a page, pages of 16, 32 or a multiple of 64."""
    dim = q_THD.shape[-1]
    if dim not in HEAD_DIMS or not is_hopper(deciding_device(q_THD)):
        return False
    for x in (q_THD, k, v):
        if x.stride(-2) != dim or x.stride(-3) % 8 or x.data_ptr() % 16:
            return False
    if paged:
        page_size = k.shape[1]
        return (page_size in (16, 32) or page_size % KEY_BLOCK == 0) and all(
            x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v)
        )
    return True


def row_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of [rows of x, heads * D] that copies [rows, D]."""
    dim = x.shape[-1]
    block = [rows, dim]
    num_rows = x.shape[0] if x.dim() == 3 else x.shape[0] * x.shape[1]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, [num_rows, x.shape[-2] * dim], [x.stride(-3), 1], block, layout)


def prefill(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor | None,
    tiles_N4: Tensor,
    block_table_SM: Tensor | None,
    stages: int = 3,
) -> None:
    """As `attention_prefill.prefill`, with tiles of at most `ROWS` rows. `supports` must hold."""
    heads, dim = q_THD.shape[1:]
    page_size = 0 if block_table_SM is None else k.shape[1]
    copied = min(page_size or KEY_BLOCK, KEY_BLOCK)
    num_work = heads * tiles_N4.shape[0]
    _prefill[(min(multiprocessors(q_THD.device), num_work),)](
        row_descriptor(q_THD, 64),
        row_descriptor(k, copied),
        row_descriptor(v, copied),
        out_THD,
        lse_HT if lse_HT is not None else out_THD,
        tiles_N4,
        block_table_SM if block_table_SM is not None else tiles_N4,
        dim**-0.5 * LOG2_E,
        num_work,
        heads,
        heads // k.shape[-2],
        *out_THD.stride()[:2],
        0 if lse_HT is None else lse_HT.stride(0),
        0 if block_table_SM is None else block_table_SM.stride(0),
        DIM=dim,
        PAGE=page_size,
        BLOCK=KEY_BLOCK,
        CHUNK_BLOCKS=CHUNK_KEYS // KEY_BLOCK,
        WITH_LSE=lse_HT is not None,
        STAGES=stages,
        num_warps=4,
        maxnreg=168,
    )
