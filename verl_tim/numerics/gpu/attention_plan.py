"""Which query tiles and which key chunks a step's attention walks. Built once a step, shared by all layers.

A plan is a schedule: it changes no bit. From host lists it costs one copy to the device; from device tensors it is
built on the device without a synchronisation, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.attention_block import CHUNK
from verl_tim.numerics.gpu.overlap import begin, launch
from verl_tim.numerics.gpu.processor import multiprocessors

STATE_SLOTS = 2048
"""Chunk states that fit in the scratch of a decode; sequences beyond it are walked by one program each."""
MANY_PAIRS = 256
"""Pairs of sequence and kv head that fill the device without splitting."""
SHORT_CONTEXT = 1024
"""Keys up to which few pairs are split no more than the device needs."""


def tile_list(start_S: Tensor, length_S: Tensor, position_S: Tensor, extra_S: Tensor, rows: int, bound: int) -> Tensor:
    """Cut `length` rows of each sequence into tiles of `rows`, tiles with most keys first.

    Args: int64 [S] on one device: first row, number of rows, absolute position of the first row, and a number kept with
    every tile. `bound` >= the number of tiles.

    Returns:
        int32 [bound, 4]: (first row, live rows, position of the first row, extra); live rows 0 beyond the last tile.
    """
    count_S = (length_S + rows - 1) // rows
    end_S = count_S.cumsum(0)
    tile_N = torch.arange(bound, device=start_S.device)
    seq_N = torch.searchsorted(end_S, tile_N, right=True).clamp_(max=start_S.shape[0] - 1)
    offset_N = (tile_N - (end_S - count_S)[seq_N]) * rows
    live_N = (length_S[seq_N] - offset_N).clamp(0, rows)
    position_N = position_S[seq_N] + offset_N
    order_N = torch.where(live_N > 0, -(position_N + live_N), 1).argsort(stable=True)
    tiles_N4 = torch.stack([start_S[seq_N] + offset_N, live_N, position_N, extra_S[seq_N]], 1)
    return tiles_N4[order_N].to(torch.int32)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    if x.device.type == device.type:
        return x
    pinned = x.pin_memory() if device.type == "cuda" else x
    return pinned.to(device, non_blocking=True)


class PackedPlan:
    """Query and key tiles of packed sequences (the trainer).

    Args:
        lengths: rows of every sequence, known on the host. Or None, with
        cu_seqlens_S1: [S + 1] on the device, and num_rows, an upper bound on cu_seqlens[-1].

    Attributes:
        num_rows: rows in all sequences; None where the host does not know.
    """

    num_rows: int | None

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        *,
        device: torch.device | str,
        cu_seqlens_S1: Tensor | None = None,
        num_rows: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._tiles: dict[tuple[int, bool], Tensor] = {}
        if lengths is not None:
            if not lengths or min(lengths) < 1:
                raise ContractError(f"attention plan: every sequence needs at least one row, got {list(lengths)[:8]}")
            self._length_S = torch.tensor(lengths, dtype=torch.int64)
            self._start_S = self._length_S.cumsum(0) - self._length_S
            self._bound_rows = self.num_rows = int(self._length_S.sum())
        elif cu_seqlens_S1 is not None:
            bounds = cu_seqlens_S1.to(torch.int64)
            self._start_S, self._length_S, self._bound_rows = bounds[:-1], bounds.diff(), num_rows
            self.num_rows = None
        else:
            raise ContractError("attention plan: give lengths, or cu_seqlens_S1 with num_rows")

    def _bound(self, rows: int) -> int:
        if self._length_S.device.type == "cpu":
            return int(((self._length_S + rows - 1) // rows).sum())
        return self._bound_rows // rows + self._length_S.shape[0]

    def _get(self, rows: int, *, keys: bool) -> Tensor:
        if (rows, keys) not in self._tiles:
            zero_S = torch.zeros_like(self._length_S)
            tiles = tile_list(self._start_S, self._length_S, zero_S, self._length_S, rows, self._bound(rows))
            # a key tile is read by the queries behind it: most work first is the reverse order
            if keys:
                tiles = tiles[torch.where(tiles[:, 1] > 0, tiles[:, 2] - tiles[:, 3], 1).argsort(stable=True)]
            self._tiles[rows, keys] = _to_device(tiles, self._device)
        return self._tiles[rows, keys]

    def query_tiles(self, rows: int) -> Tensor:
        """int32 [N, 4]: (first row, live rows, position of the first row, rows of the sequence)."""
        return self._get(rows, keys=False)

    def key_tiles(self, rows: int) -> Tensor:
        """As `query_tiles`, ordered by the number of queries behind the tile."""
        return self._get(rows, keys=True)


@triton.jit
def _plan_decode(
    query_start_ptr,
    context_len_ptr,
    items_ptr,
    num_sequences,
    target_items,
    num_items,
    num_slots,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    seq = tl.arange(0, SEQUENCES)
    inside = seq < num_sequences
    start = tl.load(query_start_ptr + seq, mask=inside, other=0)
    stop = tl.load(query_start_ptr + seq + 1, mask=inside, other=0)
    context = tl.load(context_len_ptr + seq, mask=inside, other=0)
    decodes = inside & (stop - start == 1) & (context > 0)
    chunks = tl.where(decodes, (context + CHUNK - 1) // CHUNK, 0)
    wanted = tl.maximum(1, (tl.sum(chunks, 0) + target_items - 1) // target_items)  # chunks per item
    splits = tl.where(decodes, tl.maximum(1, (chunks + wanted // 2) // wanted), 0)
    slot_end = tl.cumsum(tl.where(splits > 1, chunks, 0), 0)
    splits = tl.where(slot_end <= num_slots, splits, tl.minimum(splits, 1))
    split = splits > 1
    slot = slot_end - chunks
    per_item = (chunks + splits - 1) // tl.maximum(splits, 1)
    splits = tl.where(decodes, (chunks + per_item - 1) // tl.maximum(per_item, 1), 0)
    end = tl.cumsum(splits, 0)
    first = end - splits
    for i in range(0, tl.max(splits, 0)):
        at = items_ptr + (first + i) * 8
        mine = i < splits
        chunk = i * per_item
        tl.store(at, seq, mask=mine)
        tl.store(at + 1, chunk, mask=mine)
        tl.store(at + 2, tl.minimum(per_item, chunks - chunk), mask=mine)
        tl.store(at + 3, tl.where(split, slot + chunk, -1), mask=mine)
        tl.store(at + 4, context, mask=mine)
        tl.store(at + 5, start, mask=mine)
        tl.store(at + 6, splits, mask=mine)
    rest = tl.arange(0, ITEMS)
    tl.store(items_ptr + rest * 8 + 2, rest * 0, mask=(rest >= tl.sum(splits, 0)) & (rest < num_items))


class WorkShape(NamedTuple):
    """How a decode step's attention is spread over a device."""

    waves: int
    """Programs wanted, in multiples of the multiprocessors."""
    stages: int
    """Loads in flight per program."""
    warps: int


def _shape_of_work(pairs: int, max_context: int) -> WorkShape:
    """The fastest shape for so many pairs of sequence and kv head, as measured on an H200.

    Many pairs need no splitting, and small programs, of which several share a multiprocessor, hide each other's loads.
    Few short ones are split only until every multiprocessor has one: a state to be merged costs more than a few blocks.
    Few long ones want more programs at a time, which fewer loads in flight leave room for.
    """
    if pairs >= MANY_PAIRS:
        return WorkShape(4, stages=2, warps=2)
    if max_context > SHORT_CONTEXT:
        return WorkShape(16, stages=2, warps=4)
    return WorkShape(1, stages=3, warps=4)


class DecodePlan:
    """Work of the sequences with one query row. Lives on the device; `refresh` is one small kernel.

    Sequences are cut into runs of whole chunks so that all multiprocessors have work and no more: a few long
    sequences give one program per chunk, many give one program per sequence, which then needs no merge.

    Attributes:
        items_W8: int32 (sequence, first chunk, chunks, first state slot or -1 where one program walks it all, context
            length, query row, items of the sequence, unused). Chunks 0: an empty item.
        arrived: int32, zeros between calls: finished items per sequence and kv head.
        num_slots: state slots of the scratch.
        stages, warps: of every program (`WorkShape`).

    Args:
        max_context: bound on the context lengths.
    """

    def __init__(
        self,
        num_sequences: int,
        num_kv_heads: int,
        device: torch.device | str,
        num_slots: int = STATE_SLOTS,
        target_items: int | None = None,
        max_context: int = 1 << 30,
    ) -> None:
        device = torch.device(device)
        self.num_sequences = num_sequences
        self.num_slots = num_slots
        waves, self.stages, self.warps = _shape_of_work(num_sequences * num_kv_heads, max_context)
        self._target = target_items or max(1, waves * multiprocessors(device) // num_kv_heads)
        self.items_W8 = torch.empty(num_sequences + self._target, 8, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(num_sequences * num_kv_heads, dtype=torch.int32, device=device)

    def refresh(self, query_start_S1: Tensor, context_len_S: Tensor) -> None:
        """Read this step's lengths (int32 [S + 1], [S], on the device)."""
        if context_len_S.shape[0] != self.num_sequences or query_start_S1.shape[0] != self.num_sequences + 1:
            raise ContractError(
                f"decode plan: built for {self.num_sequences} sequences, got {context_len_S.shape[0]} context lengths "
                f"and {query_start_S1.shape[0]} query starts"
            )
        items = self.items_W8.shape[0]
        _plan_decode[(1,)](
            query_start_S1,
            context_len_S,
            self.items_W8,
            self.num_sequences,
            self._target,
            items,
            self.num_slots,
            SEQUENCES=triton.next_power_of_2(self.num_sequences),
            ITEMS=triton.next_power_of_2(items),
            **launch(),
        )


class PagedPlan:
    """A step of the engine: decodes (one query row) and prefill chunks, in any mixture.

    Args:
        query_start_S1, context_len_S: int32 on the device, as `paged_forward` takes them.
        num_kv_heads: of the model.
        query_lens, context_lens: the same on the host, where known: an exact list of tiles. Otherwise the list is
            built on the device with room for `num_rows` rows.
        max_query_len: 1 promises a step of decodes only.
        max_context_len: bound on the context lengths.
        split_decodes: False where a device does not keep the order of the decode kernel: decodes are tiles, too.
    """

    def __init__(
        self,
        query_start_S1: Tensor,
        context_len_S: Tensor,
        *,
        num_kv_heads: int,
        num_rows: int,
        max_query_len: int,
        max_context_len: int = 1 << 30,
        query_lens: Sequence[int] | None = None,
        context_lens: Sequence[int] | None = None,
        split_decodes: bool = True,
    ) -> None:
        self._query_start_S1, self._context_len_S = query_start_S1, context_len_S
        self._device = context_len_S.device
        self._num_rows, self._max_query_len = num_rows, max_query_len
        self._lens = None
        if query_lens is not None and context_lens is not None:
            self._lens = (list(query_lens), list(context_lens))
        self._tiles: dict[int, Tensor | None] = {}
        self._fewest_rows = 2 if split_decodes else 1  # of a sequence that is cut into tiles
        self.decode: DecodePlan | None = None
        if split_decodes and (self._lens is None or min(self._lens[0]) == 1):
            self.decode = DecodePlan(context_len_S.shape[0], num_kv_heads, self._device, max_context=max_context_len)
            self.decode.refresh(query_start_S1, context_len_S)

    def query_tiles(self, rows: int) -> Tensor | None:
        """int32 [N, 4] tiles of the sequences that `decode` does not take: (first row, live rows, position of the
        first row, sequence); None when there are none."""
        if rows not in self._tiles:
            self._tiles[rows] = self._build(rows)
        return self._tiles[rows]

    def _build(self, rows: int) -> Tensor | None:
        if self._max_query_len < self._fewest_rows:
            return None
        if self._lens is None:
            bounds = self._query_start_S1.to(torch.int64)
            start, length, context = bounds[:-1], bounds.diff(), self._context_len_S.to(torch.int64)
            bound = self._num_rows // rows + length.shape[0]
        else:
            length, context = (torch.tensor(x, dtype=torch.int64) for x in self._lens)
            start = length.cumsum(0) - length
            bound = int(torch.where(length >= self._fewest_rows, (length + rows - 1) // rows, 0).sum())
            if bound == 0:
                return None
        live = torch.where((length >= self._fewest_rows) & (context > 0), length, 0)
        sequence = torch.arange(length.shape[0], device=length.device)
        tiles = tile_list(start, live, context - length, sequence, rows, bound)
        return tiles if self._lens is None else _to_device(tiles, self._device)
