"""Where a key block lies: packed rows, or pages of any size through a block table."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_pages(start, num_keys, table, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Page of the keys start..start + BLOCK - 1 of one sequence: one number where the block lies in one page, else
    [BLOCK]. `table`: the sequence's row of the block table. Keys from num_keys on repeat the last one."""
    if PAGE == 0:
        return start
    elif PAGE // BLOCK * BLOCK == PAGE:
        return tl.load(table + tl.minimum(start, num_keys - 1) // PAGE)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, BLOCK), num_keys - 1) // PAGE)


@triton.jit
def key_rows(start, num_keys, pages, first_row, stride_page, stride_row, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Element offsets [BLOCK] (int64) of those keys. PAGE 0: packed rows, `first_row` is the row of key 0.

    Keys from num_keys on repeat the last one: their offsets are safe to read and the caller masks them.
    """
    keys = tl.minimum(start + tl.arange(0, BLOCK), num_keys - 1)
    if PAGE == 0:
        return (first_row + keys).to(tl.int64) * stride_row
    else:
        return pages.to(tl.int64) * stride_page + (keys % PAGE).to(tl.int64) * stride_row


@triton.jit
def load_block(base, rows, dims, valid, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK, PADDED] from element offsets rows [BLOCK] and dims [PADDED]; zeros where a key is not valid, or beyond
    DIM."""
    pointers = base + rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM != PADDED:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)
