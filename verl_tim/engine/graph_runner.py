"""Runs planned steps on a device that works behind the host: launch now, results later.

A step of decodes replays a graph (graphs.py); every other step (prefill chunks, and decodes beside them) is built on
the host and run eagerly. Both read drawn tokens on the device (device_state.py) and leave theirs there, so a step can
be launched while the one before still runs. What a step drew comes back through a rotating host buffer behind a mark.

The host's work per step is a fixed number of array operations over its sequences and a fixed number of launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_tim.engine.decode_io import RESULTS, write_results
from verl_tim.engine.device import Device, Mark
from verl_tim.engine.device_state import DeviceState, apply
from verl_tim.engine.errors import EngineStateError
from verl_tim.engine.graphs import DecodeGraphs, bucket_sizes
from verl_tim.engine.rows import RowTable
from verl_tim.engine.runner import ModelRunner, RunnableModel
from verl_tim.engine.scheduler import DrawnStep, StepPlan
from verl_tim.engine.staging import Staging
from verl_tim.engine.stats import EngineStats
from verl_tim.numerics.paging import DecodeBatch, PagedBatch, StagedLayout
from verl_tim.numerics.sampling import SamplingTensors

logger = logging.getLogger(__name__)

_IN_FLIGHT = 2  # steps: one that runs, one that waits behind it
_DEPTH = _IN_FLIGHT + 1


@dataclass
class Launched:
    """A step that was submitted.

    plan: as it was; weight_version: of the weights it runs with; drawn: how many tokens it draws; results_4B: int32
    host buffer, valid once `mark` is reached.
    """

    plan: StepPlan
    weight_version: int
    drawn: int
    results_4B: np.ndarray
    mark: Mark


class GraphRunner(ModelRunner):
    """Model, KV tensors, device state and graphs of one engine.

    Args:
        use_graphs: off, every step runs eagerly; look-ahead and results are the same.
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
    ) -> None:
        super().__init__(model, rows, stats, num_pages=num_pages, max_num_batched_tokens=max_num_batched_tokens)
        self._device = device
        self._use_graphs = use_graphs
        slots = len(rows.requests)
        self._state = DeviceState(device, rows)
        self._graphs = DecodeGraphs(
            device,
            self._state,
            bucket_sizes(slots, model.row_floor),
            page_size=rows.page_size,
            max_model_len=rows.max_model_len,
            forward=self._forward,
            draw=lambda hidden_BD, sampling, cut_R: model.draw(hidden_BD, sampling, cut_R),
        )
        self._graph_slot_B = np.full(self._graphs.sizes[-1], self._state.null, np.int64)  # what graphs.slot_B holds
        self._staging = Staging(device, 1 << 16, _DEPTH)
        self._eager_results = torch.zeros(RESULTS * slots, dtype=torch.int32, device=device.device)
        nbytes = 4 * RESULTS * self._graphs.sizes[-1]
        self._result_buffers = [device.host_buffer(nbytes).view(torch.int32) for _ in range(_DEPTH)]
        self._turn = 0

    def _forward(self, token_ids_T: Tensor, batch: PagedBatch | DecodeBatch) -> Tensor:
        assert self._k_pages_LPSHD is not None
        assert self._v_pages_LPSHD is not None
        return self.model.forward(token_ids_T, batch, self._k_pages_LPSHD, self._v_pages_LPSHD)

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
            self.model.draw(self._forward(zero_T, batch)[last], sampling, row_B)

        return self._device.peak_bytes(step)

    # Steps.

    @torch.inference_mode()
    def launch(self, plan: StepPlan, weight_version: int) -> Launched:
        """Submit a step. Its sequences' rows must be as the plan found them; book it (`Scheduler.advance`) after.

        Raises:
            EngineStateError: the KV cache is released.
        """
        if not self.has_kv_cache:
            raise EngineStateError("the KV cache is released; call resume_kv_cache() first")
        began = time.perf_counter()
        drawn = int(plan.draws_B.sum())
        self._turn = (self._turn + 1) % _DEPTH
        replays = self._use_graphs and plan.is_decode
        host_4B = self._launch_graph(plan) if replays else self._launch_eager(plan, drawn)
        launched = Launched(plan, weight_version, drawn, host_4B, self._device.mark())
        self._stats.forward_seconds += time.perf_counter() - began
        return launched

    def collect(self, launched: Launched) -> DrawnStep | None:
        """Wait for a step's results; None if it draws nothing."""
        began = time.perf_counter()
        launched.mark.wait()
        self._stats.wait_seconds += time.perf_counter() - began
        if launched.drawn == 0:
            return None
        words = launched.results_4B[:, : launched.drawn]
        # Copies: the buffer is filled again two steps later.
        return DrawnStep(
            words[0].copy(), words[1].view(np.float32).copy(), words[3].view(np.float32).copy(), words[2].copy()
        )

    def _launch_graph(self, plan: StepPlan) -> np.ndarray:
        state, graphs, staging, submit = self._state, self._graphs, self._staging, self._device.submit
        slots_B, rows = plan.slots_B, len(plan.slots_B)
        size = graphs.bucket(rows)
        staging.begin(state.packet_bytes(slots_B) + 8 * size + 64 * rows)
        changes = state.stage(staging, slots_B, plan.start_B, feed=True)
        new_slot_B: Tensor | None = None
        wanted = np.full(size, state.null, np.int64)
        wanted[:rows] = slots_B
        if not np.array_equal(wanted, self._graph_slot_B[:size]):
            self._graph_slot_B[:size] = wanted
            new_slot_B = staging.put(wanted)
        cut_R = np.flatnonzero(self._cuts(slots_B))
        redraw = self._stage_cuts(slots_B, cut_R, plan.start_B + 1) if len(cut_R) else None
        staging.send()

        def update() -> None:
            apply(changes)
            if new_slot_B is not None:
                graphs.slot_B[:size].copy_(new_slot_B)

        if changes or new_slot_B is not None:
            submit(update)
        graphs.replay(size)
        state.moved(slots_B, plan.start_B + 1, plan.draws_B)
        host = self._result_buffers[self._turn][: RESULTS * size]

        def finish() -> None:
            results_4B = graphs.results(size)
            if redraw is not None:
                rows_R, slots_R, sampling = redraw
                everything_R = torch.arange(len(rows_R), device=rows_R.device)
                sampled = self.model.draw(graphs.hidden(size).index_select(0, rows_R), sampling, everything_R)
                words = torch.empty(RESULTS, len(rows_R), dtype=torch.int32, device=rows_R.device)
                write_results(words, sampled)
                results_4B.index_copy_(1, rows_R, words)
                state.token_S.index_copy_(0, slots_R, sampled.token_B)
            host.copy_(results_4B.view(-1), non_blocking=True)

        submit(finish)
        return host.view(RESULTS, size).numpy()

    def _launch_eager(self, plan: StepPlan, drawn: int) -> np.ndarray:
        rows, state, staging, submit = self._rows, self._state, self._staging, self._device.submit
        slots_B, start_B, count_B = plan.slots_B, plan.start_B, plan.count_B
        sequences, page_size = len(slots_B), rows.page_size
        end_B = np.cumsum(count_B)
        context_B = start_B + count_B
        used = int(end_B[-1])
        padded = -(-used // self.model.row_floor) * self.model.row_floor
        staging.begin(state.packet_bytes(slots_B) + 24 * padded + 160 * (sequences + 1))
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
        staging.send()
        pages = -(-int(context_B.max()) // page_size)
        host = self._result_buffers[self._turn][: RESULTS * drawn]

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
            hidden_TD = self._forward(token, batch)
            if draw is None:
                return
            last_B, slots_D, sampling, cut_R = draw
            sampled = self.model.draw(hidden_TD.index_select(0, last_B), sampling, cut_R)
            results_4B = self._eager_results[: RESULTS * drawn].view(RESULTS, drawn)
            write_results(results_4B, sampled)
            state.token_S.index_copy_(0, slots_D, sampled.token_B)
            state.position_S.index_copy_(0, slots_D, sampling.position_B)
            host.copy_(results_4B.view(-1), non_blocking=True)

        submit(step)
        state.moved(slots_B, context_B, plan.draws_B)
        return host.view(RESULTS, drawn).numpy()

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
