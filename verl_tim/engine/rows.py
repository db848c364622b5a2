"""The running sequences as a table: one row (slot) per sequence, one array per column.

Everything a step needs of its sequences is read by indexing these arrays with a vector of slots, so that a step's host
work is a fixed number of array operations and not a loop over sequences, tokens or pages.

Shape suffixes: S slots, L token positions, M pages per sequence, K stop tokens, B the sequences at hand.

What one sequence brings may not cost the others: a column as wide as the longest list of stop tokens would be looked
through for every sequence in every step, so that what does not fit into a few columns is kept apart.
"""

from __future__ import annotations

import numpy as np

from verl_tim.engine.core import Drawn, Request, RequestState

_STOPS = 8  # columns of stop tokens
_RECORD = ("log_prob_SL", "kept_mass_SL", "top1_SL", "version_SL")


class RowTable:
    """Columns of the running sequences.

    Args:
        max_num_seqs: number of slots.
        max_model_len: longest sequence.
        page_size: tokens per page.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
        self.max_model_len = max_model_len
        self.page_size = page_size
        slots = max_num_seqs
        self.requests: list[Request | None] = [None] * slots
        self.order = np.empty(0, np.int64)  # slots in use, oldest request first
        self._free_slots = list(range(slots - 1, -1, -1))

        self.num_tokens_S = np.zeros(slots, np.int64)  # prompt and drawn
        self.num_pending_S = np.zeros(slots, np.int64)  # of those, drawn by launched steps whose results are not here
        self.num_computed_S = np.zeros(slots, np.int64)  # of all, with KV in the pool
        self.tenancy_S = np.zeros(slots, np.int64)  # changes whenever another sequence takes the slot, or none
        self.prompt_len_S = np.zeros(slots, np.int64)
        self.max_total_S = np.zeros(slots, np.int64)
        self.num_pages_S = np.zeros(slots, np.int64)
        self.page_SM = np.zeros((slots, -(-max_model_len // page_size)), np.int64)

        self.temperature_S = np.zeros(slots, np.float32)
        self.top_k_S = np.zeros(slots, np.int64)
        self.top_p_S = np.zeros(slots, np.float32)
        self.min_p_S = np.zeros(slots, np.float32)
        self.seed_S = np.zeros(slots, np.int64)
        self.stop_SK = np.full((slots, _STOPS), -1, np.int32)
        self._more_stops: dict[int, frozenset[int]] = {}  # by slot, of sequences with more than the columns hold

        # By absolute position; the record columns are set from prompt_len on. Grown by doubling, up to max_model_len.
        capacity = min(max_model_len, 256)
        self.token_SL = np.zeros((slots, capacity), np.int32)
        self.log_prob_SL = np.zeros((slots, capacity), np.float32)
        self.kept_mass_SL = np.zeros((slots, capacity), np.float32)
        self.top1_SL = np.zeros((slots, capacity), np.int32)
        self.version_SL = np.zeros((slots, capacity), np.int64)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def load(self, request: Request, pages: np.ndarray, num_computed: int) -> int:
        """Put ``request`` into a free slot, as the youngest; its first ``num_computed`` tokens have KV in ``pages``."""
        assert request.state is RequestState.RUNNING
        slot = self._free_slots.pop()
        params, drawn, prompt_len = request.params, request.drawn, request.prompt_len
        total = prompt_len + len(drawn)
        assert 0 <= num_computed < total <= len(pages) * self.page_size
        assert len(self.order) == 0 or self._arrival(int(self.order[-1])) < request.arrival, (
            "rows are not in arrival order"
        )
        self._grow(total)
        self.requests[slot] = request
        self.order = np.append(self.order, slot)
        self.tenancy_S[slot] += 1
        self.num_tokens_S[slot] = total
        self.num_pending_S[slot] = 0
        self.num_computed_S[slot] = num_computed
        self.prompt_len_S[slot] = prompt_len
        self.max_total_S[slot] = request.max_total
        self.num_pages_S[slot] = len(pages)
        self.page_SM[slot, : len(pages)] = pages
        self.temperature_S[slot] = params.temperature
        self.top_k_S[slot] = params.top_k
        self.top_p_S[slot] = params.top_p
        self.min_p_S[slot] = params.min_p
        self.seed_S[slot] = request.seed
        few, more = request.stop_ids[:_STOPS], request.stop_ids[_STOPS:]
        self.stop_SK[slot] = -1
        self.stop_SK[slot, : len(few)] = few
        if more:
            self._more_stops[slot] = frozenset(more)
        self.token_SL[slot, :prompt_len] = request.prompt_P
        self.token_SL[slot, prompt_len:total] = drawn.token_N
        self.log_prob_SL[slot, prompt_len:total] = drawn.log_prob_N
        self.kept_mass_SL[slot, prompt_len:total] = drawn.kept_mass_N
        self.top1_SL[slot, prompt_len:total] = drawn.top1_N
        self.version_SL[slot, prompt_len:total] = drawn.version_N
        request.drawn = Drawn.none()  # the row owns the record now
        return slot

    def unload(self, slots_B: np.ndarray) -> list[tuple[Request, np.ndarray]]:
        """Take the sequences in ``slots_B`` out; each gets its record back. Returns them with the pages they own.

        Tokens whose values are not here yet are no part of the record: their steps' results find another tenancy.
        """
        taken = []
        for slot in slots_B.tolist():
            request = self.requests[slot]
            assert request is not None
            assert request.state is RequestState.RUNNING
            drawn = slice(int(self.prompt_len_S[slot]), int(self.num_tokens_S[slot] - self.num_pending_S[slot]))
            request.drawn = Drawn(
                self.token_SL[slot, drawn].copy(),
                self.log_prob_SL[slot, drawn].copy(),
                self.kept_mass_SL[slot, drawn].copy(),
                self.top1_SL[slot, drawn].copy(),
                self.version_SL[slot, drawn].copy(),
            )
            pages = self.page_SM[slot, : self.num_pages_S[slot]].copy()
            self.page_SM[slot, : len(pages)] = 0
            self.num_pages_S[slot] = 0
            self.requests[slot] = None
            self._more_stops.pop(slot, None)
            self.tenancy_S[slot] += 1
            self.num_pending_S[slot] = 0
            self._free_slots.append(slot)
            taken.append((request, pages))
        self.order = self.order[~np.isin(self.order, slots_B)]
        return taken

    def add_pages(self, slots_B: np.ndarray, count_B: np.ndarray, pages: np.ndarray) -> None:
        """Append ``count_B[i]`` of ``pages``, in order, to the block table of ``slots_B[i]``."""
        starts_B = np.cumsum(count_B) - count_B
        slot_per_page = np.repeat(slots_B, count_B)
        column = np.arange(len(pages)) - np.repeat(starts_B - self.num_pages_S[slots_B], count_B)
        self.page_SM[slot_per_page, column] = pages
        self.num_pages_S[slots_B] += count_B

    def expect(self, slots_B: np.ndarray) -> None:
        """Make room for one token per slot that a launched step draws; :meth:`record` brings the values."""
        assert (self.num_tokens_S[slots_B] < self.max_total_S[slots_B]).all(), "a sequence drew more than it may"
        self.num_tokens_S[slots_B] += 1
        self.num_pending_S[slots_B] += 1
        self._grow(int(self.num_tokens_S[slots_B].max()))

    def record(
        self,
        slots_B: np.ndarray,
        token_B: np.ndarray,
        log_prob_B: np.ndarray,
        kept_mass_B: np.ndarray,
        top1_B: np.ndarray,
        version: int,
    ) -> None:
        """The values of the oldest expected token of each slot."""
        assert (self.num_pending_S[slots_B] > 0).all(), "a token that no step was to draw"
        at_B = self.num_tokens_S[slots_B] - self.num_pending_S[slots_B]
        self.token_SL[slots_B, at_B] = token_B
        self.log_prob_SL[slots_B, at_B] = log_prob_B
        self.kept_mass_SL[slots_B, at_B] = kept_mass_B
        self.top1_SL[slots_B, at_B] = top1_B
        self.version_SL[slots_B, at_B] = version
        self.num_pending_S[slots_B] -= 1

    def append(
        self,
        slots_B: np.ndarray,
        token_B: np.ndarray,
        log_prob_B: np.ndarray,
        kept_mass_B: np.ndarray,
        top1_B: np.ndarray,
        version: int,
    ) -> None:
        """Record one drawn token per slot, with nothing expected before it."""
        self.expect(slots_B)
        self.record(slots_B, token_B, log_prob_B, kept_mass_B, top1_B, version)

    def stops(self, slots_B: np.ndarray, token_B: np.ndarray) -> np.ndarray:
        """Which of the tokens end their sequences, bool [B]."""
        stopped_B = (self.stop_SK[slots_B] == token_B[:, None]).any(axis=1)
        for slot, more in self._more_stops.items():
            at = np.flatnonzero(slots_B == slot)
            if len(at) and int(token_B[at[0]]) in more:
                stopped_B[at] = True
        return stopped_B

    def block_tables(self) -> list[np.ndarray]:
        """Pages of every running sequence, oldest first."""
        return [self.page_SM[slot, : self.num_pages_S[slot]] for slot in self.order]

    def audit(self) -> None:
        """Check what must hold between steps.

        Raises:
            AssertionError: names the rule that is broken.
        """
        order = self.order
        used = set(order.tolist())
        assert len(used) == len(order), "a slot is used twice"
        assert used.isdisjoint(self._free_slots), "a slot in use counts as free"
        assert len(used) + len(self._free_slots) == len(self.requests), "a slot is lost"
        arrivals = [self._arrival(slot) for slot in order.tolist()]
        assert arrivals == sorted(set(arrivals)), "rows are not in arrival order"
        assert (self.num_computed_S[order] < self.num_tokens_S[order]).all(), "a sequence has nothing left to compute"
        known = self.num_tokens_S[order] - self.num_pending_S[order]
        assert (known < self.max_total_S[order]).all(), "a sequence at its length limit still runs"
        assert (self.num_tokens_S[order] <= self.max_total_S[order]).all(), "a sequence is to draw more than it may"
        assert (known >= self.prompt_len_S[order]).all(), "more tokens are expected than were drawn"
        assert used.issuperset(self._more_stops), "stop tokens of a sequence that is gone"
        unused = np.setdiff1d(np.arange(len(self.requests)), order)
        assert not self.num_pending_S[unused].any(), "an empty slot expects a token"
        held = self.num_pages_S[order] * self.page_size
        assert (self.num_computed_S[order] <= held).all(), "computed tokens without a page"
        column = np.arange(self.page_SM.shape[1])
        counts_S = np.where(np.isin(np.arange(len(self.requests)), order), self.num_pages_S, 0)
        assert ((self.page_SM > 0) == (column < counts_S[:, None])).all(), "a block table is not zero behind its end"
        for slot in order:
            request = self.requests[slot]
            assert request is not None
            assert request.state is RequestState.RUNNING
            assert len(request.drawn) == 0, "two owners of one record"

    def _arrival(self, slot: int) -> int:
        request = self.requests[slot]
        assert request is not None
        return request.arrival

    def _grow(self, length: int) -> None:
        capacity = self.token_SL.shape[1]
        if length <= capacity:
            return
        assert length <= self.max_model_len
        more = min(self.max_model_len, max(length, 2 * capacity)) - capacity
        for name in ("token_SL", *_RECORD):
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
