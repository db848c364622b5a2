"""Dispatch: the (token, slot) pairs sorted by expert, on the device, without a host synchronisation.

The order within an expert is that of the pairs, so that it is the same however the sort is done. For decode sizes one
kernel does it all (rank of a pair = pairs of lower experts + earlier pairs of its own); larger ones take torch's sort.
The row tiles of the grouped GEMM's decode schedule are laid out here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError, ceil_to
from verl_tim.numerics.gpu.overlap import begin, launch

COUNTED_PAIRS = 8192
"""Up to this many pairs the counting kernel is used."""
_PAIRS = 16  # ranked per program
_CHUNK = 2048  # pairs compared with them at once


@dataclass(frozen=True)
class Tiles:
    """Row tiles of `block` rows that do not cross experts: expert_M (-1: unused) and row_M, int32 [M] on the device."""

    block: int
    expert_M: Tensor
    row_M: Tensor


@dataclass(frozen=True)
class Dispatch:
    """Where each (token, slot) pair lies among the dispatched rows. All int32, on the device.

    row_TK [T, K]: dispatched row of each pair. pair_R [R]: the pair (token * K + slot) at each dispatched row, R = T K.
    end_E [E]: end of each expert's rows, the offsets of `torch._grouped_mm`. tiles: for the decode schedule, or None.
    """

    row_TK: Tensor
    pair_R: Tensor
    end_E: Tensor
    tiles: Tiles | None

    @property
    def num_rows(self) -> int:
        return self.pair_R.shape[0]

    def gather(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [R, D]: each token's row copied to its experts' rows."""
        return x_TD.index_select(0, self.pair_R // self.row_TK.shape[1])


@triton.jit
def _store_tiles(end_E, count_E, tile_expert, tile_row, tiles, expert_E, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    tiles_E = (count_E + BLOCK - 1) // BLOCK
    tile_end_E = tl.cumsum(tiles_E, axis=0)
    first_E = tile_end_E - tiles_E
    for tile in range(0, tl.max(tiles_E, axis=0)):
        tl.store(tile_expert + first_E + tile, expert_E, mask=tile < tiles_E)
        tl.store(tile_row + first_E + tile, end_E - count_E + tile * BLOCK, mask=tile < tiles_E)
    for start in range(0, tiles, CHUNK):
        tile_M = start + tl.arange(0, CHUNK)
        unused = (tile_M >= tl.max(tile_end_E, axis=0)) & (tile_M < tiles)
        tl.store(tile_expert + tile_M, tl.full([CHUNK], -1, tl.int32), mask=unused)


@triton.jit(do_not_specialize=["tiles"])  # behind a bound that only the device knows: compiles nothing better
def _count(
    expert, row, pair, end, tile_expert, tile_row, pairs, tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ALL: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs 0..n-2 rank `PAIRS` pairs each; the last one counts the experts' rows and lays out the tiles."""
    begin(OVERLAP)
    other_A = tl.arange(0, ALL)
    program = tl.program_id(0)
    if program < tl.num_programs(0) - 1:
        mine_P = program * PAIRS + tl.arange(0, PAIRS)
        live_P = mine_P < pairs
        key_P = tl.load(expert + mine_P, mask=live_P, other=BINS) * pairs + mine_P
        rank_P = tl.zeros([PAIRS], tl.int32)
        for start in range(0, pairs, ALL):
            there_A = start + other_A < pairs
            key_A = tl.load(expert + start + other_A, mask=there_A, other=BINS) * pairs + start + other_A
            rank_P += tl.sum((key_A[None, :] < key_P[:, None]).to(tl.int32), axis=1)
        tl.store(row + mine_P, rank_P, mask=live_P)
        tl.store(pair + rank_P, mine_P, mask=live_P)
    else:
        expert_E = tl.arange(0, BINS)
        count_E = tl.zeros([BINS], tl.int32)
        for start in range(0, pairs, ALL):
            there_A = start + other_A < pairs
            expert_A = tl.load(expert + start + other_A, mask=there_A, other=0)
            count_E += tl.histogram(expert_A, BINS, mask=there_A)
        end_E = tl.cumsum(count_E, axis=0)
        tl.store(end + expert_E, end_E, mask=expert_E < EXPERTS)
        if BLOCK > 0:
            _store_tiles(end_E, count_E, tile_expert, tile_row, tiles, expert_E, BLOCK, CHUNK)


@triton.jit(do_not_specialize=["tiles"])
def _lay_out(
    end, tile_expert, tile_row, tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    expert_E = tl.arange(0, BINS)
    last = tl.load(end + EXPERTS - 1)
    end_E = tl.load(end + expert_E, mask=expert_E < EXPERTS, other=0)
    end_E = tl.where(expert_E < EXPERTS, end_E, last)
    before = (expert_E > 0) & (expert_E <= EXPERTS)
    start_E = tl.load(end + expert_E - 1, mask=before, other=0)
    start_E = tl.where(expert_E > EXPERTS, last, start_E)
    _store_tiles(end_E, end_E - start_E, tile_expert, tile_row, tiles, expert_E, BLOCK, CHUNK)


def _empty_tiles(rows: int, num_experts: int, block: int, device: torch.device) -> Tiles:
    # every touched expert may have one partly filled tile
    bound = min(rows, num_experts) + rows // block
    # rows of whole 16 bytes: pointers that are aligned for one bound and not for the next would be kernels of their own
    table = torch.empty(2, ceil_to(bound, 4), dtype=torch.int32, device=device)[:, :bound]
    return Tiles(block, table[0], table[1])


def lay_out_tiles(end_E: Tensor, rows: int, block: int) -> Tiles:
    """`Tiles` of `block` rows for `rows` dispatched rows with the given ends."""
    num_experts = end_E.shape[0]
    tiles = _empty_tiles(rows, num_experts, block, end_E.device)
    _lay_out[(1,)](
        end_E, tiles.expert_M, tiles.row_M, tiles.expert_M.shape[0], EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1), BLOCK=block, CHUNK=512, num_warps=8,
        **launch(),
    )  # fmt: skip
    return tiles


def dispatch(expert_TK: Tensor, num_experts: int, block: int | None = None) -> Dispatch:
    """Sort the pairs of int32 expert_TK [T, K], T >= 1, by expert; lay out tiles of `block` rows when one is given."""
    pairs, device = expert_TK.numel(), expert_TK.device
    if expert_TK.dtype != torch.int32 or not expert_TK.is_contiguous():
        raise ContractError(f"dispatch: expert_TK is {expert_TK.dtype}; it must be int32 and contiguous")
    if pairs > COUNTED_PAIRS:
        return _sorted(expert_TK, num_experts, block)
    row_TK, pair_R = torch.empty_like(expert_TK), torch.empty(pairs, dtype=torch.int32, device=device)
    end_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    tiles = None if block is None else _empty_tiles(pairs, num_experts, block, device)
    _count[(triton.cdiv(pairs, _PAIRS) + 1,)](
        expert_TK, row_TK, pair_R, end_E, tiles and tiles.expert_M, tiles and tiles.row_M, pairs,
        tiles.expert_M.shape[0] if tiles else 0, EXPERTS=num_experts, BINS=triton.next_power_of_2(num_experts),
        ALL=min(_CHUNK, max(128, triton.next_power_of_2(pairs))), PAIRS=_PAIRS, BLOCK=block or 0, CHUNK=512,
        num_warps=8, **launch(),
    )  # fmt: skip
    return Dispatch(row_TK, pair_R, end_E, tiles)


def _sorted(expert_TK: Tensor, num_experts: int, block: int | None) -> Dispatch:
    flat, device = expert_TK.view(-1), expert_TK.device
    # fewer key bits are fewer passes of the radix sort
    keys = flat.to(torch.uint8) if num_experts <= 256 else flat
    ranked, order = keys.sort(stable=True)
    rows = torch.arange(flat.numel(), dtype=torch.int32, device=device)
    row = torch.empty_like(flat).scatter_(0, order, rows)
    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    end_E = torch.searchsorted(ranked.to(torch.int32), experts, right=True, out_int32=True)
    tiles = None if block is None else lay_out_tiles(end_E, flat.numel(), block)
    return Dispatch(row.view(expert_TK.shape), order.to(torch.int32), end_E, tiles)
