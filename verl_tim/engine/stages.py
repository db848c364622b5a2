"""A pipeline's steps on a CPU: as many under way as there are stages, each stage at work on another.

All ranks keep time by steps. In step n a stage works on the plan that was made `stage` steps before, passes its hidden
states on, and all learn what the last stage drew of the plan that it has just finished. Sequences of the plans under
way are disjoint where they decode (`Scheduler`), so that no stage waits for a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_tim.engine.decode_io import RESULTS, write_results
from verl_tim.engine.errors import EngineStateError
from verl_tim.engine.page_routes import PageRoutes
from verl_tim.engine.parallel import Ranks
from verl_tim.engine.rows import RowTable
from verl_tim.engine.runner import ModelRunner, Recording, RunnableModel, recorded_routes
from verl_tim.engine.sampler import sampling_tensors
from verl_tim.engine.scheduler import DrawnStep, StepPlan
from verl_tim.engine.stats import EngineStats
from verl_tim.numerics.paging import PagedBatch
from verl_tim.numerics.sampling import SamplingTensors


@dataclass
class _Prepared:
    """A plan with everything that its stages read of the rows as they were when it was made.

    last_B: rows of the step from which a token is drawn; slots_B: their slots; recording: the rows whose routes are
    recorded.
    """

    plan: StepPlan
    token_ids_T: torch.Tensor
    batch: PagedBatch
    last_B: torch.Tensor
    slots_B: np.ndarray
    sampling: SamplingTensors
    recording: Recording | None
    chosen: list[torch.Tensor] = field(default_factory=list)  # of this stage's sparse layers


class StageRunner(ModelRunner):
    """Model, KV tensors and the plans under way of one rank of a pipeline."""

    def __init__(
        self,
        model: RunnableModel,
        rows: RowTable,
        stats: EngineStats,
        ranks: Ranks,
        *,
        num_pages: int,
        max_num_batched_tokens: int,
        routes: PageRoutes,
    ) -> None:
        stages = ranks.place.stages
        super().__init__(
            model,
            rows,
            stats,
            num_pages=num_pages,
            max_num_batched_tokens=max_num_batched_tokens,
            routes=routes,
            steps=stages + 1,
        )
        self._ranks = ranks
        self._under_way: deque[_Prepared | None] = deque([None] * stages, maxlen=stages)  # by stage that is at it
        self._received: torch.Tensor | None = None

    @property
    def is_busy(self) -> bool:
        """Whether plans are under way."""
        return any(prepared is not None for prepared in self._under_way)

    @torch.inference_mode()
    def tick(self, plan: StepPlan | None) -> tuple[StepPlan, DrawnStep | None] | None:
        """Start a plan, if there is one, and move all others on by a stage: the plan that ended, with what it drew.

        Book a plan (`Scheduler.advance`) after this, and its results when they come.

        Raises:
            EngineStateError: the KV cache is released.
        """
        if self._k_pages_LPSHD is None or self._v_pages_LPSHD is None:
            raise EngineStateError("the KV cache is released; call resume_kv_cache() first")
        place, under_way = self._ranks.place, self._under_way
        under_way.appendleft(None if plan is None else self._prepare(plan))
        mine, result = under_way[place.stage], None
        if mine is not None:
            self._clean(mine.plan.unclean_P)  # not before: the plan ahead of it may still write there
            result = self.model.forward(
                mine.token_ids_T,
                mine.batch,
                self._k_pages_LPSHD,
                self._v_pages_LPSHD,
                None if mine.recording is None else mine.chosen,
                self._received,
            )
        if not place.is_first and (coming := under_way[place.stage - 1]) is not None:
            self._received = self._hidden(coming)
            self._ranks.receive(self._received)
        if result is not None and not place.is_last:
            self._ranks.send(result)
        done = under_way[-1]
        if done is None:
            return None
        under_way[-1] = None
        if done.recording is not None:
            self._gather_routes(done, done.recording)
        return done.plan, self._drawn(done, result)

    def _prepare(self, plan: StepPlan) -> _Prepared:
        token_ids_T, batch = self._build(plan)
        slots_B = plan.slots_B[plan.draws_B]
        last_B = torch.from_numpy(np.cumsum(plan.count_B)[plan.draws_B] - 1)
        sampling = sampling_tensors(self._rows, slots_B, self.model.device)
        return _Prepared(plan, token_ids_T, batch, last_B, slots_B, sampling, self._recording(plan))

    def _hidden(self, prepared: _Prepared) -> torch.Tensor:
        """Room for what a stage passes on."""
        rows = prepared.token_ids_T.shape[0]
        return torch.empty(2, rows, self.model.config.hidden_size, dtype=self.model.dtype)

    def _drawn(self, done: _Prepared, hidden_TD: torch.Tensor | None) -> DrawnStep | None:
        """What the last stage draws, on every rank."""
        if not len(done.slots_B):
            return None
        ranks = self._ranks
        words = torch.empty(RESULTS, len(done.slots_B), dtype=torch.int32)
        if ranks.place.is_last:
            assert hidden_TD is not None
            write_results(words, self.model.draw(hidden_TD[done.last_B], done.sampling))
        token_B, log_prob_B, top1_B, mass_B = ranks.from_stage(words, ranks.place.stages - 1).numpy()
        return DrawnStep(token_B, log_prob_B.view(np.float32), mass_B.view(np.float32), top1_B)

    def _gather_routes(self, done: _Prepared, recording: Recording) -> None:
        """Routes through all stages' sparse layers, on every rank."""
        assert self._routes is not None
        ranks, config, found = self._ranks, self.model.config, []
        if config.moe is None:
            self._routes.never()
            return
        for stage in range(ranks.place.stages):
            layers = ranks.place_of(stage).layers(config.num_layers)
            sparse = sum(config.is_moe_layer(index) for index in layers)
            if not sparse:
                continue
            if stage == ranks.place.stage:
                routes_RLK = recorded_routes(done.chosen, recording)
            else:
                routes_RLK = torch.empty(len(recording.row_R), sparse, config.moe.top_k, dtype=torch.int16)
            found.append(ranks.from_stage(routes_RLK, stage))
        if found:
            self._write_routes(done.plan, recording, torch.cat(found, 1))
