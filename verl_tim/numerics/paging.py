"""How a step's sequences lie in rows and pages, and how they are grouped into a few dense problems.

Grouping is a schedule: it never changes a bit. Decodes (one query row) are kept apart from prefills, so that one long
prefill chunk does not pad every decode; within a kind, sequences whose number of key blocks differs by more than two
times go to different groups when the padding saved is worth the extra calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_tim.numerics.contract import KEY_BLOCK, ContractError, ceil_to, on_gpu

_WORTH_SPLITTING = 128  # query-blocks of padding that cost about as much as one more group of calls
_GROUP_KEYS = 1 << 13  # keys gathered per group: its float32 keys and values stay in the cache
_CACHED_BIAS = 1 << 20  # elements of mask kept per group; larger masks are rebuilt per tile


class SequenceGroup:
    """Sequences handled by one dense call: `size` sequences of up to `queries` rows over `keys` keys.

    Args:
        starts: first row of each sequence in the packed rows.
        query_lens, context_lens: rows of this step, and keys visible at its end (cached + new).
        pages: (block_table [S, M] for these sequences, page_size), or None when keys lie in the packed rows themselves.
    """

    def __init__(
        self,
        starts: Sequence[int],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
        pages: tuple[Tensor, int] | None = None,
    ) -> None:
        self.size = len(starts)
        self.queries = max(query_lens)
        self.keys = ceil_to(max(context_lens), KEY_BLOCK)
        self._query_lens, self._context_lens = list(query_lens), list(context_lens)
        start_N = torch.tensor(starts, device=device)
        query_len_N = torch.tensor(query_lens, device=device)
        context_len_N = torch.tensor(context_lens, device=device)

        # Padded query slots repeat the sequence's last row: finite, and never written back.
        query_NQ = torch.minimum(torch.arange(self.queries, device=device), query_len_N[:, None] - 1)
        self.query_mask = torch.arange(self.queries, device=device) < query_len_N[:, None]
        self._rows = (start_N[:, None] + query_NQ).view(-1)
        self._position_NQ = (context_len_N - query_len_N)[:, None] + query_NQ
        self._contiguous = self.queries == 1 and list(starts) == list(range(starts[0], starts[0] + self.size))
        self._first_row = starts[0]
        self._all_live = min(query_lens) == self.queries
        self._live = None if self._all_live else self.query_mask.view(-1).nonzero().view(-1)
        self._live_rows = self._rows if self._live is None else self._rows[self._live]

        key_K = torch.arange(self.keys, device=device)
        visible_NK = key_K < context_len_N[:, None]
        self._live_keys: Tensor | None = None
        if pages is None:
            slot_NK = start_N[:, None] + key_K
            self._live_keys = visible_NK.view(-1).nonzero().view(-1)
            fallback = start_N[:, None]  # any finite row
        else:
            table_NM, page_size = pages
            page_NK = table_NM.gather(1, (key_K // page_size).clamp(max=table_NM.shape[1] - 1).expand(self.size, -1))
            slot_NK = page_NK * page_size + key_K % page_size
            # The null page: masked keys never read another sequence's slot, whose values might not be finite.
            fallback = torch.zeros_like(start_N)[:, None]
        self.key_slots = torch.where(visible_NK, slot_NK, fallback).view(-1)
        self._key_K = key_K
        self._bias: Tensor | None = None
        if self.size * self.queries * self.keys <= _CACHED_BIAS:
            self._bias = self._mask(0, self.queries, self.keys)

    def max_position(self, query: int) -> int:
        """Largest absolute position among the sequences' rows 0..query."""
        return max(
            context - length + min(query, length - 1)
            for context, length in zip(self._context_lens, self._query_lens, strict=True)
        )

    def _mask(self, first: int, last: int, keys: int) -> Tensor:
        hidden = self._key_K[:keys] > self._position_NQ[:, first:last, None]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)

    def bias(self, first: int, last: int, keys: int) -> Tensor:
        """float32 [N, last - first, keys]: 0 where the key is visible to the row, -inf elsewhere."""
        if self._bias is None:
            return self._mask(first, last, keys)
        return self._bias[:, first:last, :keys]

    def take_rows(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [N, Q, ...] of this group's rows."""
        if self._contiguous:
            return x_T[self._first_row : self._first_row + self.size].unsqueeze(1)
        return x_T.index_select(0, self._rows).view(self.size, self.queries, *x_T.shape[1:])

    def put_rows(self, out_T: Tensor, x_NQ: Tensor) -> None:
        """Write the live rows of [N, Q, ...] back into [T, ...]."""
        if self._contiguous:
            out_T[self._first_row : self._first_row + self.size] = x_NQ[:, 0]
            return
        x = x_NQ.flatten(0, 1)
        out_T.index_copy_(0, self._live_rows, x if self._live is None else x.index_select(0, self._live))

    def take_keys(self, x_T: Tensor) -> Tensor:
        """Keys or values in packed rows [T, ...] -> [N, K, ...]."""
        return x_T.index_select(0, self.key_slots).view(self.size, self.keys, *x_T.shape[1:])

    def put_keys(self, out_T: Tensor, x_NK: Tensor) -> None:
        """Write gradients of the visible keys [N, K, ...] back into packed rows [T, ...]."""
        if self._live_keys is None:
            raise ContractError("attention: gradients exist for packed keys only, not for paged ones")
        x = x_NK.flatten(0, 1).index_select(0, self._live_keys)
        out_T.index_copy_(0, self.key_slots[self._live_keys], x.to(out_T.dtype))


def _partition(query_lens: Sequence[int], context_lens: Sequence[int]) -> list[list[int]]:
    """Indices of each group: one kind of work each, key blocks within two times where splitting pays."""
    groups: list[list[int]] = []
    for is_decode in (True, False):
        members = [i for i, length in enumerate(query_lens) if (length == 1) == is_decode]
        members.sort(key=lambda i: -context_lens[i])
        while members:
            largest = -(-context_lens[members[0]] // KEY_BLOCK)
            cut = next(
                (p for p, i in enumerate(members) if -(-context_lens[i] // KEY_BLOCK) * 2 < largest), len(members)
            )
            rest = len(members) - cut
            rows = 1 if is_decode else max(query_lens[i] for i in members)
            if rest and rest * rows * largest // 2 < _WORTH_SPLITTING:
                cut = len(members)
            cut = min(cut, max(1, _GROUP_KEYS // (largest * KEY_BLOCK)))
            groups.append(sorted(members[:cut]))
            members = members[cut:]
    return groups


def group_sequences(
    starts: Sequence[int],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    device: torch.device,
    pages: tuple[Tensor, int] | None = None,
) -> list[SequenceGroup]:
    """Partition sequences into `SequenceGroup`s. Arguments as there, for all sequences."""
    groups = []
    for members in _partition(query_lens, context_lens):
        table = None
        if pages is not None:
            block_table_SM, page_size = pages
            whole = len(members) == len(starts)
            rows = block_table_SM if whole else block_table_SM[torch.tensor(members, device=device)]
            table = (rows, page_size)
        groups.append(
            SequenceGroup(
                [starts[i] for i in members],
                [query_lens[i] for i in members],
                [context_lens[i] for i in members],
                device,
                table,
            )
        )
    return groups


@dataclass
class GpuLayout:
    """What GPU schedules read of a batch: int32 tensors on the device, and the same lengths on the host."""

    query_start_S1: Tensor
    context_len_S: Tensor
    block_table_SM: Tensor
    query_lens: list[int] | None  # None: known on the device only
    context_lens: list[int] | None
    plan: Any = None  # that of a GPU schedule, made by it


@dataclass(frozen=True)
class StagedLayout:
    """A batch's tensors that the caller already copied to the device: query_start, context_len and block_table int32,
    slot and position int64."""

    query_start_S1: Tensor
    context_len_S: Tensor
    block_table_SM: Tensor
    slot_T: Tensor
    position_T: Tensor


@dataclass
class PagedBatch:
    """A step's rows and where their keys and values live. Built once a step; the plan is cached for all layers.

    Made from CPU tensors, since the step is planned on the host; they are then moved to `device`, once, unless `staged`
    holds them.

    Fields (all int64): query_start_S1 [S + 1] offsets into the token rows, rows beyond query_start[-1] are
    inert padding; context_len_S [S] keys visible after this step (cached + new); block_table_SM [S, M] page ids, padded
    with 0, the null page; slot_T [T] page * page_size + offset of each row's key and value (padding rows: a slot of
    page 0); position_T [T] absolute positions.

    Raises `ContractError` when the fields do not fit together.
    """

    query_start_S1: Tensor
    context_len_S: Tensor
    block_table_SM: Tensor
    slot_T: Tensor
    position_T: Tensor
    device: torch.device = field(default=torch.device("cpu"))
    staged: StagedLayout | None = None
    num_rows: int = field(init=False)
    max_query: int = field(init=False)
    max_context: int = field(init=False)
    gpu: GpuLayout | None = field(init=False, default=None)
    _groups: dict[int, list[SequenceGroup]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.query_start_S1.device.type != "cpu":
            raise ContractError("paged batch: give CPU tensors and device=, so that planning waits for no device")
        bounds, contexts = self.query_start_S1.tolist(), self.context_len_S.tolist()
        self._starts = bounds[:-1]
        self._query_lens = [b - a for a, b in itertools.pairwise(bounds)]
        self._contexts = contexts
        if len(contexts) != len(self._query_lens) or self.block_table_SM.shape[0] != len(contexts) or not contexts:
            raise ContractError(
                f"paged batch: {len(self._query_lens)} sequences in query_start, {len(contexts)} in context_len, "
                f"{self.block_table_SM.shape[0]} rows in block_table; all three must agree and be at least 1"
            )
        if bounds[0] != 0 or min(self._query_lens) < 1:
            raise ContractError("paged batch: query_start must begin at 0 and every sequence needs at least one row")
        if any(context < length for context, length in zip(contexts, self._query_lens, strict=True)):
            raise ContractError(
                "paged batch: context_len counts this step's rows too, so it cannot be below their number"
            )
        if self.slot_T.shape != self.position_T.shape or self.slot_T.shape[0] < bounds[-1]:
            raise ContractError(
                f"paged batch: slot {tuple(self.slot_T.shape)} and position {tuple(self.position_T.shape)} must cover "
                f"the same rows, at least {bounds[-1]}"
            )
        self.num_rows = bounds[-1]
        self.max_query = max(self._query_lens)
        self.max_context = max(contexts)
        if on_gpu(self.device):
            self._move()

    def _move(self) -> None:
        if self.staged is not None:
            there = self.staged
            self.gpu = GpuLayout(
                there.query_start_S1, there.context_len_S, there.block_table_SM, self._query_lens, self._contexts
            )
            self.slot_T, self.position_T = there.slot_T, there.position_T
            return
        self.gpu = GpuLayout(
            self.query_start_S1.to(self.device, torch.int32),
            self.context_len_S.to(self.device, torch.int32),
            self.block_table_SM.to(self.device, torch.int32),
            self._query_lens,
            self._contexts,
        )
        self.slot_T, self.position_T = self.slot_T.to(self.device), self.position_T.to(self.device)

    def groups(self, page_size: int) -> list[SequenceGroup]:
        """The dense problems of this step for a cache of `page_size`."""
        if page_size not in self._groups:
            if self.block_table_SM.shape[1] * page_size < self.max_context:
                raise ContractError(
                    f"paged batch: block_table has {self.block_table_SM.shape[1]} pages of {page_size} per sequence, "
                    f"too few for a context of {self.max_context}"
                )
            self._groups[page_size] = group_sequences(
                self._starts,
                self._query_lens,
                self._contexts,
                device=self.device,
                pages=(self.block_table_SM.to(self.device), page_size),
            )
        return self._groups[page_size]


class DecodeBatch:
    """A step of one row per sequence whose layout only the device knows, for a forward that a CUDA graph replays.

    Stands where a `PagedBatch` does. Rows and sequences are the same thing; padding is by sequences of one key in the
    null page, which are inert. Nothing here reads a value back.

    Args:
        position_T: int64 [T], absolute position of each row.
        slot_T: int64 [T], page * page_size + offset of each row's key and value.
        context_len_T: int32 [T], keys visible: position + 1.
        block_table_TM: int32 [T, M]; behind a sequence's pages any page number.
        query_start_T1: int32 [T + 1], 0..T.
        page_size: tokens per page.
        max_context: upper bound on the contexts, on the host.
    """

    max_query = 1

    def __init__(
        self,
        *,
        position_T: Tensor,
        slot_T: Tensor,
        context_len_T: Tensor,
        block_table_TM: Tensor,
        query_start_T1: Tensor,
        page_size: int,
        max_context: int,
    ) -> None:
        rows = position_T.shape[0]
        if block_table_TM.shape[0] != rows or block_table_TM.shape[1] * page_size < max_context:
            raise ContractError(
                f"decode batch: block_table {tuple(block_table_TM.shape)} with pages of {page_size} does not cover "
                f"{rows} rows of up to {max_context} keys"
            )
        self.num_rows, self.max_context = rows, max_context
        self.position_T, self.slot_T = position_T, slot_T
        self.gpu = GpuLayout(query_start_T1, context_len_T, block_table_TM, None, None)
        self._page_size = page_size

    def groups(self, page_size: int) -> list[SequenceGroup]:
        """The dense problems of the CPU schedule, which reads the lengths."""
        if page_size != self._page_size:
            raise ContractError(f"decode batch: made for pages of {self._page_size}, the cache has {page_size}")
        contexts = self.gpu.context_len_S.tolist()
        return group_sequences(
            list(range(self.num_rows)),
            [1] * self.num_rows,
            contexts,
            device=self.position_T.device,
            pages=(self.gpu.block_table_SM.to(torch.int64), page_size),
        )
