"""Sampling with cuts on a GPU: min-p, top-k, top-p on the rows that ask for them, without a sort.

Rule (that of `verl_tim.numerics.sampling`): each cut acts on what the former left; rank is by z, ties to the lower id;
top-p keeps an id while the mass of the more probable ones is below top_p times the mass left. The token is the argmax
of z + Gumbel noise over the kept ids, and its log-prob is the full vocabulary's, by the head's own functions.

One program per row: a histogram of (max - z) bounds the ids that can survive, those are copied out in ascending id
order, and the exact thresholds are found among them by bisection over the order-preserving bits of z. The distribution
of a trained model leaves a few hundred candidates; a flat one leaves the vocabulary, which is slower and as exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import head
from verl_tim.numerics.gpu.gemm import gemm
from verl_tim.numerics.gpu.vocabulary_tile import divide, philox_words, waiting_time
from verl_tim.numerics.shards import VocabularyPart

_BLOCK = 4096
CHUNK_ROWS = 64  # rows whose logits are in flight
_BINS = tl.constexpr(256)
_BINS_PER_NAT = tl.constexpr(16.0)

# One value a program: aligned or not, it is read or written alone, and compiles to the same.
_PER_ROW = [
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr", "max_ptr", "log_sum_ptr",
    "top1_ptr", "token_ptr", "log_prob_ptr", "kept_mass_ptr",
]  # fmt: skip


class CutDraw(NamedTuple):
    """token_R, top1_R int64; log_prob_R (full vocabulary), kept_mass_R (1.0 where nothing was cut) float32 [R]."""

    token_R: Tensor
    log_prob_R: Tensor
    kept_mass_R: Tensor
    top1_R: Tensor


class Cuts(NamedTuple):
    """top_k_R int64 (-1 off), top_p_R float32 (1 off), min_p_R float32 (0 off)."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor


@triton.jit
def _ordered(z):
    """int32 with the order of the float32 values."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bin(z, maximum):
    return tl.minimum(((maximum - z) * _BINS_PER_NAT).to(tl.int32), _BINS - 1)


@triton.jit
def _count_above(z_ptr, n, key, BLOCK: tl.constexpr):
    """How many candidates have an ordered key above `key`."""
    count = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + i, mask=i < n, other=-float("inf"))
        count += ((_ordered(z) > key) & (i < n)).to(tl.int32)
        start += BLOCK
    return tl.sum(count, axis=0)


@triton.jit
def _mass_above(z_ptr, n, key, floor, maximum, log_sum, BLOCK: tl.constexpr):
    """Probability of the candidates above `key` whose exp(z - max) reaches `floor`."""
    mass = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + i, mask=i < n, other=-float("inf"))
        kept = (_ordered(z) > key) & (tl.exp(z - maximum) >= floor) & (i < n)
        mass += tl.where(kept, tl.exp((z - maximum) - log_sum), 0.0)
        start += BLOCK
    return tl.sum(mass, axis=0)


@triton.jit
def _probability(key, maximum, log_sum):
    """p of an ordered key."""
    z = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((z - maximum) - log_sum)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _cut_and_draw(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, max_ptr, log_sum_ptr,
    top1_ptr, z_ptr, id_ptr, token_ptr, log_prob_ptr, kept_mass_ptr, vocab, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    z_ptr += row * vocab
    id_ptr += row * vocab
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    inverse = tl.div_rn(1.0, divisor)
    maximum, log_sum = tl.load(max_ptr + row), tl.load(log_sum_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    lane = tl.arange(0, BLOCK)

    # 1. Histogram of (max - z), and the last bin that can hold a kept id.
    counts = tl.zeros((_BINS,), tl.int32)
    start = 0
    while start < vocab:
        col = start + lane
        z = divide(tl.load(logits_ptr + col, mask=col < vocab, other=0.0), divisor, inverse)
        counts += tl.histogram(_bin(z, maximum), _BINS, mask=col < vocab)
        start += BLOCK
    bins = tl.arange(0, _BINS)
    least_mass = tl.cumsum(counts.to(tl.float32) * tl.exp((bins + 1).to(tl.float32) * (-1.0 / _BINS_PER_NAT)), axis=0)
    last = _BINS - 1
    former = (top_k > 0) | (min_p > 0.0)  # then top-p's target is a share of what those leave: all of it is wanted
    if top_k > 0:
        last = tl.minimum(last, tl.min(tl.where(tl.cumsum(counts, axis=0) >= top_k, bins, _BINS - 1), axis=0))
    if min_p > 0.0:
        last = tl.minimum(last, (-tl.log(min_p) * _BINS_PER_NAT).to(tl.int32) + 1)
    if (top_p < 1.0) & (former == 0):
        enough = least_mass >= 1.001 * top_p * tl.exp(log_sum)
        last = tl.min(tl.where(enough, bins, _BINS - 1), axis=0)

    # 2. Candidates in ascending id order.
    n = tl.full((), 0, tl.int32)
    start = 0
    while start < vocab:
        col = start + lane
        z = divide(tl.load(logits_ptr + col, mask=col < vocab, other=0.0), divisor, inverse)
        candidate = ((_bin(z, maximum) <= last) & (col < vocab)).to(tl.int32)
        slot = n + tl.cumsum(candidate, axis=0) - 1
        tl.store(z_ptr + slot, z, mask=candidate != 0)
        tl.store(id_ptr + slot, col, mask=candidate != 0)
        n += tl.sum(candidate, axis=0)
        start += BLOCK
    tl.debug_barrier()

    # 3. top-k: the lowest key below which no id is kept, and how many of its ties are. Bisection: low < answer <= high.
    key_k, ties_k = tl.full((), -2147483648, tl.int32), n
    floor = min_p
    top_key = _ordered(maximum)
    if (top_k > 0) & (top_k < n):
        low, high = tl.full((), -2147483648, tl.int64), top_key.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if _count_above(z_ptr, n, middle.to(tl.int32), BLOCK) >= top_k:
                low = middle + 1
            else:
                high = middle
        key_k = low.to(tl.int32)
        ties_k = (top_k - _count_above(z_ptr, n, key_k, BLOCK)).to(tl.int32)

    # 4. top-p among those: the lowest key above which less than the target mass lies.
    key_p, ties_p = key_k, ties_k
    if top_p < 1.0:
        total = 1.0
        if former:
            total = _mass_above(z_ptr, n, key_k, floor, maximum, log_sum, BLOCK)
            if (key_k > -2147483648) & (_probability(key_k, maximum, 0.0) >= floor):
                total += ties_k.to(tl.float32) * _probability(key_k, maximum, log_sum)
        target = top_p * total
        low, high = key_k.to(tl.int64), top_key.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if _mass_above(z_ptr, n, middle.to(tl.int32), floor, maximum, log_sum, BLOCK) < target:
                high = middle
            else:
                low = middle + 1
        key_p = low.to(tl.int32)
        above = _mass_above(z_ptr, n, key_p, floor, maximum, log_sum, BLOCK)
        wanted = tl.ceil((target - above) / _probability(key_p, maximum, log_sum))
        ties_p = tl.maximum(tl.minimum(wanted, n.to(tl.float32)), 0.0).to(tl.int32)
        if key_p == top_key:
            ties_p = tl.maximum(ties_p, 1)
        if key_p == key_k:
            ties_p = tl.minimum(ties_p, ties_k)

    # 5. The draw over the kept ids.
    soonest = tl.full((BLOCK,), float("inf"), tl.float32)
    pick = tl.full((BLOCK,), 2147483647, tl.int32)
    pick_z = tl.full((BLOCK,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    kept_count, seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    start = 0
    while start < n:
        i = start + lane
        z = tl.load(z_ptr + i, mask=i < n, other=-float("inf"))
        token = tl.load(id_ptr + i, mask=i < n, other=0)
        key = _ordered(z)
        tie = ((key == key_p) & (i < n)).to(tl.int32)
        rank = seen + tl.cumsum(tie, axis=0)
        seen += tl.sum(tie, axis=0)
        kept = ((key > key_p) | ((tie != 0) & (rank <= ties_p))) & (tl.exp(z - maximum) >= floor) & (i < n)
        w0, w1, w2, w3 = philox_words(token // 4, position, seed)
        part = token % 4
        word = tl.where(part == 0, w0, tl.where(part == 1, w1, tl.where(part == 2, w2, w3)))
        arrival = tl.where(kept, waiting_time(word) * tl.exp(maximum - z), float("inf"))
        sooner = arrival < soonest  # ids ascend, so equal times keep the lower id
        pick = tl.where(sooner, token, pick)
        pick_z = tl.where(sooner, z, pick_z)
        soonest = tl.minimum(soonest, arrival)
        mass += tl.where(kept, tl.exp((z - maximum) - log_sum), 0.0)
        kept_count += tl.sum(kept.to(tl.int32), axis=0)
        start += BLOCK
    winner = tl.min(tl.where(soonest == tl.min(soonest, axis=0), pick, 2147483647), axis=0)
    chosen = tl.max(tl.where(pick == winner, pick_z, -float("inf")), axis=0)
    greedy = temperature == 0.0
    everything = greedy | (kept_count == vocab)
    tl.store(kept_mass_ptr + row, tl.where(everything, 1.0, tl.sum(mass, axis=0)))
    tl.store(token_ptr + row, tl.where(greedy, tl.load(top1_ptr + row), winner.to(tl.int64)))
    tl.store(log_prob_ptr + row, (tl.where(greedy, maximum, chosen) - maximum) - log_sum)


def gather_logits(hidden_RD: Tensor, weight_VD: Tensor, part: VocabularyPart) -> Tensor:
    """float32 logits [R, V] from every rank's rows of the head; a collective."""
    share = part.tiles_per_rank * part.tile
    own = torch.empty(hidden_RD.shape[0], share, dtype=torch.float32, device=hidden_RD.device)
    if part.width:
        gemm(hidden_RD, weight_VD, out_dtype=torch.float32, out=own[:, : part.width])
    return part.shards.columns(own)[:, : part.vocab_size].contiguous()


def sample_with_cuts(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    temperature_R: Tensor,
    cuts: Cuts,
    seed_R: Tensor,
    position_R: Tensor,
    *,
    part: VocabularyPart | None = None,
) -> CutDraw:
    """Draw one token per row under its cuts. All rows must have some; the others belong to `head.sample`.

    Args:
        weight_VD: bfloat16 [V, D], or the rows of `part`, whose logits are then gathered.
        hidden_RD: bfloat16 [R, D]; temperature_R: float32 [R], 0 is greedy.
        seed_R, position_R: int64 [R].

    Raises:
        ContractError: dtypes or shapes that do not fit.
    """
    rows = head.Rows(temperature_R.contiguous(), None, seed_R.contiguous(), position_R.contiguous())
    head.check(hidden_RD, weight_VD, rows)
    wanted = {"top_k_R": torch.int64, "top_p_R": torch.float32, "min_p_R": torch.float32}
    for name, t in zip(Cuts._fields, cuts, strict=True):
        if t.dtype != wanted[name] or t.shape != hidden_RD.shape[:1]:
            raise ContractError(f"sampling: {name[:-2]} must be {wanted[name]} [rows], got {t.dtype} {tuple(t.shape)}")
    cuts = Cuts(*(t.contiguous() for t in cuts))
    count, device = hidden_RD.shape[0], hidden_RD.device
    vocab = weight_VD.shape[0] if part is None else part.vocab_size
    token = torch.empty(count, dtype=torch.int64, device=device)
    top1 = torch.empty_like(token)
    log_prob, kept_mass = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    chunk = min(count, CHUNK_ROWS)
    logits_buffer, z = (torch.empty(chunk, vocab, dtype=torch.float32, device=device) for _ in range(2))
    candidate = torch.empty(chunk, vocab, dtype=torch.int32, device=device)
    for first in range(0, count, CHUNK_ROWS):
        at = slice(first, min(first + CHUNK_ROWS, count))
        some = at.stop - at.start
        if part is None:
            logits = gemm(hidden_RD[at], weight_VD, out_dtype=torch.float32, out=logits_buffer[:some])
        else:
            logits = gather_logits(hidden_RD[at], weight_VD, part)
        lse = head.log_sum_exp(logits, rows.temperature_T[at])
        assert lse.top1_T is not None
        top1[at] = lse.top1_T
        _cut_and_draw[(some,)](
            logits, rows.temperature_T[at], cuts.top_k_R[at], cuts.top_p_R[at], cuts.min_p_R[at],
            rows.seed_T[at], rows.position_T[at], lse.max_T, lse.log_sum_T, lse.top1_T,  # type: ignore[index]
            z, candidate, token[at], log_prob[at], kept_mass[at],
            vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
    return CutDraw(token, log_prob, kept_mass, top1)
