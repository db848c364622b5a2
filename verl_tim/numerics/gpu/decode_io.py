"""What surrounds a decode step in a CUDA graph, in two launches: its inputs gathered by slot, its draws sent back.

Copies only, no arithmetic that could round. `engine.decode_io` has the same in plain torch, and says what each is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.gpu.overlap import begin, launch

_PAGES = 256  # copied at once


@triton.jit
def _gather(
    slot_ptr, token_ptr, position_ptr, temperature_ptr, seed_ptr, table_ptr,
    out_token_ptr, out_position_ptr, out_next_ptr, out_context_ptr, out_kv_slot_ptr, out_temperature_ptr, out_seed_ptr,
    out_table_ptr, width, PAGE: tl.constexpr, PAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    position = tl.load(position_ptr + slot)
    tl.store(out_token_ptr + row, tl.load(token_ptr + slot))
    tl.store(out_position_ptr + row, position)
    tl.store(out_next_ptr + row, position + 1)
    tl.store(out_context_ptr + row, (position + 1).to(tl.int32))
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot))
    tl.store(out_seed_ptr + row, tl.load(seed_ptr + slot))
    table_ptr += slot * width
    out_table_ptr += row * width
    page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    tl.store(out_kv_slot_ptr + row, page * PAGE + position % PAGE)
    used = position // PAGE + 1
    for start in range(0, used, PAGES):
        column = start + tl.arange(0, PAGES)
        inside = column < used
        tl.store(out_table_ptr + column, tl.load(table_ptr + column, mask=inside), mask=inside)


@triton.jit
def _scatter(
    slot_ptr, drawn_ptr, log_prob_ptr, top1_ptr, kept_mass_ptr, next_ptr, token_ptr, position_ptr, words_ptr,
    null, rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    token = tl.load(drawn_ptr + row, mask=inside, other=0)
    log_prob = tl.load(log_prob_ptr + row, mask=inside, other=0.0)
    kept_mass = tl.load(kept_mass_ptr + row, mask=inside, other=0.0)
    tl.store(words_ptr + row, token.to(tl.int32), mask=inside)
    tl.store(words_ptr + rows + row, log_prob.to(tl.int32, bitcast=True), mask=inside)
    tl.store(words_ptr + 2 * rows + row, tl.load(top1_ptr + row, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(words_ptr + 3 * rows + row, kept_mass.to(tl.int32, bitcast=True), mask=inside)
    live = inside & (slot != null)  # the null slot stays as it is
    tl.store(token_ptr + slot, token, mask=live)
    tl.store(position_ptr + slot, tl.load(next_ptr + row, mask=inside, other=0), mask=live)


def gather(
    slot_B: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    page_size: int,
) -> None:
    """Inputs of a step.

    Args:
        slot_B: int64 [B].
        state: by slot: token, position int64; temperature float32; seed int64; block table int32 [slots, M].
        out: by row: token, position, next position int64; context int32; key's slot int64; temperature float32; seed
            int64; block table int32 [B, M], of which the pages up to the position's are written.
    """
    token_S, position_S, temperature_S, seed_S, table_SM = state
    width = table_SM.shape[1]
    _gather[(slot_B.shape[0],)](
        slot_B, token_S, position_S, temperature_S, seed_S, table_SM, *out, width, PAGE=page_size, PAGES=_PAGES,
        num_warps=4, **launch(),
    )  # fmt: skip


def scatter(
    slot_B: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor, Tensor],
    next_B: Tensor,
    token_S: Tensor,
    position_S: Tensor,
    words_4B: Tensor,
    null: int,
) -> None:
    """Results of a step into one int32 buffer, and back into the state.

    Args:
        drawn: token int64, log-prob float32, top-1 int64, kept mass float32 [B].
        words_4B: int32 [4, B], contiguous: token, log-prob's bits, top-1, kept mass' bits.
        null: the slot that stays as it is.
    """
    rows = slot_B.shape[0]
    _scatter[(triton.cdiv(rows, 128),)](
        slot_B, *drawn, next_B, token_S, position_S, words_4B, null, rows, BLOCK=128, num_warps=4, **launch()
    )
