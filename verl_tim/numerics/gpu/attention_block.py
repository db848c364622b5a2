"""Contract ``chunk64`` on a GPU, written once: the arithmetic that every attention schedule calls.

State of a row inside a chunk: `peak`, the running maximum of the scaled scores (units of log2), `total`, the sum of
the probabilities, and `acc`. The total is kept as `SUM_COLUMNS` equal columns, because the matrix unit adds it
(probabilities times a block of ones): its order of rounding is then that of `acc`, and no layout of threads can change
it. Every product that is added is an explicit `fma`: no compiler decision about contraction can change a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verl_tim.numerics.contract import CHUNK_KEYS, KEY_BLOCK

BLOCK = tl.constexpr(KEY_BLOCK)
CHUNK = tl.constexpr(CHUNK_KEYS)
SUM_COLUMNS = tl.constexpr(16)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """(peak [R], total [R, SUM_COLUMNS], acc [R, D]) before any key, float32."""
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    return peak, tl.zeros([ROWS, SUM_COLUMNS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def add_block(q, k, v, visible, peak, total, acc, scale_log2, MASKED: tl.constexpr):
    """One key block: q [R, D], k and v [BLOCK, D], visible [R, BLOCK] (read only if MASKED) -> the new state.

    A row that sees no key of the block keeps its state exactly: its factor is exp2(0) = 1, its probabilities are 0.
    """
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(visible, s, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale_log2)
    reference = new_peak
    if MASKED:  # a chunk may lie wholly behind a row
        reference = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(tl.fma(s, scale_log2, -reference[:, None])).to(v.dtype)
    factor = tl.exp2(peak - reference)
    ones = tl.full([BLOCK, SUM_COLUMNS], 1.0, tl.float32).to(v.dtype)
    total = tl.dot(p, ones, total * factor[:, None])
    acc = tl.dot(p, v, acc * factor[:, None])
    return new_peak, total, acc


@triton.jit
def merge(peak_a, total_a, acc_a, peak_b, total_b, acc_b):
    """Fold a later state b into a: peak, total [R], acc [R, D]. Merging into an empty state copies b."""
    peak = tl.maximum(peak_a, peak_b)
    reference = tl.where(peak == -float("inf"), 0.0, peak)
    a = tl.exp2(peak_a - reference)
    b = tl.exp2(peak_b - reference)
    return peak, tl.fma(total_a, a, total_b * b), tl.fma(acc_a, a[:, None], acc_b * b[:, None])


@triton.jit
def merge_chunk(merged_peak, merged_total, merged_acc, peak, total, acc):
    """`merge` of a chunk whose total is in columns; returns the merged state and an empty one for the next chunk."""
    merged_peak, merged_total, merged_acc = merge(merged_peak, merged_total, merged_acc, peak, tl.max(total, 1), acc)
    return (
        merged_peak,
        merged_total,
        merged_acc,
        tl.full(peak.shape, -float("inf"), tl.float32),
        tl.zeros_like(total),
        tl.zeros_like(acc),
    )


@triton.jit
def finish(total, acc):
    """acc / total; adding 0.0 turns -0.0 into 0.0, as further empty blocks would."""
    return acc / total[:, None] + 0.0


@triton.jit
def log_sum_exp(peak, total):
    """Natural logarithm of the sum of exp(scores)."""
    return (peak + tl.log2(total)) * LN_2
