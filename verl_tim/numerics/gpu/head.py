"""Head on a GPU: log-probs of given tokens (trainer) and the next token with its log-prob (sampler), one rule.

Rule: logits = hidden W^T as `gemm` accumulates them, never rounded; z = logits / temperature in float32 (temperature 0
scores at 1); per tile of `TILE` columns the maximum m_j and the sum s_j of exp(z - m_j); M = max m_j;
sum = sum_j s_j exp(m_j - M), both sums by a pairwise tree; log-prob = (z[token] - M) - log(sum).

Free: where the logits live. `_from_logits` reads them from slabs that `gemm` wrote (bounded memory; many rows),
`_from_weights` takes them from the accumulators of a streaming product (few rows, nothing written). Both hand the same
block to the same function (`vocabulary_tile.store_parts`); one kernel merges. The names of these two schedules are
`SLABS`, which serves any number of rows and is what `probe` compares with, and `STREAM`, until `forbid`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.few_rows import accumulate
from verl_tim.numerics.gpu.gemm import gemm
from verl_tim.numerics.gpu.overlap import begin, launch
from verl_tim.numerics.gpu.vocabulary_tile import TILE, divide, fast_exp, pairwise_sum, quarters, store_parts
from verl_tim.numerics.shards import VocabularyPart

_LEVELS = TILE.bit_length() - 1
_SLAB_ELEMENTS = 1 << 23  # logits in flight: 32 MiB of float32, which the L2 cache of an H200 holds
_LARGE_SLAB_ELEMENTS = 1 << 25  # for a trainer's rows, where more launches would cost more than memory does
_LARGE_ROWS = 1024
_CHUNK_ROWS = 4096
_GROUP = 16  # tiles per program of `_from_logits`
_FEW_ROWS = 64  # up to here the weights stream once and logits stay in registers

SLABS, STREAM = "slabs", "stream"
_forbidden: set[str] = set()


def forbid(name: str) -> None:
    """Never take this schedule again in this process: `SLABS` takes its rows.

    Raises:
        ContractError: no schedule that another one can stand in for has that name.
    """
    if name != STREAM:
        raise ContractError(f"head: no schedule {name!r} that can be forbidden; there is {STREAM}")
    _forbidden.add(name)


def schedule_of(rows: int) -> str:
    """Which schedule takes so many rows."""
    return STREAM if rows <= _FEW_ROWS and STREAM not in _forbidden else SLABS


# Pointers to one value per row or per row and tile: their alignment varies with the batch, and compiles nothing better.
_PER_ROW = [
    "temperature_ptr", "target_ptr", "seed_ptr", "position_ptr", "max_ptr", "sum_ptr", "top_ptr", "entropy_ptr",
    "target_z_ptr", "score_ptr", "pick_ptr", "pick_z_ptr",
]  # fmt: skip
_MERGED = ["log_prob_ptr", "out_max_ptr", "out_log_sum_ptr", "out_entropy_ptr", "out_top_ptr", "out_token_ptr"]


class Results(NamedTuple):
    """Of each row, as far as asked for. log_prob_T (of the target, or of the token drawn, full vocabulary, at the row's
    temperature; at 1 where that is 0), max_T, log_sum_T, entropy_T float32 [T]; top1_T, token_T int64 [T]."""

    max_T: Tensor
    log_sum_T: Tensor
    top1_T: Tensor | None = None
    log_prob_T: Tensor | None = None
    entropy_T: Tensor | None = None
    token_T: Tensor | None = None

    def part(self, rows: slice) -> Results:
        return Results(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


def _results(
    rows: int, device: torch.device, *, top1: bool, log_prob: bool = False, entropy: bool = False, token: bool = False
) -> Results:
    f32 = torch.empty(4, rows, dtype=torch.float32, device=device).unbind()
    i64 = torch.empty(2, rows, dtype=torch.int64, device=device).unbind()
    return Results(
        f32[0], f32[1], i64[0] if top1 else None, f32[2] if log_prob else None, f32[3] if entropy else None,
        i64[1] if token else None,
    )  # fmt: skip


class Parts(NamedTuple):
    """Per row and tile: float32 and int32 [rows, tiles], and the target's z [rows]."""

    max_RJ: Tensor
    sum_RJ: Tensor
    top_RJ: Tensor | None
    entropy_RJ: Tensor | None
    target_z_R: Tensor | None
    score_RJ: Tensor | None
    pick_RJ: Tensor | None
    pick_z_RJ: Tensor | None


def _parts(rows: int, vocab: int, out: Results, part: VocabularyPart | None = None) -> Parts:
    """Room for what `out` asks for; for every rank's share of tiles where the vocabulary is split."""
    tiles = triton.cdiv(vocab, TILE) if part is None else part.tiles_per_rank * part.shards.size
    device = out.max_T.device
    sample = out.token_T is not None
    f32 = torch.empty(5, rows, tiles, dtype=torch.float32, device=device).unbind()
    i32 = torch.empty(2, rows, tiles, dtype=torch.int32, device=device).unbind()
    # a target outside the vocabulary is written by no tile: its log-prob is NaN
    target_z = torch.full((rows,), torch.nan, device=device) if out.log_prob_T is not None and not sample else None
    return Parts(
        f32[0], f32[1], i32[0] if out.top1_T is not None else None, f32[2] if out.entropy_T is not None else None,
        target_z, f32[3] if sample else None, i32[1] if sample else None, f32[4] if sample else None,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _from_logits(
    logits_ptr, temperature_ptr, target_ptr, seed_ptr, position_ptr,
    max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, score_ptr, pick_ptr, pick_z_ptr,
    first, width, vocab, tiles, stride,
    G: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    EVEN: tl.constexpr, TARGET: tl.constexpr, ENTROPY: tl.constexpr, TOP: tl.constexpr, SAMPLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, G tiles of a slab whose first column is `first`, `width` columns wide."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    line = tl.arange(0, G)
    start_L = (group * G + line) * TILE
    col = start_L[:, None] + tl.arange(0, TILE // 4)[None, :]
    logits_ptr += row * stride
    x0 = tl.load(logits_ptr + col, mask=col < width, other=0.0)
    x1 = tl.load(logits_ptr + col + TILE // 4, mask=col + TILE // 4 < width, other=0.0)
    x2 = tl.load(logits_ptr + col + TILE // 2, mask=col + TILE // 2 < width, other=0.0)
    x3 = tl.load(logits_ptr + col + 3 * TILE // 4, mask=col + 3 * TILE // 4 < width, other=0.0)
    row_L = tl.zeros((G,), tl.int64) + row
    temperature = tl.load(temperature_ptr + row)
    if TARGET:  # one logit, straight from memory
        target = tl.load(target_ptr + row) - first
        if (target >= group * G * TILE) & (target < tl.minimum((group + 1) * G * TILE, width)):
            divisor = tl.where(temperature == 0.0, 1.0, temperature)
            z = divide(tl.load(logits_ptr + target), divisor, tl.div_rn(1.0, divisor))
            tl.store(target_z_ptr + row, z)
    seed_L = tl.load(seed_ptr + row_L) if SAMPLE else row_L
    position_L = tl.load(position_ptr + row_L) if SAMPLE else row_L
    first_L = first + start_L
    store_parts(
        x0, x1, x2, x3, start_L < width, row_L * tiles + first_L // TILE, first_L,
        tl.zeros((G,), tl.float32) + temperature, row_L, seed_L, position_L, vocab,
        max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, row_L, score_ptr, pick_ptr, pick_z_ptr,
        G, TILE, LEVELS, EVEN, False, ENTROPY, TOP, SAMPLE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_PER_ROW)
def _from_weights(
    hidden_ptr, weight_ptr, temperature_ptr, target_ptr, seed_ptr, position_ptr,
    max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, score_ptr, pick_ptr, pick_z_ptr,
    rows, vocab, tiles, first, stride_x, stride_w,
    K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    TILE: tl.constexpr, LEVELS: tl.constexpr,
    EVEN: tl.constexpr, TARGET: tl.constexpr, ENTROPY: tl.constexpr, TOP: tl.constexpr, SAMPLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BM rows against one tile of the vocabulary: logits never leave the program. `first`: tile of the weight's first
    row."""
    begin(OVERLAP)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1) + first
    row_L = tl.minimum(row, rows - 1).to(tl.int64)
    col_N = (tl.minimum(tile * TILE + tl.arange(0, TILE), vocab - 1) - first * TILE).to(tl.int64)
    acc = accumulate(hidden_ptr, weight_ptr, row_L, row < rows, col_N, stride_x, stride_w, K, BM, TILE, BK, SWAP)
    x0, x1, x2, x3 = quarters(tl.trans(acc) if SWAP else acc, BM, TILE)
    first_L = tl.zeros((BM,), tl.int32) + tile * TILE
    target_L = row_L.to(tl.int32)
    if TARGET:
        target = tl.load(target_ptr + row_L)
        target_L = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # no other id in 32 bits
    seed_L = tl.load(seed_ptr + row_L) if SAMPLE else row_L
    position_L = tl.load(position_ptr + row_L) if SAMPLE else row_L
    store_parts(
        x0, x1, x2, x3, row < rows, row_L * tiles + tile, first_L, tl.load(temperature_ptr + row_L),
        target_L, seed_L, position_L, vocab,
        max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, row_L, score_ptr, pick_ptr, pick_z_ptr,
        BM, TILE, LEVELS, EVEN, TARGET, ENTROPY, TOP, SAMPLE,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_PER_ROW + _MERGED)
def _merge(
    temperature_ptr, max_ptr, sum_ptr, top_ptr, entropy_ptr, target_z_ptr, score_ptr, pick_ptr, pick_z_ptr,
    log_prob_ptr, out_max_ptr, out_log_sum_ptr, out_entropy_ptr, out_top_ptr, out_token_ptr,
    tiles, LINES: tl.constexpr, FOLDS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    ENTROPY: tl.constexpr, TARGET: tl.constexpr, TOP: tl.constexpr, SAMPLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: its tiles' parts into the results. Part j: lane j % TILE of line j // TILE; LINES = 2 ** FOLDS."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, LINES)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    live = part < tiles
    slot = row * tiles + part
    # All loads first: behind a reduction, which is a barrier, each would wait for memory again.
    tile_max = tl.load(max_ptr + slot, mask=live, other=-float("inf"))
    tile_sum = tl.load(sum_ptr + slot, mask=live, other=0.0)
    if TOP:
        top_id = tl.load(top_ptr + slot, mask=live, other=2147483647)
    if ENTROPY:
        own = tl.load(entropy_ptr + slot, mask=live, other=0.0)
    if SAMPLE:
        score = tl.load(score_ptr + slot, mask=live, other=-float("inf"))
        pick_id = tl.load(pick_ptr + slot, mask=live, other=2147483647)
        pick_z = tl.load(pick_z_ptr + slot, mask=live, other=-float("inf"))
    maximum = tl.max(tl.max(tile_max, axis=0), axis=0)
    offset = tl.where(live, tile_max - maximum, 0.0)
    scale = fast_exp(offset)
    total = _sum_of_parts(tile_sum * scale, LINES, FOLDS, TILE, LEVELS)
    log_sum = tl.log(total)
    tl.store(out_max_ptr + row, maximum)
    tl.store(out_log_sum_ptr + row, log_sum)
    if TOP:
        top = _lowest_id(tile_max == maximum, top_id)
        tl.store(out_top_ptr + row, top.to(tl.int64))
    if ENTROPY:
        weighted = _sum_of_parts(tl.fma(offset, tile_sum, own) * scale, LINES, FOLDS, TILE, LEVELS)
        tl.store(out_entropy_ptr + row, log_sum - tl.div_rn(weighted, total))
    if TARGET:
        tl.store(log_prob_ptr + row, (tl.load(target_z_ptr + row) - maximum) - log_sum)
    if SAMPLE:
        greedy = tl.load(temperature_ptr + row) == 0.0
        pick = _lowest_id(score == tl.max(tl.max(score, axis=0), axis=0), pick_id)
        chosen = tl.max(tl.max(tl.where(pick_id == pick, pick_z, -float("inf")), axis=0), axis=0)
        log_prob = (tl.where(greedy, maximum, chosen) - maximum) - log_sum
        usable = tl.abs(log_prob) < float("inf")  # false for NaN
        tl.store(out_token_ptr + row, tl.where(usable, tl.where(greedy, top, pick), 0).to(tl.int64))
        tl.store(log_prob_ptr + row, tl.where(usable, log_prob, float("nan")))


@triton.jit
def _lowest_id(candidate, ids):
    return tl.min(tl.min(tl.where(candidate, ids, 2147483647), axis=0), axis=0)


@triton.jit
def _sum_of_parts(x, LINES: tl.constexpr, FOLDS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr):
    """[LINES, TILE] -> scalar: lines folded by halves, then lanes pairwise."""
    for fold in tl.static_range(FOLDS):
        upper, lower = tl.split(tl.permute(tl.reshape(x, (2, LINES >> (fold + 1), TILE)), (1, 2, 0)))
        x = upper + lower
    return tl.sum(pairwise_sum(x, 1, TILE, LEVELS), axis=0)  # of one element: no order


class Rows(NamedTuple):
    """What each row brings beside its hidden state: temperature float32; target, seed, position int64 or None."""

    temperature_T: Tensor
    target_T: Tensor | None
    seed_T: Tensor | None
    position_T: Tensor | None

    def part(self, rows: slice) -> Rows:
        return Rows(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


def slab_columns(rows: int, vocab: int) -> int:
    """Columns of one slab: whole groups of tiles, `_SLAB_ELEMENTS` logits at most."""
    unit = TILE * _GROUP
    elements = _SLAB_ELEMENTS if rows <= _LARGE_ROWS else _LARGE_SLAB_ELEMENTS
    return min(max(elements // rows // unit, 1) * unit, triton.cdiv(vocab, unit) * unit)


def parts_from_logits(logits_RC: Tensor, first: int, vocab: int, rows: Rows, parts: Parts) -> None:
    """Fill the parts of the tiles that a slab covers; `first` is a multiple of `TILE`."""
    count, width = logits_RC.shape
    _from_logits[(count, triton.cdiv(width, TILE * _GROUP))](
        logits_RC, rows.temperature_T, rows.target_T, rows.seed_T, rows.position_T,
        parts.max_RJ, parts.sum_RJ, parts.top_RJ, parts.entropy_RJ, parts.target_z_R,
        parts.score_RJ, parts.pick_RJ, parts.pick_z_RJ,
        first, width, vocab, parts.max_RJ.shape[1], logits_RC.stride(0),
        G=_GROUP, TILE=TILE, LEVELS=_LEVELS, EVEN=vocab % TILE == 0, TARGET=rows.target_T is not None,
        ENTROPY=parts.entropy_RJ is not None, TOP=parts.top_RJ is not None, SAMPLE=rows.seed_T is not None,
        num_warps=4, enable_fp_fusion=False, **launch(),
    )  # fmt: skip


def parts_by_slabs(
    hidden_TD: Tensor, weight_VD: Tensor, rows: Rows, parts: Parts, part: VocabularyPart | None = None
) -> None:
    """The schedule for many rows: one product per slab of the vocabulary, into one reused buffer."""
    count, width = hidden_TD.shape[0], weight_VD.shape[0]
    offset, vocab = (0, width) if part is None else (part.first, part.vocab_size)
    columns = slab_columns(count, width)
    buffer = torch.empty(count * min(columns, width), dtype=torch.float32, device=hidden_TD.device)
    for first in range(0, width, columns):
        slab = weight_VD[first : first + columns]
        logits = buffer[: count * slab.shape[0]].view(count, slab.shape[0])
        gemm(hidden_TD, slab, out_dtype=torch.float32, out=logits)
        parts_from_logits(logits, offset + first, vocab, rows, parts)


def parts_by_stream(
    hidden_TD: Tensor, weight_VD: Tensor, rows: Rows, parts: Parts, part: VocabularyPart | None = None
) -> None:
    """The schedule for few rows: the weights stream once, each tile's logits end in its program."""
    count, inner = hidden_TD.shape
    width, tiles = weight_VD.shape[0], parts.max_RJ.shape[1]
    first, vocab = (0, width) if part is None else (part.first // TILE, part.vocab_size)
    bm = min(max(triton.next_power_of_2(count), 16), 64)
    swap = bm < 64  # weights as the left operand of the matrix unit, which wants 64 rows there
    _from_weights[(triton.cdiv(count, bm), triton.cdiv(width, TILE))](
        hidden_TD, weight_VD, rows.temperature_T, rows.target_T, rows.seed_T, rows.position_T,
        parts.max_RJ, parts.sum_RJ, parts.top_RJ, parts.entropy_RJ, parts.target_z_R,
        parts.score_RJ, parts.pick_RJ, parts.pick_z_RJ,
        count, vocab, tiles, first, hidden_TD.stride(0), weight_VD.stride(0),
        K=inner, BM=bm, BK=128 if swap else 64, SWAP=swap, TILE=TILE, LEVELS=_LEVELS, EVEN=vocab % TILE == 0,
        TARGET=rows.target_T is not None, ENTROPY=parts.entropy_RJ is not None, TOP=parts.top_RJ is not None,
        SAMPLE=rows.seed_T is not None,
        num_warps=4, num_stages=3 if swap else 4, enable_fp_fusion=False, **launch(),
    )  # fmt: skip


def _merged(rows: Rows, parts: Parts, out: Results) -> None:
    count, tiles = parts.max_RJ.shape
    lines = triton.next_power_of_2(triton.cdiv(tiles, TILE))
    _merge[(count,)](
        rows.temperature_T, parts.max_RJ, parts.sum_RJ, parts.top_RJ, parts.entropy_RJ, parts.target_z_R,
        parts.score_RJ, parts.pick_RJ, parts.pick_z_RJ,
        out.log_prob_T, out.max_T, out.log_sum_T, out.entropy_T, out.top1_T, out.token_T,
        tiles, LINES=lines, FOLDS=lines.bit_length() - 1, TILE=TILE, LEVELS=_LEVELS,
        ENTROPY=out.entropy_T is not None, TARGET=rows.target_T is not None, TOP=out.top1_T is not None,
        SAMPLE=out.token_T is not None, num_warps=4, enable_fp_fusion=False, **launch(),
    )  # fmt: skip


def check(hidden_TD: Tensor, weight_VD: Tensor, rows: Rows) -> None:
    """Raise `ContractError` for dtypes and shapes that the head cannot serve."""
    if hidden_TD.dtype != torch.bfloat16 or weight_VD.dtype != torch.bfloat16:
        raise ContractError(
            f"head: hidden is {hidden_TD.dtype} and the weight {weight_VD.dtype}; on a GPU both must be torch.bfloat16"
        )
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ContractError(f"head: hidden {tuple(hidden_TD.shape)} does not fit the weight {tuple(weight_VD.shape)}")
    if hidden_TD.stride(1) != 1 or weight_VD.stride(1) != 1:
        raise ContractError("head: the last dimension of hidden and of the weight must be contiguous")
    if rows.temperature_T.dtype != torch.float32:
        raise ContractError(f"head: the temperature must be float32, got {rows.temperature_T.dtype}")
    for name, t in zip(Rows._fields, rows, strict=True):
        if t is not None and t.shape != hidden_TD.shape[:1]:
            raise ContractError(f"head: {name.removesuffix('_T')} has shape {tuple(t.shape)}, one per row is wanted")


def _fill_parts(
    hidden_TD: Tensor, weight_VD: Tensor, rows: Rows, parts: Parts, part: VocabularyPart | None = None
) -> Parts:
    """Parts of all tiles; with a part of the vocabulary, its own are computed here and the others gathered."""
    if weight_VD.shape[0]:
        fill = parts_by_stream if schedule_of(hidden_TD.shape[0]) == STREAM else parts_by_slabs
        fill(hidden_TD, weight_VD, rows, parts, part)
    return parts if part is None else _gather_parts(parts, rows, part)


def _gather_parts(parts: Parts, rows: Rows, part: VocabularyPart) -> Parts:
    """Every rank's tiles put together in ascending order, in one collective (two with a target): bits of one rank."""
    own = slice(part.shards.rank * part.tiles_per_rank, (part.shards.rank + 1) * part.tiles_per_rank)
    by_tile = {name: t for name, t in zip(Parts._fields, parts, strict=True) if name.endswith("_RJ") and t is not None}
    packed = torch.stack([t[:, own].view(torch.int32) for t in by_tile.values()])
    whole = part.gather_tiles(packed).unbind()
    found = {name: w.view(t.dtype) for (name, t), w in zip(by_tile.items(), whole, strict=True)}
    if parts.target_z_R is not None:
        assert rows.target_T is not None
        owner_1R = part.owner(rows.target_T)[None]
        found["target_z_R"] = part.shards.all(parts.target_z_R).gather(0, owner_1R)[0]
    return parts._replace(**found)


def token_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    *,
    with_entropy: bool = False,
    with_top1: bool = False,
    part: VocabularyPart | None = None,
) -> Results:
    """Log-probs of given tokens, no autograd (`head_backward` has the gradient).

    Args:
        hidden_TD: bfloat16 [T, D], final norm applied; weight_VD: bfloat16 [V, D], or the rows of `part`.
        target_T: int64 [T]; one outside the vocabulary gets NaN. temperature_T: float32 [T], 0 scores at temperature 1.

    Raises:
        ContractError: dtypes or shapes that do not fit.
    """
    everything = Rows(temperature_T.contiguous(), target_T.contiguous(), None, None)
    check(hidden_TD, weight_VD, everything)
    count, device = hidden_TD.shape[0], hidden_TD.device
    vocab = weight_VD.shape[0] if part is None else part.vocab_size
    out = _results(count, device, top1=with_top1, log_prob=True, entropy=with_entropy)
    for start in range(0, count, _CHUNK_ROWS):
        chunk = slice(start, min(start + _CHUNK_ROWS, count))
        rows, hidden = everything.part(chunk), hidden_TD[chunk]
        some = out.part(chunk)
        parts = _fill_parts(hidden, weight_VD, rows, _parts(hidden.shape[0], vocab, some, part), part)
        _merged(rows, parts, some)
    return out


def sample(
    hidden_BD: Tensor,
    weight_VD: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    *,
    part: VocabularyPart | None = None,
) -> Results:
    """Draw one token per row from the full vocabulary: argmax of z + Gumbel noise, ties to the lower id.

    A row without usable logits draws token 0, and its log-prob is NaN.

    Args:
        weight_VD: bfloat16 [V, D], or the rows of `part`.
        hidden_BD: bfloat16 [B, D]; temperature_B: float32 [B], 0 is greedy (log-prob at temperature 1).
        seed_B, position_B: int64 [B]; the draw is a function of them, the token id and z alone.

    Raises:
        ContractError: dtypes or shapes that do not fit.
    """
    rows = Rows(temperature_B.contiguous(), None, seed_B.contiguous(), position_B.contiguous())
    check(hidden_BD, weight_VD, rows)
    count, device = hidden_BD.shape[0], hidden_BD.device
    out = _results(count, device, top1=True, log_prob=True, token=True)
    if count:
        vocab = weight_VD.shape[0] if part is None else part.vocab_size
        parts = _fill_parts(hidden_BD, weight_VD, rows, _parts(count, vocab, out, part), part)
        _merged(rows, parts, out)
    return out


def log_sum_exp(logits_RV: Tensor, temperature_R: Tensor) -> Results:
    """max, log_sum and top-1 of float32 logits that are already there: same bits as `token_log_probs` gives."""
    count, vocab = logits_RV.shape
    rows = Rows(temperature_R.contiguous(), None, None, None)
    out = _results(count, logits_RV.device, top1=True)
    parts = _parts(count, vocab, out)
    parts_from_logits(logits_RV, 0, vocab, rows, parts)
    _merged(rows, parts, out)
    return out
