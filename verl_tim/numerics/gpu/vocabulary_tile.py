"""What is taken from one tile of logits: parts of log-prob, entropy, top-1 and the draw. Shared by every head kernel.

A *line* is one row's `TILE` columns, held as four [lines, TILE / 4] float32 blocks (its quarters), so that most of a
reduction is elementwise. All helpers write the order of every rounding into the program: sums by a fixed tree
(`tl.sum` orders by the layout of the tile), products and additions unfused (kernels are launched with
enable_fp_fusion=False) except where `tl.fma` stands. So the bits do not depend on how many lines a program holds, its
warps, or whether the logits come from memory or straight from the matrix unit's accumulators. Maxima need no order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import libdevice

TILE = 128
"""Vocabulary columns per tile: each has its own maximum and sum. Part of the contract of GPU heads."""

_NO_ID = tl.constexpr(2147483647)

if knobs.runtime.interpret:  # which cannot call the device's library

    @triton.jit
    def _fast_log(x):
        return tl.log(x)

    @triton.jit
    def fast_exp(x):
        return tl.exp(x)
else:
    # one special-function instruction and one product each; results below 2 ** -126 are zero
    _fast_log, fast_exp = libdevice.fast_logf, libdevice.fast_expf


@triton.jit
def pairwise_sum(x, L: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr):
    """[L, N] -> [L]: neighbours are added, then neighbouring pairs, and so on; N = 2 ** LEVELS."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (L, N >> (level + 1), 2)))
        x = left + right
    return tl.reshape(x, (L,))


@triton.jit
def _halves(x, L: tl.constexpr, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (L, 2, N // 2)), (0, 2, 1)))


@triton.jit
def quarters(x, L: tl.constexpr, TILE: tl.constexpr):
    """[L, TILE] -> its four quarters in order, [L, TILE / 4] each."""
    low, high = _halves(x, L, TILE)
    q0, q1 = _halves(low, L, TILE // 2)
    q2, q3 = _halves(high, L, TILE // 2)
    return q0, q1, q2, q3


@triton.jit
def line_sum(q0, q1, q2, q3, L: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of each line: halves folded twice, then neighbours; TILE = 2 ** LEVELS."""
    return pairwise_sum((q0 + q2) + (q1 + q3), L, TILE // 4, LEVELS - 2)


@triton.jit
def divide(x, divisor, inverse):
    """x / divisor, given `inverse` = 1 / divisor rounded: one Newton correction rounds the quotient (Markstein)."""
    q = x * inverse
    return tl.fma(tl.fma(-q, divisor, x), inverse, q)


@triton.jit
def waiting_time(word):
    """Standard exponential noise E = -log(1 - u), u = (word + 0.5) / 2 ** 32, from a 32-bit word.

    -log(E) is standard Gumbel noise, so the largest z + Gumbel is the smallest E exp(-z). Small E win: below u = 1/64
    the logarithm is its series, since the hardware's is only absolutely precise near one.
    """
    u = tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    rest = tl.maximum(1.0 - u, 2.9802322387695312e-08)
    series = tl.fma(tl.fma(tl.fma(tl.fma(u, 0.2, 0.25), u, 0.3333333333333333), u, 0.5), u * u, u)
    return tl.where(u < 0.015625, series, -_fast_log(rest))


@triton.jit
def philox_words(quad, position, seed):
    """Philox4x32-10 words of counter (quad, position low, position high, 0) and key `seed` (int64), as
    `verl_tim.numerics.sampling.philox` gives them. `position` and `seed` broadcast against `quad`."""
    c0 = quad.to(tl.uint32)
    c1, c2 = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c2)
    for _ in tl.static_range(10):
        # 64-bit products of 32-bit words: one wide multiplication gives both halves
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = (p1 & 0xFFFFFFFF).to(tl.uint32), (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _arrival(z, tile_max, first_L, seed_L, position_L, L: tl.constexpr, N: tl.constexpr):
    """E exp(max - z) of the [L, N] columns from first_L (a multiple of 4) on; infinite where z is -inf."""
    quad = first_L[:, None] // 4 + tl.arange(0, N // 4)[None, :]
    w0, w1, w2, w3 = philox_words(quad, position_L[:, None], seed_L[:, None])
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (L, N))
    return waiting_time(words) * fast_exp(tile_max[:, None] - z)


@triton.jit
def _scaled(logits, col, divisor_L, inverse_L, vocab, EVEN: tl.constexpr):
    z = divide(logits, divisor_L[:, None], inverse_L[:, None])
    return z if EVEN else tl.where(col < vocab, z, -float("inf"))


@triton.jit
def _weighted(p, shifted, EVEN: tl.constexpr):
    return p * shifted if EVEN else tl.where(p > 0.0, p * shifted, 0.0)  # 0 times -inf of the padding


@triton.jit
def _larger(a, a_id, b, b_id):
    """The larger of two values and its id; a's on a tie (its id is the lower)."""
    second = b > a
    return tl.where(second, b, a), tl.where(second, b_id, a_id)


@triton.jit
def _sooner(a, a_id, a_z, b, b_id, b_z):
    second = b < a
    return tl.where(second, b, a), tl.where(second, b_id, a_id), tl.where(second, b_z, a_z)


@triton.jit
def _lowest(candidate, ids):
    """[L, N] -> [L]: the lowest id among the candidates."""
    return tl.min(tl.where(candidate, ids, _NO_ID), axis=1)


@triton.jit
def _value_of(chosen, values):
    """[L, N] -> [L]: the value of the one column that is chosen, -inf where none is."""
    return tl.max(tl.where(chosen, values, -float("inf")), axis=1)


@triton.jit
def store_parts(
    x0, x1, x2, x3, live_L, slot_L, first_L, temperature_L, target_L, seed_L, position_L, vocab,
    max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, row_L, score_ptr, pick_ptr, pick_z_ptr,
    L: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, EVEN: tl.constexpr,
    TARGET: tl.constexpr, ENTROPY: tl.constexpr, TOP: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Everything that L lines of logits (their quarters x0..x3) contribute, to slot_L of the partial arrays.

    live_L masks lines; first_L is a line's first column; columns from `vocab` on are padding (EVEN: there are none).
    """
    Q: tl.constexpr = TILE // 4
    divisor_L = tl.where(temperature_L == 0.0, 1.0, temperature_L)
    inverse_L = tl.div_rn(1.0, divisor_L)
    c0 = first_L[:, None] + tl.arange(0, Q)[None, :]
    c1, c2, c3 = c0 + Q, c0 + 2 * Q, c0 + 3 * Q
    z0, z1 = _scaled(x0, c0, divisor_L, inverse_L, vocab, EVEN), _scaled(x1, c1, divisor_L, inverse_L, vocab, EVEN)
    z2, z3 = _scaled(x2, c2, divisor_L, inverse_L, vocab, EVEN), _scaled(x3, c3, divisor_L, inverse_L, vocab, EVEN)
    if TOP:
        low, low_id = _larger(z0, c0, z1, c1)
        high, high_id = _larger(z2, c2, z3, c3)
        most, most_id = _larger(low, low_id, high, high_id)
        best = tl.max(most, axis=1)
        tl.store(top_ptr + slot_L, _lowest(most == best[:, None], most_id), mask=live_L)
    else:
        best = tl.max(tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)), axis=1)
    d0, d1, d2, d3 = z0 - best[:, None], z1 - best[:, None], z2 - best[:, None], z3 - best[:, None]
    p0, p1, p2, p3 = fast_exp(d0), fast_exp(d1), fast_exp(d2), fast_exp(d3)
    tl.store(max_ptr + slot_L, best, mask=live_L)
    tl.store(sum_ptr + slot_L, line_sum(p0, p1, p2, p3, L, TILE, LEVELS), mask=live_L)
    if ENTROPY:
        e0, e1, e2, e3 = (
            _weighted(p0, d0, EVEN),
            _weighted(p1, d1, EVEN),
            _weighted(p2, d2, EVEN),
            _weighted(p3, d3, EVEN),
        )
        tl.store(entropy_ptr + slot_L, line_sum(e0, e1, e2, e3, L, TILE, LEVELS), mask=live_L)
    if TARGET:
        here = (target_L >= first_L) & (target_L < tl.minimum(first_L + TILE, vocab))
        chosen = tl.maximum(
            tl.maximum(_value_of(c0 == target_L[:, None], z0), _value_of(c1 == target_L[:, None], z1)),
            tl.maximum(_value_of(c2 == target_L[:, None], z2), _value_of(c3 == target_L[:, None], z3)),
        )
        tl.store(target_z_ptr + row_L, chosen, mask=live_L & here)
    if SAMPLE:
        a0 = _arrival(z0, best, first_L, seed_L, position_L, L, Q)
        a1 = _arrival(z1, best, first_L + Q, seed_L, position_L, L, Q)
        low, low_id, low_z = _sooner(a0, c0, z0, a1, c1, z1)
        a2 = _arrival(z2, best, first_L + 2 * Q, seed_L, position_L, L, Q)
        a3 = _arrival(z3, best, first_L + 3 * Q, seed_L, position_L, L, Q)
        high, high_id, high_z = _sooner(a2, c2, z2, a3, c3, z3)
        first, first_id, first_z = _sooner(low, low_id, low_z, high, high_id, high_z)
        soonest = tl.min(first, axis=1)
        pick = _lowest(first == soonest[:, None], first_id)
        tl.store(score_ptr + slot_L, best - tl.log(soonest), mask=live_L)
        tl.store(pick_ptr + slot_L, pick, mask=live_L)
        tl.store(pick_z_ptr + slot_L, _value_of(first_id == pick[:, None], first_z), mask=live_L)
