"""Which sequences run in a step, and how many tokens of each.

A step carries, within a budget of token rows: one row of every decoding sequence, then the next chunk of every sequence
whose prompt is not yet computed, then first chunks of waiting requests, oldest first. Pages are taken as they are
needed, not reserved for a response's full length. When they run out, the youngest sequence is preempted: its pages go,
its drawn tokens and their log-probs stay, and it is recomputed from position 0 when there is room. Since arrival order
is also the order of admission and the reverse order of preemption, the oldest request always makes progress, and no
request can be starved.

The work per step is a fixed number of array operations over the running sequences, plus a constant per admitted,
finished or preempted one. The number of waiting requests does not enter.

A step's bookkeeping has two halves, so that a runner may launch step n + 1 while step n still runs: `advance` books
what is known of a launched step without its results (what it computes, that it draws), `collect` brings the values.
Between them a sequence counts its drawn token as pending. That it ends by its length is known beforehand; that it ends
by its token, or by broken logits, only in `collect`, one step late: the step launched meanwhile ran the sequence once
too often, and its token is dropped there, since the slot has another tenancy by then. Pages may be given away at once:
whoever gets them writes them in a later step, and steps run in order. What must know the tokens, above all preemption,
waits until nothing is pending.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_tim.engine.core import FinishReason, Request, RequestOutput, RequestState
from verl_tim.engine.errors import RequestError
from verl_tim.engine.kv_cache import NULL_PAGE, PagePool
from verl_tim.engine.page_routes import PageRoutes, merged
from verl_tim.engine.prefix_cache import extend_keys, root_key
from verl_tim.engine.rows import RowTable
from verl_tim.engine.stats import EngineStats


@dataclass(frozen=True)
class StepPlan:
    """One step: for each of B sequences the slice of its tokens to run. Decoding sequences come first.

    slots_B int64, start_B int64 (first position), count_B int64 (positions), draws_B bool (the slice ends at the last
    token, so the next one is drawn), tenancy_B int64 (of the slots: who was meant). unclean_P int64: pages to zero
    before the step, as they may hold numbers that are not finite.
    """

    slots_B: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray
    draws_B: np.ndarray
    tenancy_B: np.ndarray
    unclean_P: np.ndarray

    @property
    def is_decode(self) -> bool:
        """Every sequence runs one row and draws."""
        return bool(self.draws_B.all()) and int(self.count_B[-1]) == 1


@dataclass(frozen=True)
class DrawnStep:
    """What a step drew, for the sequences with ``plan.draws_B``, in the plan's order: NumPy arrays of length B."""

    token_B: np.ndarray
    log_prob_B: np.ndarray
    kept_mass_B: np.ndarray
    top1_B: np.ndarray

    def part(self, keep_B: np.ndarray) -> DrawnStep:
        return DrawnStep(self.token_B[keep_B], self.log_prob_B[keep_B], self.kept_mass_B[keep_B], self.top1_B[keep_B])


class Scheduler:
    """Owns the waiting requests; moves them into and out of the row table, and pages into and out of the pool.

    Args:
        routes: of the pool's pages, for the sequences that record them.
        stages: of a pipeline. A drawn token is fed again `stages` steps later, so that as many steps are under way,
            of disjoint decodes; a step takes its share of them.
    """

    def __init__(
        self,
        rows: RowTable,
        pool: PagePool,
        stats: EngineStats,
        *,
        max_num_batched_tokens: int,
        max_prefill_chunk: int | None,
        watermark: float,
        enable_prefix_cache: bool,
        routes: PageRoutes,
        stages: int = 1,
    ) -> None:
        self.rows = rows
        self.pool = pool
        self.routes = routes
        self.stats = stats
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # in arrival order, preempted ones included
        self._running: dict[str, int] = {}  # request id -> slot
        self._token_budget = max_num_batched_tokens
        self._chunk = max_prefill_chunk or max_num_batched_tokens
        self._watermark_pages = math.ceil(watermark * pool.num_pages)
        self._caching = enable_prefix_cache
        self._root = root_key(-1)
        self._stages = stages
        self._step = 0
        self._drew_at_S = np.full(len(rows.requests), -stages, np.int64)  # step that last drew, by slot
        self._loaded_S = np.zeros(len(rows.requests), np.int64)  # tokens that a sequence came with, by slot
        self._shared_S = np.zeros(len(rows.requests), np.int64)  # pages that it found computed, by slot

    # The verbs on requests.

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self.waiting

    def has_work(self) -> bool:
        return bool(self._running or self.waiting)

    def request_ids(self) -> list[str]:
        return [*self._running, *self.waiting]

    def add(self, request: Request) -> None:
        assert request.request_id not in self
        assert request.state is RequestState.WAITING
        self.waiting[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End the named requests where they stand; what they drew is in their outputs, the oldest request's first.

        Their callers may send them again at once, and those that have drawn most should not then wait for the others.
        Unknown ids are skipped.
        """
        named = dict.fromkeys(request_ids)
        running = [slot for request_id, slot in self._running.items() if request_id in named]
        ended = self._unload(np.array(running, np.int64))
        ended += [self.waiting.pop(request_id) for request_id in list(named) if request_id in self.waiting]
        return [self._finish(request, "abort") for request in sorted(ended, key=lambda request: request.arrival)]

    def preempt_all(self) -> None:
        """Take the pages of every running sequence; all are recomputed later. Not counted as preemptions."""
        self._send_back(self.rows.order)

    def start_version(self, weight_version: int) -> None:
        """New weights: no KV of the old ones stays in use. Running sequences are recomputed."""
        self.preempt_all()
        self.pool.forget()
        self._root = root_key(weight_version)

    # The two halves of a step.

    def schedule(self) -> StepPlan | None:
        """Choose the next step and give it its pages; None where there is nothing to do until pending results come."""
        self._step += 1
        chosen = self._continue_running()
        if chosen is None:
            return None
        slots, count = chosen
        if self._caching:
            computed = self.rows.num_computed_S[slots]
            for index in np.flatnonzero(self.rows.num_tokens_S[slots] - computed > 1).tolist():
                self._register(int(slots[index]), int(computed[index] + count[index]))
        admitted = self._admit(self._token_budget - int(count.sum()))
        if admitted:
            slots = np.concatenate([slots, np.array([slot for slot, _ in admitted], np.int64)])
            count = np.concatenate([count, np.array([tokens for _, tokens in admitted], np.int64)])
        if len(slots) == 0:
            assert not self.has_work() or self._any_pending(), "there is work, but no sequence can run"
            return None
        first = np.argsort(count > 1, kind="stable")
        slots, count = slots[first], count[first]
        start = self.rows.num_computed_S[slots]
        draws = start + count == self.rows.num_tokens_S[slots]
        self._drew_at_S[slots[draws]] = self._step
        self.stats.chunk_cuts += int((~draws).sum())
        self.stats.mark(len(self.rows), len(self.waiting), self.pool.num_available)
        return StepPlan(slots, start, count, draws, self.rows.tenancy_S[slots], self.pool.take_unclean())

    def commit(self, plan: StepPlan, drawn: DrawnStep | None, weight_version: int) -> list[RequestOutput]:
        """Book a step that ran: what is computed, what was drawn, who is done."""
        self.advance(plan)
        return self.collect(plan, drawn, weight_version)

    def advance(self, plan: StepPlan) -> None:
        """Book a step that was launched: what it computes, and that it draws."""
        rows, stats = self.rows, self.stats
        decoding = plan.draws_B & (plan.count_B == 1) & (plan.start_B >= rows.prompt_len_S[plan.slots_B])
        stats.decode_tokens += int(decoding.sum())
        stats.prefill_tokens += int(plan.count_B.sum() - decoding.sum())
        rows.num_computed_S[plan.slots_B] += plan.count_B
        if plan.draws_B.any():
            rows.expect(plan.slots_B[plan.draws_B])

    def collect(self, plan: StepPlan, drawn: DrawnStep | None, weight_version: int) -> list[RequestOutput]:
        """Book the results of an advanced step, the oldest first: what was drawn, who is done.

        Args:
            drawn: None where the plan draws nothing.
            weight_version: of the weights that the step ran with.
        """
        if drawn is None:
            assert not plan.draws_B.any()
            return []
        rows, stats = self.rows, self.stats
        slots, token = plan.slots_B[plan.draws_B], drawn.token_B
        meant = rows.tenancy_S[slots] == plan.tenancy_B[plan.draws_B]
        if not meant.all():  # these ended while the step ran
            stats.overrun_tokens += int((~meant).sum())
            slots, token, drawn = slots[meant], token[meant], drawn.part(meant)
            if len(slots) == 0:
                return []
        finite = np.isfinite(drawn.log_prob_B)
        outputs = []
        if not finite.all():
            for request in self._unload(slots[~finite]):
                at = request.prompt_len + len(request.drawn)
                error = RequestError(
                    f"request {request.request_id}: the model's logits for position {at} are not finite: either the "
                    "weights hold such numbers (look at the loss and grad_norm of the update before, and lower the "
                    "learning rate), or activations grow beyond their dtype (on a CPU dtype=float32 shows which)"
                )
                outputs.append(self._finish(request, "error", error))
            self.pool.forget()  # pages with such numbers in them must not be found again,
            self.pool.suspect_all()  # nor be read by who gets them next
            slots, token, drawn = slots[finite], token[finite], drawn.part(finite)
            if len(slots) == 0:
                return outputs
        rows.record(slots, token, drawn.log_prob_B, drawn.kept_mass_B, drawn.top1_B, weight_version)
        stats.drawn_tokens += len(slots)
        stopped = rows.stops(slots, token)
        known = rows.num_tokens_S[slots] - rows.num_pending_S[slots]
        done = stopped | (known == rows.max_total_S[slots])
        if done.any():
            for request, stop in zip(self._unload(slots[done]), stopped[done].tolist(), strict=True):
                outputs.append(self._finish(request, "stop" if stop else "length"))
        return outputs

    def audit(self) -> None:
        """Check all accounting: rows, pages, queues.

        Raises:
            AssertionError: names the rule that is broken.
        """
        self.rows.audit()
        self.pool.audit(self.rows.block_tables())
        running = {request.request_id: slot for slot, request in enumerate(self.rows.requests) if request is not None}
        assert running == self._running, "the index of running requests disagrees with the rows"
        assert running.keys().isdisjoint(self.waiting), "a request waits and runs"
        waiting = list(self.waiting.values())
        assert all(request.state in (RequestState.WAITING, RequestState.PREEMPTED) for request in waiting)
        arrivals = [request.arrival for request in waiting]
        assert arrivals == sorted(set(arrivals)), "the queue is not in arrival order"
        youngest = max((self.rows.requests[slot].arrival for slot in self._running.values()), default=-1)  # type: ignore[union-attr]
        assert not arrivals or youngest < arrivals[0], "a request overtook an older one"

    # Parts of schedule().

    def _records(self, slot: int) -> bool:
        request = self.rows.requests[slot]
        return request is not None and request.params.record_routes

    def _any_pending(self) -> bool:
        return bool(self.rows.num_pending_S[self.rows.order].any())

    def _continue_running(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Slots and token counts of the running sequences that go on, which have their pages then.

        None where one must be preempted and tokens are pending: a preempted sequence takes its tokens along, and one
        that ends meanwhile makes room.
        """
        rows, pool = self.rows, self.pool
        while True:
            order = rows.order
            left = rows.num_tokens_S[order] - rows.num_computed_S[order]
            left[rows.num_tokens_S[order] == rows.max_total_S[order]] = 0  # all drawn, its last token pending
            decode = left == 1
            if self._stages > 1:
                # A pending token of a younger step has not come back to the first stage.
                young = (rows.num_pending_S[order] > 0) & (self._step - self._drew_at_S[order] < self._stages)
                left[young], decode[young] = 0, False
                decode &= np.cumsum(decode) <= -(-len(order) // self._stages)
            count = decode.astype(np.int64)
            budget = self._token_budget - int(count.sum())
            assert budget >= 0, "admission let in more sequences than the budget has rows"
            for index in np.flatnonzero(left > 1).tolist():
                if budget == 0:
                    break
                count[index] = min(int(left[index]), budget, self._chunk)
                budget -= int(count[index])
            pages = -(-(rows.num_computed_S[order] + count) // rows.page_size)
            need = np.maximum(pages - rows.num_pages_S[order], 0)
            total = int(need.sum())
            if total <= pool.num_available:
                break
            if self._any_pending():
                return None
            assert len(order) > 1, "admission let in a sequence that the pool cannot hold"
            youngest = order[-1:]
            self.stats.preemptions += 1
            self.stats.preempted_tokens += int(rows.num_computed_S[youngest[0]])
            self._send_back(youngest)[0].num_preempted += 1
        if total:
            pages = pool.allocate(total)
            recording = np.array([self._records(slot) for slot in order.tolist()])
            self.routes.give(pages, np.repeat(recording, need))
            rows.add_pages(order, need, pages)
        runs = count > 0
        if not runs.all():
            order, count = order[runs], count[runs]
        return order, count

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Move waiting requests into rows, oldest first, until rows, budget or pages are short: (slot, tokens) each.

        A sequence that was preempted in this step is first in the queue and does not come back in it: the pages it gave
        up are needed by those it gave them to.
        """
        rows, pool = self.rows, self.pool
        admitted = []
        while self.waiting and budget > 0 and rows.has_free_slot:
            request = next(iter(self.waiting.values()))
            total = request.num_tokens
            hits = self._hits(request, total) if self._caching else []
            if request.params.record_routes:
                hits = hits[: self.routes.num_recorded(hits)]
            need = -(-total // rows.page_size) - len(hits)
            # What stays free lets the sequences that run grow for a while; alone, a request needs no such reserve.
            reserve = max(self._watermark_pages, len(rows)) if len(rows) else 0
            if pool.num_available - pool.num_unowned(hits) - need < reserve:
                break
            del self.waiting[request.request_id]
            pool.share(hits)
            fresh = pool.allocate(need)
            self.routes.give(fresh, request.params.record_routes)
            pages = np.concatenate([np.array(hits, np.int64), fresh])
            cached = len(hits) * rows.page_size
            if request.state is RequestState.WAITING:
                request.num_cached_tokens = min(cached, request.prompt_len)
            request.to(RequestState.RUNNING)
            request.num_registered = len(hits)
            slot = rows.load(request, pages, cached)
            self._loaded_S[slot], self._shared_S[slot] = total, len(hits)
            self._running[request.request_id] = slot
            tokens = min(total - cached, budget, self._chunk)
            budget -= tokens
            admitted.append((slot, tokens))
            if self._caching:
                self.stats.prefix_queried_tokens += total
                self.stats.prefix_hit_tokens += cached
                # Known from now on, although computed only in this step: a layer writes the KV of all rows of a step
                # before any row reads it, so that even requests of one step share.
                self._register(slot, cached + tokens)
        return admitted

    # Taking sequences out.

    def _send_back(self, slots_B: np.ndarray) -> list[Request]:
        """Back to the head of the queue, with what they drew and without their pages."""
        requests = self._unload(slots_B)
        for request in reversed(requests):  # youngest first, so that the oldest ends in front
            request.to(RequestState.PREEMPTED)
            self.waiting[request.request_id] = request
            self.waiting.move_to_end(request.request_id, last=False)
        return requests

    def _unload(self, slots_B: np.ndarray) -> list[Request]:
        if len(slots_B) == 0:
            return []
        if self._caching:
            # What a step that still runs computes beyond the known tokens is left out.
            computed_S = self.rows.num_computed_S - self.rows.num_pending_S
            for slot in slots_B.tolist():
                self._register(slot, int(computed_S[slot]))
        requests = []
        unseen, shared = self._first_unseen_page(slots_B).tolist(), self._shared_S[slots_B].tolist()
        for (request, pages), first, found_there in zip(self.rows.unload(slots_B), unseen, shared, strict=True):
            if request.params.record_routes:
                found = self.routes.read(pages, request.prompt_len + len(request.drawn))
                request.routes_TLK = merged(request.routes_TLK, found)
            # Whoever computed a page says so of it, when it ends: not who found it in the cache.
            self.pool.suspect(pages[max(first, found_there) :])
            if first == 0:
                self.pool.suspect(NULL_PAGE)  # where padding rows wrote by the same weights
            self.pool.release(pages)
            del self._running[request.request_id]
            requests.append(request)
        return requests

    def _first_unseen_page(self, slots_B: np.ndarray) -> np.ndarray:
        """Of each sequence's pages the first whose numbers no drawn log-prob has shown to be finite.

        A drawn token vouches for all rows before it: where nothing was drawn yet none is vouched for, and where a draw
        is pending the last known token's is not.
        """
        rows = self.rows
        pending = rows.num_pending_S[slots_B]
        known = rows.num_tokens_S[slots_B] - pending
        first = np.where(pending > 0, (known - 1) // rows.page_size, rows.num_pages_S[slots_B])
        return np.where(known > self._loaded_S[slots_B], first, 0)

    def _finish(self, request: Request, reason: FinishReason, error: RequestError | None = None) -> RequestOutput:
        request.finish(reason)
        self.stats.finished[reason] += 1
        return request.output(error)

    # Prefix cache.

    def _keys(self, request: Request) -> list[bytes]:
        if request.page_root != self._root:
            request.page_root = self._root
            request.page_keys = []
        return request.page_keys

    def _hits(self, request: Request, total: int) -> list[int]:
        """Known pages of a waiting request's beginning. Its last token is always computed: it draws the next one."""
        keys = self._keys(request)
        full = (total - 1) // self.rows.page_size
        if len(keys) < full:
            tokens = np.concatenate([request.prompt_P.astype(np.int32), request.drawn.token_N])
            extend_keys(keys, self._root, tokens, self.rows.page_size, full)
        return self.pool.lookup(keys[:full])

    def _register(self, slot: int, computed: int) -> None:
        """Tell the pool what the full pages of a running sequence hold, up to its first ``computed`` tokens."""
        rows = self.rows
        request = rows.requests[slot]
        assert request is not None
        full = computed // rows.page_size
        if full <= request.num_registered:
            return
        keys = self._keys(request)
        if len(keys) < full:
            extend_keys(keys, self._root, rows.token_SL[slot], rows.page_size, full)
        for page, key in zip(
            rows.page_SM[slot, request.num_registered : full].tolist(), keys[request.num_registered : full], strict=True
        ):
            self.pool.register(page, key)
        request.num_registered = full
