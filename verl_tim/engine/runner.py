"""Runs a planned step: builds the batch, runs the model over it, draws from the logits of the rows that need them.

The runner owns the KV tensors and the input buffers, which are made once. The model is whatever offers the attributes
of :class:`RunnableModel`; `models.build_model` makes one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from verl_tim.engine.errors import EngineStateError
from verl_tim.engine.page_routes import PageRoutes, as_routes
from verl_tim.engine.rows import RowTable
from verl_tim.engine.sampler import sampling_tensors
from verl_tim.engine.scheduler import DrawnStep, StepPlan
from verl_tim.engine.stats import EngineStats
from verl_tim.numerics.contract import ROW_FLOOR
from verl_tim.numerics.paging import DecodeBatch, PagedBatch
from verl_tim.numerics.sampling import Sampled, SamplingTensors


class RunnableModel(Protocol):
    """What the engine needs of a model (`models.EngineModel` has it)."""

    dtype: torch.dtype
    device: torch.device

    @property
    def row_floor(self) -> int: ...  # forward takes rows in multiples of it
    @property
    def config(
        self,
    ) -> Any: ...  # vocab_size, max_position_embeddings, eos_token_ids
    @property
    def kv_shape(self) -> tuple[int, int, int]: ...  # layers, kv heads, head_dim of the keys kept here
    @property
    def numerics(self) -> str: ...
    @property
    def attention(self) -> str: ...
    def forward(
        self,
        token_ids_T: torch.Tensor,
        paged: PagedBatch | DecodeBatch,
        k_pages_LPSHD: torch.Tensor,
        v_pages_LPSHD: torch.Tensor,
        chosen: list[torch.Tensor] | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor: ...
    def draw(
        self, hidden_BD: torch.Tensor, sampling: SamplingTensors, cut_R: torch.Tensor | None = None
    ) -> Sampled: ...
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def load_checkpoint(self, path: str) -> None: ...
    def release_weights(self) -> None: ...
    def any_weights(self) -> contextlib.AbstractContextManager[None]: ...  # run on whatever the buffers hold
    def weight_checksum(self) -> str: ...


class _Buffer:
    """A host array that the runner fills anew in every step, seen as a tensor too."""

    def __init__(self, *shape: int) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.int64)
        self.array = self.tensor.numpy()


class _Inputs:
    """The input buffers of one step."""

    def __init__(self, max_rows: int, max_seqs: int, max_pages: int) -> None:
        self.token_T, self.position_T, self.slot_T = _Buffer(max_rows), _Buffer(max_rows), _Buffer(max_rows)
        self.query_start_S1, self.context_len_S = _Buffer(max_seqs + 1), _Buffer(max_seqs)
        self.block_table_SM = _Buffer(max_seqs * max_pages)  # viewed as (sequences, pages) of the step, contiguous


class ModelRunner:
    """Model, KV tensors and input buffers of one engine.

    Args:
        num_pages: pages that can be owned; the tensors hold one more, the null page 0.
        routes: where the routes of sequences that record them go; None: nowhere.
        steps: whose input buffers are in use at once.
    """

    def __init__(
        self,
        model: RunnableModel,
        rows: RowTable,
        stats: EngineStats,
        *,
        num_pages: int,
        max_num_batched_tokens: int,
        routes: PageRoutes | None = None,
        steps: int = 1,
    ) -> None:
        self.model = model
        self._rows = rows
        self._routes = routes
        self._stats = stats
        self._num_pages = num_pages
        self._k_pages_LPSHD: torch.Tensor | None = None
        self._v_pages_LPSHD: torch.Tensor | None = None
        max_rows = -(-max_num_batched_tokens // ROW_FLOOR) * ROW_FLOOR
        max_seqs, max_pages = rows.page_SM.shape
        self._inputs = deque(_Inputs(max_rows, max_seqs, max_pages) for _ in range(steps))

    @staticmethod
    def page_bytes(model: RunnableModel, page_size: int) -> int:
        """Bytes of one page: keys and values of all layers."""
        layers, kv_heads, head_dim = model.kv_shape
        elements = layers * page_size * kv_heads * head_dim
        return 2 * elements * torch.empty(0, dtype=model.dtype).element_size()

    @property
    def has_kv_cache(self) -> bool:
        return self._k_pages_LPSHD is not None

    def allocate_kv_cache(self) -> None:
        """Make the KV tensors, zeroed: a masked key contributes an exact zero only if it is finite."""
        layers, kv_heads, head_dim = self.model.kv_shape
        shape = (layers, self._num_pages + 1, self._rows.page_size, kv_heads, head_dim)
        self._k_pages_LPSHD = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        self._v_pages_LPSHD = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def release_kv_cache(self) -> None:
        self._k_pages_LPSHD = self._v_pages_LPSHD = None

    def _clean(self, pages_P: np.ndarray) -> None:
        """Zero pages that may hold numbers that are not finite, in all layers."""
        if not len(pages_P):
            return
        index_P = torch.from_numpy(pages_P)
        if self.model.device.type == "cuda":  # from pinned memory, so that the host does not wait
            index_P = index_P.pin_memory().to(self.model.device, non_blocking=True)
        for pages_LPSHD in (self._k_pages_LPSHD, self._v_pages_LPSHD):
            assert pages_LPSHD is not None
            pages_LPSHD.index_fill_(1, index_P, 0.0)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> DrawnStep | None:
        """Run the step; what it drew, or None if no sequence of it reached its last known token."""
        if self._k_pages_LPSHD is None or self._v_pages_LPSHD is None:
            raise EngineStateError("the KV cache is released; call resume_kv_cache() first")
        clock, stats, model = time.perf_counter, self._stats, self.model
        began = clock()
        self._clean(plan.unclean_P)
        token_ids_T, batch = self._build(plan)
        built = clock()
        slots_B = plan.slots_B[plan.draws_B]
        recording = self._recording(plan)
        chosen: list[torch.Tensor] | None = None if recording is None else []
        hidden_TD = model.forward(token_ids_T, batch, self._k_pages_LPSHD, self._v_pages_LPSHD, chosen)
        if recording is not None:
            self._keep_routes(plan, recording, chosen)
        if not plan.draws_B.any():
            stats.build_seconds += built - began
            stats.forward_seconds += clock() - built
            return None
        last_B = torch.from_numpy(np.cumsum(plan.count_B)[plan.draws_B] - 1).to(hidden_TD.device)
        ran = clock()
        sampling = sampling_tensors(self._rows, slots_B, hidden_TD.device)
        sampled = model.draw(hidden_TD[last_B], sampling)
        drawn = DrawnStep(
            sampled.token_B.cpu().numpy(),
            sampled.log_prob_B.cpu().numpy(),
            sampled.kept_mass_B.cpu().numpy(),
            sampled.top1_B.cpu().numpy(),
        )
        stats.build_seconds += built - began
        stats.forward_seconds += ran - built
        stats.sample_seconds += clock() - ran
        return drawn

    def _recording(self, plan: StepPlan) -> Recording | None:
        """The rows of the sequences that record their routes; None where none of the step's does."""
        requests, rows, page_size = self._rows.requests, self._rows, self._rows.page_size
        if self._routes is None:
            return None
        found = [(request := requests[slot]) is not None and request.params.record_routes for slot in plan.slots_B]
        if not any(found):
            return None
        end_B = np.cumsum(plan.count_B)
        row_R = np.flatnonzero(np.repeat(found, plan.count_B))
        place_R = np.searchsorted(end_B, row_R, side="right")
        position_R = row_R - (end_B - plan.count_B - plan.start_B)[place_R]
        page_R = rows.page_SM[plan.slots_B[place_R], position_R // page_size]
        return Recording(row_R, place_R, page_R * page_size + position_R % page_size)

    def _keep_routes(self, plan: StepPlan, recording: Recording, chosen: list[torch.Tensor] | None) -> None:
        assert self._routes is not None
        if chosen:
            self._write_routes(plan, recording, recorded_routes(chosen, recording))
        else:
            self._routes.never()

    def _write_routes(self, plan: StepPlan, recording: Recording, routes_RLK: torch.Tensor) -> None:
        """Keep the routes of sequences that still hold the slots they ran in; pages of others have new owners."""
        assert self._routes is not None
        meant_R = (self._rows.tenancy_S[plan.slots_B] == plan.tenancy_B)[recording.place_R]
        self._routes.write(recording.slot_R[meant_R], routes_RLK.numpy()[meant_R])

    def _build(self, plan: StepPlan) -> tuple[torch.Tensor, PagedBatch]:
        """The step's rows, padded to a multiple of ROW_FLOOR with rows that write to the null page."""
        rows, page_size = self._rows, self._rows.page_size
        inputs = self._inputs[0]
        self._inputs.rotate()
        slots_B, start_B, count_B = plan.slots_B, plan.start_B, plan.count_B
        sequences = len(slots_B)
        end_B = np.cumsum(count_B)
        used = int(end_B[-1])
        padded = -(-used // ROW_FLOOR) * ROW_FLOOR

        token_T, position_T, slot_T = inputs.token_T.array, inputs.position_T.array, inputs.slot_T.array
        if used == sequences:  # one row each, the common decode step
            position, slots = start_B, slots_B
        else:
            position = np.arange(used) - np.repeat(end_B - count_B - start_B, count_B)
            slots = np.repeat(slots_B, count_B)
        token_T[:used] = rows.token_SL[slots, position]
        position_T[:used] = position
        slot_T[:used] = rows.page_SM[slots, position // page_size] * page_size + position % page_size
        for array in (token_T, position_T, slot_T):
            array[used:padded] = 0

        inputs.query_start_S1.array[1 : sequences + 1] = end_B
        np.add(start_B, count_B, out=inputs.context_len_S.array[:sequences])
        pages = -(-int(inputs.context_len_S.array[:sequences].max()) // page_size)
        block_table = inputs.block_table_SM.tensor[: sequences * pages].view(sequences, pages)
        np.take(rows.page_SM[:, :pages], slots_B, axis=0, out=block_table.numpy(), mode="clip")

        device = self.model.device
        batch = PagedBatch(
            query_start_S1=inputs.query_start_S1.tensor[: sequences + 1],
            context_len_S=inputs.context_len_S.tensor[:sequences],
            block_table_SM=block_table,
            slot_T=inputs.slot_T.tensor[:padded],
            position_T=inputs.position_T.tensor[:padded],
            device=device,
        )
        return inputs.token_T.tensor[:padded].to(device), batch


@dataclass(frozen=True)
class Recording:
    """The R rows of a step whose routes are recorded.

    row_R: among the step's rows; place_R: of the sequence in the plan; slot_R: in the pool's pages.
    """

    row_R: np.ndarray
    place_R: np.ndarray
    slot_R: np.ndarray


def recorded_routes(chosen: list[torch.Tensor], recording: Recording) -> torch.Tensor:
    """int16 (rows, layers, k) on the host: the experts chosen in the recorded rows."""
    row_R = torch.from_numpy(recording.row_R).to(chosen[0].device)
    return as_routes([expert_TK[row_R] for expert_TK in chosen]).cpu()
