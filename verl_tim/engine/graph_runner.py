"""Runs planned steps on a device that works behind the host: launch now, results later.

A step of decodes replays a graph (graphs.py); every other step (prefill chunks, and decodes beside them) is built on
the host and run eagerly. Both read drawn tokens on the device (device_state.py) and leave theirs there, so a step can
be launched while the one before still runs. What a step drew comes back through a rotating host buffer behind a mark.

The host's work per step is a fixed number of array operations over its sequences and a fixed number of launches.

In a pipeline (`stages.py` says how its ranks keep time) a plan is prepared when it is made, with everything it reads of
the rows then, and submitted when it reaches this stage. What stages pass on, and what the last one drew, travels
between the recorded steps, on the same stream and in the same order on all ranks.

What orders whom, of everything that two steps share:

- Device memory (slot state, inbox, hidden states and results of a recording, staged packets, KV pages): the order of
  submission alone. All work of a rank, its exchanges included, is on one stream, so that step n + 1 cannot overwrite
  what step n still reads or sends; a plan's packet is sent when it is prepared and read up to `stages` - 1 launches
  later, before the packet that takes its place is sent.
- Host memory that the device reads (packets): `Staging` waits for the copy out of a buffer before it fills it again.
- Host memory that the device writes (results, routes): one of `_DEPTH` buffers a launch, read when its mark is reached
  and one launch later at the latest.
- Exchanges: in a launch each rank first runs its own plan, then receives, then sends, then takes part in telling what
  the last stage drew. Which of these happen, and how large they are, follows from the plans, which are the same on all
  ranks. An exchange waits for the neighbour's device, and its host for nothing but verbs that it was told before: a
  host that waits for its own device within a launch (a first use that compiles or tries) cannot make a circle.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_tim.engine.decode_io import RESULTS, write_results
from verl_tim.engine.device import Device, Mark, Work
from verl_tim.engine.device_state import DeviceState, apply
from verl_tim.engine.errors import EngineStateError
from verl_tim.engine.graphs import DecodeGraphs, bucket_sizes
from verl_tim.engine.page_routes import PageRoutes, as_routes
from verl_tim.engine.parallel import Ranks
from verl_tim.engine.rows import RowTable
from verl_tim.engine.runner import ModelRunner, Recording, RunnableModel
from verl_tim.engine.scheduler import DrawnStep, StepPlan
from verl_tim.engine.staging import Staging
from verl_tim.engine.stats import EngineStats
from verl_tim.models.place import WHOLE
from verl_tim.numerics.paging import DecodeBatch, PagedBatch, StagedLayout
from verl_tim.numerics.sampling import SamplingTensors

logger = logging.getLogger(__name__)

_IN_FLIGHT = 2  # steps: one that runs, one that waits behind it
_DEPTH = _IN_FLIGHT + 1


@dataclass
class Launched:
    """A step that was submitted.

    plan: as it was; weight_version: of the weights it runs with; drawn: how many tokens it draws; results_4B: int32
    host buffer, valid once `mark` is reached; recording: the rows whose routes are recorded, if any, and routes_RLK, in
    a host buffer, too, their experts.
    """

    plan: StepPlan
    weight_version: int
    drawn: int
    results_4B: np.ndarray
    mark: Mark
    recording: Recording | None
    routes_RLK: Tensor | None


@dataclass
class _Prepared:
    """A plan, ready to be submitted.

    rows: hidden states that it passes from stage to stage; columns: of its results, of which `drawn` are the plan's;
    submit: the forward, and on the last stage the draw; hidden: what the forward gave; finish: work on the device that
    completes the results, on the last stage only; slots_D: of the drawing sequences, on the device; recording: the rows
    whose routes are recorded, if any; routes: their experts, int16 [R, layers, K] on the device.
    """

    plan: StepPlan
    weight_version: int
    drawn: int
    rows: int
    columns: int
    submit: Work
    hidden: Callable[[], Tensor]
    finish: Callable[[], Tensor]
    slots_D: Tensor | None
    recording: Recording | None = None
    routes: Callable[[], Tensor] | None = None


class GraphRunner(ModelRunner):
    """Model, KV tensors, device state and graphs of one engine.

    A sparse model's routes are given out for sequences that record them (`keep_routes_in`), not by a pipeline's stages.

    Args:
        use_graphs: off, every step runs eagerly; look-ahead and results are the same.
        ranks: this process among the stages of a pipeline; None or one stage: all of the model's layers are here.
    """

    def __init__(
        self,
        model: RunnableModel,
        rows: RowTable,
        stats: EngineStats,
        device: Device,
        *,
        num_pages: int,
        max_num_batched_tokens: int,
        use_graphs: bool,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, rows, stats, num_pages=num_pages, max_num_batched_tokens=max_num_batched_tokens)
        self._device = device
        self._use_graphs = use_graphs
        slots = len(rows.requests)
        self._ranks = ranks
        self._place = WHOLE if ranks is None else ranks.place
        stages = self._place.stages
        self._under_way: deque[_Prepared | None] = deque([None] * stages, maxlen=stages)  # by stage that is at it
        moe = getattr(model.config, "moe", None)
        self._routes_LK = None if moe is None or stages > 1 else (len(moe.layers), int(moe.top_k))
        self._state = DeviceState(device, rows)
        self._graphs = DecodeGraphs(
            device,
            self._state,
            bucket_sizes(slots, model.row_floor),
            page_size=rows.page_size,
            max_model_len=rows.max_model_len,
            forward=self._forward,
            draw=(lambda hidden_BD, sampling, cut_R: model.draw(hidden_BD, sampling, cut_R))
            if self._place.is_last
            else None,
            gives_routes=self._routes_LK is not None,
        )
        self._graph_slot_B = np.full(self._graphs.sizes[-1], self._state.null, np.int64)  # what graphs.slot_B holds
        self._staging = Staging(device, 1 << 16, _DEPTH + stages - 1)
        columns = max(slots, self._graphs.sizes[-1])  # other stages' recorded steps leave theirs here, too
        self._eager_results = torch.zeros(RESULTS * columns, dtype=torch.int32, device=device.device)
        nbytes = 4 * RESULTS * self._graphs.sizes[-1]
        self._result_buffers = [device.host_buffer(nbytes).view(torch.int32) for _ in range(_DEPTH)]
        self._route_buffers: list[Tensor | None] = [None] * _DEPTH  # made when first wanted
        self._turn = 0
        self._inbox: Tensor | None = None  # where the stage before leaves its hidden states
        if not self._place.is_first:
            rows_most = max(-(-max_num_batched_tokens // model.row_floor) * model.row_floor, self._graphs.sizes[-1])
            self._inbox = torch.zeros(2 * rows_most * model.config.hidden_size, dtype=model.dtype, device=device.device)

    def _received(self, rows: int) -> Tensor | None:
        """[2, rows, hidden]: what the stage before passes on, in its place; None on the first stage."""
        if self._inbox is None:
            return None
        hidden = self.model.config.hidden_size
        return self._inbox[: 2 * rows * hidden].view(2, rows, hidden)

    def _forward(
        self, token_ids_T: Tensor, batch: PagedBatch | DecodeBatch, chosen: list[Tensor] | None = None
    ) -> Tensor:
        assert self._k_pages_LPSHD is not None
        assert self._v_pages_LPSHD is not None
        if self._inbox is None:
            return self.model.forward(token_ids_T, batch, self._k_pages_LPSHD, self._v_pages_LPSHD, chosen)
        return self.model.forward(
            token_ids_T,
            batch,
            self._k_pages_LPSHD,
            self._v_pages_LPSHD,
            received=self._received(token_ids_T.shape[0]),
        )

    def keep_routes_in(self, routes: PageRoutes) -> None:
        """Where the routes of sequences that record them go; it is told where none will ever come."""
        if self._routes_LK is None:
            routes.never()
        else:
            self._routes = routes

    # Memory.

    def set_num_pages(self, num_pages: int) -> None:
        """Size of the next :meth:`allocate_kv_cache`."""
        assert not self.has_kv_cache
        self._num_pages = num_pages

    def release_kv_cache(self) -> None:
        """Free the KV tensors, and the graphs that hold their addresses."""
        super().release_kv_cache()
        self.forget_graphs()

    @property
    def recorded_graphs(self) -> list[int]:
        """Sizes of the decode steps that are recorded now."""
        return self._graphs.recorded

    def forget_graphs(self) -> None:
        """Addresses of weights or KV pages are about to change: steps are recorded again when they are needed."""
        self._graphs.forget()

    @torch.inference_mode()
    def record_graphs(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record the decode steps of all sizes, the largest first, whose memory the others then share.

        Args:
            progress: told (sizes done, all sizes) after each.
        """
        if not self._use_graphs:
            return
        sizes = self._graphs.sizes[::-1]
        self._reset_graph_slots()
        for done, size in enumerate(sizes, 1):
            self._graphs.record([size])
            progress(done, len(sizes))

    def _reset_graph_slots(self) -> None:
        self._graph_slot_B[:] = self._state.null
        self._device.submit(lambda: self._graphs.slot_B.fill_(self._state.null))  # type: ignore[arg-type,return-value]

    @torch.inference_mode()
    def graph_bytes(self) -> int:
        """What recording all sizes takes of the device's memory, measured on the two largest, which are dropped again.

        The largest brings the shared memory; each further size adds what its own recording needs.
        """
        if not self._use_graphs:
            return 0
        self._reset_graph_slots()
        first, *others = self._graphs.sizes[::-1]
        free = [self._device.free_and_total()[0]]
        for size in (first, *others[:1]):
            self._graphs.record([size])
            free.append(self._device.free_and_total()[0])
        self._graphs.forget()
        one = max(0, free[0] - free[1])
        more = max(0, free[1] - free[2]) * len(others) if others else 0
        return one + more

    @torch.inference_mode()
    def activation_bytes(self, max_num_batched_tokens: int) -> int:
        """Most memory that an eager step takes beside weights and KV pages: a full prefill in which all sequences cut.

        Needs KV tensors; the null page alone will do.
        """
        rows_table, floor = self._rows, self.model.row_floor
        sequences = min(len(rows_table.requests), max_num_batched_tokens)
        length = min(rows_table.max_model_len, max(1, max_num_batched_tokens // sequences))
        used = sequences * length
        padded = -(-used // floor) * floor
        device = self._device.device
        position = np.zeros(padded, np.int64)
        position[:used] = np.tile(np.arange(length), sequences)
        pages = -(-length // rows_table.page_size)
        starts = torch.arange(sequences + 1) * length
        contexts = torch.full((sequences,), length, dtype=torch.int64)
        zero_T = torch.zeros(padded, dtype=torch.int64, device=device)
        table = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        position_T = torch.from_numpy(position).to(device)
        staged = StagedLayout(
            starts.to(device, torch.int32), contexts.to(device, torch.int32), table, zero_T, position_T
        )
        batch = PagedBatch(starts, contexts, table, zero_T, position_T, device=device, staged=staged)
        last = (starts[1:] - 1).to(device)
        row_B = torch.arange(sequences, device=device)
        one_B = torch.ones(sequences, device=device)
        sampling = SamplingTensors(one_B, row_B * 0 + 50, one_B * 0.9, one_B * 0, row_B, row_B)

        def step() -> None:
            chosen: list[Tensor] = []
            hidden_TD = self._forward(zero_T, batch, chosen)
            if self._routes_LK is not None:
                as_routes(chosen)
            if self._place.is_last:
                self.model.draw(hidden_TD[last], sampling, row_B)

        return self._device.peak_bytes(step)

    # Steps.

    @property
    def is_busy(self) -> bool:
        """Whether plans are on their way through the stages."""
        return any(prepared is not None for prepared in self._under_way)

    @torch.inference_mode()
    def launch(self, plan: StepPlan | None, weight_version: int) -> Launched | None:
        """Submit a step. Its sequences' rows must be as the plan found them; book it (`Scheduler.advance`) after.

        In a pipeline: start the plan, if there is one, and move all others on by a stage.

        Returns:
            The step whose results come with this one: of the plan itself, in a pipeline of the one that ends, if any.

        Raises:
            EngineStateError: the KV cache is released.
        """
        if not self.has_kv_cache:
            raise EngineStateError("the KV cache is released; call resume_kv_cache() first")
        began = time.perf_counter()
        self._turn = (self._turn + 1) % _DEPTH
        place, under_way = self._place, self._under_way
        under_way.appendleft(None if plan is None else self._prepare(plan, weight_version))
        mine = under_way[place.stage]
        if mine is not None:
            if len(unclean_P := mine.plan.unclean_P):
                self._device.submit(lambda: self._clean(unclean_P))
            mine.submit()
        if place.stages > 1:
            self._pass_on(mine)
        done, launched = under_way[-1], None
        if done is not None:
            under_way[-1] = None
            host = self._result_buffers[self._turn][: RESULTS * done.columns]
            if done.drawn:
                self._device.submit(self._results_work(done, host))
            routes_RLK = self._bring_routes(done)
            results_4B = host.view(RESULTS, done.columns).numpy()
            mark = self._device.mark()
            launched = Launched(
                done.plan, done.weight_version, done.drawn, results_4B, mark, done.recording, routes_RLK
            )
        self._stats.forward_seconds += time.perf_counter() - began
        return launched

    def _pass_on(self, mine: _Prepared | None) -> None:
        """Submit the exchange with the neighbouring stages: first from before, then to the next, along the chain.

        After this launch's own step, which has read what the inbox held of the plan before.
        """
        place, ranks = self._place, self._ranks
        assert ranks is not None
        coming = None if place.is_first else self._under_way[place.stage - 1]
        into = None if coming is None else self._received(coming.rows)
        out = None if place.is_last or mine is None else mine.hidden

        def exchange() -> None:
            if into is not None:
                ranks.receive(into)
            if out is not None:
                ranks.send(out())

        if into is not None or out is not None:
            self._device.submit(exchange)

    def _results_work(self, done: _Prepared, host: Tensor) -> Work:
        """The device's work that brings what a plan drew to every rank, and to the host."""
        place, ranks, state = self._place, self._ranks, self._state

        def work() -> None:
            if place.is_last:
                results_4B = done.finish()
            else:
                results_4B = self._eager_results[: RESULTS * done.columns].view(RESULTS, done.columns)
            if ranks is not None and place.stages > 1:
                ranks.from_stage(results_4B, place.stages - 1)
                if not place.is_last:
                    token_D = results_4B[0, : done.drawn].to(torch.int64)
                    state.token_S.index_copy_(0, done.slots_D, token_D)  # type: ignore[arg-type]
            host.copy_(results_4B.view(-1), non_blocking=True)

        return work

    def _bring_routes(self, done: _Prepared) -> Tensor | None:
        """Submit the copy of a step's recorded routes to the host; where they will be."""
        if done.recording is None or done.routes is None:
            return None
        assert self._routes_LK is not None
        shape = (len(done.recording.row_R), *self._routes_LK)
        count = math.prod(shape)
        buffer = self._route_buffers[self._turn]
        if buffer is None or len(buffer) < count:
            buffer = self._route_buffers[self._turn] = self._device.host_buffer(2 * count).view(torch.int16)
        host_RLK, routes = buffer[:count].view(shape), done.routes
        self._device.submit(lambda: host_RLK.copy_(routes(), non_blocking=True))  # type: ignore[arg-type,return-value]
        return host_RLK

    def collect(self, launched: Launched) -> DrawnStep | None:
        """Wait for a step's results; None if it draws nothing."""
        began = time.perf_counter()
        launched.mark.wait()
        self._stats.wait_seconds += time.perf_counter() - began
        if launched.recording is not None and launched.routes_RLK is not None:
            self._write_routes(launched.plan, launched.recording, launched.routes_RLK)
        if launched.drawn == 0:
            return None
        words = launched.results_4B[:, : launched.drawn]
        # Copies: the buffer is filled again two steps later.
        return DrawnStep(
            words[0].copy(), words[1].view(np.float32).copy(), words[3].view(np.float32).copy(), words[2].copy()
        )

    def _prepare(self, plan: StepPlan, weight_version: int) -> _Prepared:
        if self._use_graphs and plan.is_decode:
            return self._prepare_graph(plan, weight_version)
        return self._prepare_eager(plan, weight_version)

    def _prepare_graph(self, plan: StepPlan, weight_version: int) -> _Prepared:
        state, graphs, staging, submit = self._state, self._graphs, self._staging, self._device.submit
        slots_B, rows = plan.slots_B, len(plan.slots_B)
        size = graphs.bucket(rows)
        staging.begin(state.packet_bytes(slots_B) + 16 * size + 80 * rows)
        changes = state.stage(staging, slots_B, plan.start_B, feed=True)
        new_slot_B: Tensor | None = None
        wanted = np.full(size, state.null, np.int64)
        wanted[:rows] = slots_B
        if not np.array_equal(wanted, self._graph_slot_B[:size]):
            self._graph_slot_B[:size] = wanted
            new_slot_B = staging.put(wanted)
        slots_D = None if self._place.is_last else staging.put(slots_B)
        recording = self._recording(plan)
        routed_R = None if recording is None else staging.put(recording.row_R)
        cut_R = np.flatnonzero(self._cuts(slots_B))
        redraw = self._stage_cuts(slots_B, cut_R, plan.start_B + 1) if len(cut_R) else None
        staging.send()
        state.moved(slots_B, plan.start_B + 1, plan.draws_B)

        def update() -> None:
            apply(changes)
            if new_slot_B is not None:
                graphs.slot_B[:size].copy_(new_slot_B)

        def submit_step() -> None:
            if changes or new_slot_B is not None:
                submit(update)
            graphs.replay(size)

        def finish() -> Tensor:
            results_4B = graphs.results(size)
            if redraw is not None:
                rows_R, slots_R, sampling = redraw
                everything_R = torch.arange(len(rows_R), device=rows_R.device)
                sampled = self.model.draw(graphs.hidden(size).index_select(0, rows_R), sampling, everything_R)
                words = torch.empty(RESULTS, len(rows_R), dtype=torch.int32, device=rows_R.device)
                write_results(words, sampled)
                results_4B.index_copy_(1, rows_R, words)
                state.token_S.index_copy_(0, slots_R, sampled.token_B)
            return results_4B

        def routes() -> Tensor:
            assert routed_R is not None
            return graphs.routes(size).index_select(0, routed_R)

        return _Prepared(
            plan,
            weight_version,
            rows,
            size,
            size,
            submit_step,
            lambda: graphs.hidden(size),
            finish,
            slots_D,
            recording,
            routes,
        )

    def _prepare_eager(self, plan: StepPlan, weight_version: int) -> _Prepared:
        rows, state, staging, submit = self._rows, self._state, self._staging, self._device.submit
        slots_B, start_B, count_B = plan.slots_B, plan.start_B, plan.count_B
        sequences, page_size = len(slots_B), rows.page_size
        drawn = int(plan.draws_B.sum())
        end_B = np.cumsum(count_B)
        context_B = start_B + count_B
        used = int(end_B[-1])
        padded = -(-used // self.model.row_floor) * self.model.row_floor
        staging.begin(state.packet_bytes(slots_B) + 32 * padded + 160 * (sequences + 1))
        changes = state.stage(staging, slots_B, start_B, feed=False)

        token_T, position_T, kv_slot_T = (np.zeros(padded, np.int64) for _ in range(3))
        position = np.arange(used) - np.repeat(end_B - count_B - start_B, count_B)
        slots = np.repeat(slots_B, count_B)
        token_T[:used] = rows.token_SL[slots, position]
        position_T[:used] = position
        kv_slot_T[:used] = rows.page_SM[slots, position // page_size] * page_size + position % page_size
        token, where, kv_slot = staging.put(token_T), staging.put(position_T), staging.put(kv_slot_T)
        starts_S1 = np.concatenate([[0], end_B])
        layout = (staging.put(starts_S1.astype(np.int32)), staging.put(context_B.astype(np.int32)))
        slot = staging.put(slots_B)
        fed_B = state.unknown(slots_B, start_B)  # those run one row, whose token is on the device
        feed = (staging.put(end_B[fed_B] - 1), staging.put(slots_B[fed_B])) if fed_B.any() else None
        draw = self._stage_draw(plan, end_B, context_B) if drawn else None
        recording = self._recording(plan)
        routed_R = None if recording is None else staging.put(recording.row_R)
        staging.send()
        state.moved(slots_B, context_B, plan.draws_B)
        pages = -(-int(context_B.max()) // page_size)
        is_last = self._place.is_last
        kept: list[Tensor] = []  # what the forward gave, for the next stage
        recorded: list[Tensor] = []

        def step() -> None:
            apply(changes)
            if feed is not None:
                token.index_copy_(0, feed[0], state.token_S.index_select(0, feed[1]))
            table_BM = state.block_table_SM[:, :pages].index_select(0, slot)
            batch = PagedBatch(
                torch.from_numpy(starts_S1),
                torch.from_numpy(context_B),
                table_BM,
                kv_slot,
                where,
                device=self._device.device,
                staged=StagedLayout(*layout, table_BM, kv_slot, where),
            )
            chosen: list[Tensor] | None = None if routed_R is None else []
            hidden_TD = self._forward(token, batch, chosen)
            if chosen is not None and routed_R is not None:
                recorded.append(as_routes([expert_TK.index_select(0, routed_R) for expert_TK in chosen]))
            if not is_last:
                kept.append(hidden_TD)
            if draw is None:
                return
            last_B, slots_D, sampling, cut_R = draw
            if is_last:
                sampled = self.model.draw(hidden_TD.index_select(0, last_B), sampling, cut_R)
                write_results(self._eager_results[: RESULTS * drawn].view(RESULTS, drawn), sampled)
                state.token_S.index_copy_(0, slots_D, sampled.token_B)
            state.position_S.index_copy_(0, slots_D, sampling.position_B)

        def finish() -> Tensor:
            return self._eager_results[: RESULTS * drawn].view(RESULTS, drawn)

        slots_D = None if draw is None else draw[1]
        return _Prepared(
            plan,
            weight_version,
            drawn,
            padded,
            drawn,
            lambda: submit(step),
            kept.pop,
            finish,
            slots_D,
            recording,
            recorded.pop,
        )

    # Sampling parameters.

    def _cuts(self, slots_B: np.ndarray) -> np.ndarray:
        """Which sequences cut the distribution they draw from, bool [B]."""
        rows = self._rows
        cuts_B = (rows.top_k_S[slots_B] >= 0) | (rows.top_p_S[slots_B] < 1) | (rows.min_p_S[slots_B] > 0)
        return cuts_B & (rows.temperature_S[slots_B] != 0)

    def _stage_cuts(
        self, slots_B: np.ndarray, cut_R: np.ndarray, position_B: np.ndarray
    ) -> tuple[Tensor, Tensor, SamplingTensors]:
        """(rows, slots, sampling parameters) of the rows that cut; ``position_B`` of the tokens to draw."""
        slots = slots_B[cut_R]
        return self._staging.put(cut_R), self._staging.put(slots), self._stage_sampling(slots, position_B[cut_R])

    def _stage_sampling(self, slots_R: np.ndarray, position_R: np.ndarray) -> SamplingTensors:
        rows, put = self._rows, self._staging.put
        return SamplingTensors(
            put(rows.temperature_S[slots_R]),
            put(rows.top_k_S[slots_R]),
            put(rows.top_p_S[slots_R]),
            put(rows.min_p_S[slots_R]),
            put(rows.seed_S[slots_R]),
            put(position_R),
        )

    def _stage_draw(
        self, plan: StepPlan, end_B: np.ndarray, context_B: np.ndarray
    ) -> tuple[Tensor, Tensor, SamplingTensors, Tensor]:
        """(last rows, slots, sampling parameters, rows that cut) of the sequences that draw in an eager step."""
        draws_B, put = plan.draws_B, self._staging.put
        slots_D = plan.slots_B[draws_B]
        sampling = self._stage_sampling(slots_D, context_B[draws_B])
        cut_R = np.flatnonzero(self._cuts(slots_D))
        return put(end_B[draws_B] - 1), put(slots_D), sampling, put(cut_R)
