"""verl's V1 trainers with verl_tim's eyes and correction: start-up checks, manifest, gate and `tim/*` in every step;
rejection and weights in the worker's loss.

`TimTrainer` is what the three of them share, the synchronous one is here, the asynchronous ones in `trainer_v1_async`.
Does nothing of its own for a run that uses nothing of verl_tim (`uses_verl_tim`).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.utils.padding import response_from_nested, response_to_nested

from verl_tim.correction import RolloutCorrectionConfig
from verl_tim.plugin import ensure_registered, loaded
from verl_tim.rollout.one_server import client_of
from verl_tim.rollout.recorded import RECORDED_FIELD, Recorded
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD, raise_route_errors
from verl_tim.rollout.versions import UNKNOWN, token_versions
from verl_tim.training.baseline import counted_rows, take_kept_baseline, whole_sessions
from verl_tim.training.baseline_gate import StopAfterCheckpoint
from verl_tim.training.checkpoints import settle
from verl_tim.training.choices import marked_rows
from verl_tim.training.config import TimConfig, uses_verl_tim
from verl_tim.training.correction_config import install, optimizer_steps
from verl_tim.training.correction_loss import OLD_FORWARD_FIELD
from verl_tim.training.correction_report import REPORT_METRIC, LossReport, step_metrics
from verl_tim.training.errands import Errand
from verl_tim.training.forward_records import FORWARD_METRIC, SAMPLED_FIELD, ForwardRecord
from verl_tim.training.lean_workers import LeanWorkers
from verl_tim.training.loaders import workers_ended
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.processes import RunProcesses, RunRoles
from verl_tim.training.prompt_uids import prompt_order
from verl_tim.training.records import RECORD_METRIC, ROW_FIELD, LossRecord, take
from verl_tim.training.replay_report import REPLAY_METRIC, ReplayReport, replay_metrics
from verl_tim.training.reuse import LogProbReuse, ReuseError
from verl_tim.training.reward_kl import missing_is_neutral
from verl_tim.training.start_lines import SERVERS_ANSWER, say
from verl_tim.training.startup import (
    RolloutWatch,
    begin_deterministic,
    check_cluster,
    forget_later_steps,
    make_observer,
    record_run,
    watch_flags,
)
from verl_tim.training.tracking import closed_at_the_end

# What is final before the step's first forward; the mask, too, since verl's own rejection does not touch it
# (`plugin.patch_native_correction`).
EARLY_FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
    "reward_model",
    "data_source",
    "index",
)
_GROUPS = ("actor_rollout_wg", "ref_policy_wg")
EARLY_DELAY = 0.5  # seconds; the workers read the batch when they begin, and are not to be kept waiting

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class _Base(StopAfterCheckpoint, PPOTrainer): ...
else:
    _Base = StopAfterCheckpoint


class TimTrainer(_Base):
    """A mixin in front of one of verl's V1 trainers.

    verl's `separate_async` takes a step's batch in several parts, each with an update of its own. The gate looks at
    each part before its update; metrics, and the token dump, are of the whole.

    Attributes:
        asynchronous: tokens may have been drawn under older weights than those that the step starts from.
    """

    asynchronous = False

    def __init__(self, config):
        self.tim: TimConfig | None = None
        self.observer: StepObserver | None = None
        self.watch: RolloutWatch | None = None
        self.processes: RunProcesses | None = None
        self.correction: RolloutCorrectionConfig | None = None
        self.reuse: LogProbReuse | None = None
        self._recorded: list[Recorded | None] = []  # of the step's batch, by row
        self._extra: list[Mapping[str, Any]] = []  # what the rollout said of each row beside its tokens
        self._submitted: dict[str, int] = {}  # uid -> place in the order of the data, of prompts under way
        self._places = 0  # prompts submitted so far
        self._parts: list[_Part] = []  # of the step under way, updated
        self._early: tuple[list[str], Errand[TensorDict]] | None = None  # keys of the step's batch, `EARLY_FIELDS`
        self._counters: Counter[str] = Counter()  # of the rollout, since the step began
        if uses_verl_tim(config):
            ensure_registered()
            self.tim = TimConfig.of(config)
            self.correction = install(config)
            self.reuse = LogProbReuse.of(self.tim.reuse_rollout_log_probs)
            begin_deterministic(self.tim, config, self)
        super().__init__(config)
        if self.tim is not None:
            if self.tim.deterministic:
                self._sample_in_order()
            # verl looks every 2 s (replay_buffer.py:144), longer than a whole step of a small model takes.
            self.replay_buffer.poll_interval = self.tim.poll_interval

    def _sample_in_order(self) -> None:
        """verl 0.9.1, trainer/ppo/v1/replay_buffer.py:422, 593: `sample` gives rows in the order in which they ended.

        In a deterministic run they come in the order of their names, which is that of the data (`PromptUids`), in
        validation too, where means are taken and generations shown in the buffer's order. The buffer may be a class of
        the user's (`trainer.v1.sampler.custom_sampler`), so its method is wrapped, not replaced. Unnecessary once verl
        sorts a sampled batch. No upstream issue is known.
        """
        sample = self.replay_buffer.sample

        def in_order(*args: Any, **kwargs: Any) -> Any:
            batch, metrics = sample(*args, **kwargs)
            batch.reorder(sorted(range(len(batch.keys)), key=lambda row: prompt_order(batch.keys[row])))
            return batch, metrics

        self.replay_buffer.sample = in_order

    def init(self) -> None:
        if self.tim is not None:
            check_cluster(self.config)
        super().init()
        if self.tim is not None:
            say(SERVERS_ANSWER)
            self.observer = make_observer(self.tim, self.config, self.tokenizer, self.reuse)
            self.watch = RolloutWatch(self.config, self._rollout_server_managers())

    def _load_checkpoint(self) -> None:
        if self.tim is not None:
            settle(self.config)
        super()._load_checkpoint()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if self.tim is not None:
            uids = [_plain(uid) for uid in batch["uid"]]
            self._submitted.update({uid: self._places + place for place, uid in enumerate(uids)})
            self._places += len(uids)
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        # the first thing verl does with a sampled batch
        if self.watch is not None:
            self._counters.update(self.watch.check())
            # Rows come in the order in which they were finished. In the order of the data a rerun repeats itself: which
            # rows make a mini-batch decides the weights.
            batch.reorder(in_order_of_data(batch.keys, self._submitted))
            # of an asynchronous trainer's prompts some are still under way; what left the replay buffer is not
            under_way = self.replay_buffer.prompt_global_steps["train"] if self.asynchronous else ()
            self._submitted = {uid: place for uid, place in self._submitted.items() if uid in under_way}
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        parts, self._parts = self._parts, []
        if self.watch is not None:
            metrics.update(self._counters)
            self._counters.clear()
        if parts and self.observer is not None and self.correction is not None:
            with self.observer.timed():
                whole = _Part.joined(parts)
                metrics.update(step_metrics(whole.reports, self.correction, reused=self._reuses))
                metrics.update(replay_metrics(whole.replays))
                records, reports, forwards = whole.records, whole.reports, whole.forwards
                metrics.update(self.observer.after_update(self.global_steps, whole.batch, records, reports, forwards))
            metrics.update(self.observer.timing())
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except Exception:
            # verl only says that nothing could be sampled; if requests failed, that is the cause
            if self.watch is not None:
                self.watch.check()
            raise

    def fit(self, agent_loop_manager: Any) -> None:
        if self.tim is not None:
            roles = RunRoles.of(self, self._rollout_server_managers(), agent_loop_manager)
            self.processes = record_run(self.tim, self.config, roles, resumed_from=self.global_steps or None)
            forget_later_steps(self.tim, self.global_steps)
        # verl's agent loop imports its trainers, and so this module
        from verl_tim.rollout.agent_loop_v1 import SeededManagerV1

        if self.watch is not None and isinstance(agent_loop_manager, SeededManagerV1):
            self.watch.watch_loops(agent_loop_manager.agent_loop_workers)
        named = nullcontext() if self.processes is None else self.processes.named_when_dead()
        with closed_at_the_end(), workers_ended(self), named:
            super().fit(agent_loop_manager)
        self._raise_if_stopped(at_end=True)

    def on_step_begin(self) -> None:
        self._raise_if_stopped()
        super().on_step_begin()

    def on_step_end(self) -> None:
        self._save_if_stopped()
        super().on_step_end()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        if self.watch is not None:
            self.watch.check()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._lean_workers():
            return self._old_log_probs(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._lean_workers():
            return super()._compute_ref_log_prob(batch, metrics)

    @contextmanager
    def _lean_workers(self) -> Iterator[None]:
        """Inside the block worker groups hand on what their workers read of a batch (`lean_workers`)."""
        groups = {name: vars(self)[name] for name in _GROUPS if vars(self).get(name) and self.tim is not None}
        for name, group in groups.items():
            setattr(self, name, LeanWorkers(group, text_only=self.processor is None))
        try:
            yield
        finally:
            for name, group in groups.items():
                setattr(self, name, group)

    def _old_log_probs(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.observer is not None:
            # before the step's first forward; from here on verl keeps the order of the rows
            fields = self._fields(batch, "extra_fields")
            self._extra = [_plain(entry) or {} for entry in fields["extra_fields"]]
            raise_route_errors(entry.get(ROUTE_ERROR_FIELD) for entry in self._extra)
            self._recorded = [Recorded.of_wire(entry.get(RECORDED_FIELD)) for entry in self._extra]
            rows = torch.arange(len(batch.keys)).unsqueeze(1)
            batch = self._put(batch, {ROW_FIELD: rows, SAMPLED_FIELD: marked_rows(self._recorded)})
            if self.config.trainer.critic_warmup <= self.global_steps:  # else verl leaves the update out
                early = self.observer.errands.send(self._fields, batch, *EARLY_FIELDS, delay=EARLY_DELAY)
                self._early = list(batch.keys), early
        if self.correction is not None and self.correction.old_forward:
            batch.extra_info.update(
                calculate_entropy=False,
                compute_loss=False,
                temperature=self.config.actor_rollout_ref.rollout.temperature,
            )
            self.actor_rollout_wg.compute_log_prob(batch)
            data = self._fields(batch, "log_probs", "response_mask")
            old = response_from_nested(data["log_probs"], data["response_mask"])
            batch = self._put(batch, {OLD_FORWARD_FIELD: old})
        if self._reuses:
            return self._take_old_log_probs(batch)
        began = time.perf_counter()
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.reuse is not None:
            self.reuse.timed(time.perf_counter() - began)
        return batch

    @property
    def _reuses(self) -> bool:
        """Whether this step takes old log-probs from the rollout."""
        return self.reuse is not None and not self.reuse.audits(self.global_steps)

    def _take_old_log_probs(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The rollout's log-probs as old ones; entropy and verl's own difference metrics come with the pass only."""
        data = self._fields(batch, "rollout_log_probs")
        if "rollout_log_probs" not in data.keys():  # noqa: SIM118 (a TensorDict is no dict)
            raise ReuseError(
                f"step {self.global_steps}: the rollout recorded no log-probs to take: set "
                "actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        return self._put(batch, {"old_log_probs": data["rollout_log_probs"]})

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.tim is None:
            return super()._compute_advantage(batch, metrics)
        with missing_is_neutral():
            batch = super()._compute_advantage(batch, metrics)
        if self.correction is None or self.correction.baseline_scope == "all":
            return batch
        algorithm = self.config.algorithm
        rewards = "token_level_rewards" if algorithm.use_kl_in_reward else "rm_scores"
        names = ("uid", "response_mask", rewards, "rollout_log_probs", "old_log_probs", "values")
        fields = self._fields(batch, *names, "advantages", "returns")
        mask = fields["response_mask"]
        uids = np.array(fields.pop("uid").tolist(), dtype=object)
        data = DataProto(batch=fields.to_padded_tensor(), non_tensor_batch={"uid": uids})
        data.batch["token_level_rewards"] = data.batch[rewards]
        counted_B = counted_rows(self.correction, data)
        if algorithm.adv_estimator == "grpo":
            counted_B = whole_sessions(counted_B, batch.keys)

        def compute(part: DataProto, rows: list[int]) -> DataProto:
            return compute_advantage_for_multi_trajectories(
                part,
                batch_keys=[batch.keys[row] for row in rows],
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
                config=algorithm,
            )

        take_kept_baseline(data, counted_B, algorithm.adv_estimator, compute)
        kept = {name: response_to_nested(data.batch[name], mask) for name in ("advantages", "returns")}
        return self._put(batch, kept)

    def _fields(self, batch: KVBatchMeta, *names: str) -> TensorDict:
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))

    def _put(self, batch: KVBatchMeta, fields: dict[str, torch.Tensor]) -> KVBatchMeta:
        """The returned meta names the new fields, too, and a worker gets the fields that the meta names."""
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch.keys))
        )

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.observer is None or self.correction is None:
            return super()._update_actor(batch, metrics)
        # an agent may give a prompt several outputs, and more rows are more optimiser steps
        self.correction.check_schedule(optimizer_steps(self.config, len(batch.keys)) * self.parameter_sync_step)
        with self.observer.timed():
            step_batch = self._step_batch(batch)
            self.observer.before_update(self.global_steps, step_batch, whole=self.parameter_sync_step == 1)
        worker_group = self.actor_rollout_wg
        taker = _Taker(LeanWorkers(worker_group, text_only=self.processor is None))
        self.actor_rollout_wg = taker
        try:
            with self._stale_masked(batch, step_batch, metrics):
                batch = super()._update_actor(batch, metrics)
        finally:
            self.actor_rollout_wg = worker_group
        assert self.tim is not None
        watch_flags(self.tim, self, self.global_steps)
        part = _Part(step_batch, taker.records, taker.reports, taker.forwards, taker.replays)
        with self.observer.timed():
            self.observer.dump_update(self.global_steps, part.records, part.reports)
        self._parts.append(part)
        return batch

    @contextmanager
    def _stale_masked(self, batch: KVBatchMeta, step_batch: StepBatch, metrics: dict) -> Iterator[None]:
        """Leave tokens of too old weights out of the loss inside the block; the batch gets its mask back.

        Rewards and advantages are computed by then, over all tokens, as with every rejection.
        """
        assert self.tim is not None
        limit = self.tim.partial_rollout.max_version_lag
        if limit is None or step_batch.versions_BT is None:
            yield
            return
        assert self.observer is not None
        kept_BT = self.observer.within_lag(self.global_steps, step_batch, limit)
        whole_BT = step_batch.response_mask_BT
        metrics["tim/masked_stale_tokens"] = float(int((whole_BT.bool() & ~kept_BT).sum()))
        names = ("response_mask", "loss_mask")
        before = self._fields(batch, *names)
        masked = response_to_nested(whole_BT * kept_BT, before["response_mask"])
        self._put(batch, dict.fromkeys(names, masked))
        yield
        self._put(batch, {name: before[name] for name in names})

    def _step_batch(self, batch: KVBatchMeta) -> StepBatch:
        """The batch as padded tensors; all rows, padding rows with an empty mask."""
        assert self.observer is not None
        scored = OLD_FORWARD_FIELD if self.observer.bypass else "old_log_probs"
        late = ["advantages", *([] if self._reuses else [scored])]
        early, self._early = self._early, None
        if early is not None and early[0] == list(batch.keys):
            parts = [self._fields(batch, *late), early[1].result()]
        else:
            parts = [self._fields(batch, *late, *EARLY_FIELDS)]
        data: dict[str, Any] = {name: part[name] for part in parts for name in part.keys()}  # noqa: SIM118 (a TensorDict)
        prompts = [ids.numpy() for ids in data["prompts"].unbind()]
        responses = [ids.numpy() for ids in data["responses"].unbind()]

        def padded(name: str) -> torch.Tensor | None:
            return data[name].to_padded_tensor(padding=0) if name in data else None

        whole = padded("response_mask")
        rollout = padded("rollout_log_probs")
        advantages, scores = padded("advantages"), padded("rm_scores")
        assert whole is not None
        assert advantages is not None
        assert scores is not None
        versions = [tag.get("min_global_steps") for tag in batch.tags]
        extra: dict[str, Sequence[Any]] = {}
        if "reward_model" in data:
            extra["ground_truth"] = [entry.get("ground_truth") for entry in map(_plain, data["reward_model"])]
        for name in ("data_source", "index"):
            if name in data:
                extra[name] = [_plain(entry) for entry in data[name]]
        return StepBatch(
            keys=list(batch.keys),
            old_log_probs_BT=None if self._reuses else padded(scored),
            rollout_log_probs_BT=rollout,
            response_mask_BT=whole,
            advantages_BT=advantages,
            scores_B=scores.sum(dim=1),
            prompts=prompts,
            responses=responses,
            uids=[key.rsplit("_", 2)[0] for key in batch.keys],
            recorded=self._recorded,
            versions_B=None if any(v is None for v in versions) else torch.tensor(versions),
            versions_BT=self._token_versions(whole, responses) if self.asynchronous else None,
            data=extra,
        )

    def _token_versions(self, mask_BT: torch.Tensor, responses: Sequence[np.ndarray]) -> torch.Tensor:
        versions_BT = torch.full(mask_BT.shape, UNKNOWN, dtype=torch.int64)
        for row, (fields, response) in enumerate(zip(self._extra, responses, strict=True)):
            versions_BT[row, : len(response)] = torch.from_numpy(token_versions(fields, len(response)))
        return versions_BT


class TimTrainerSync(TimTrainer, PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync` as verl_tim registers it."""

    def get_llm_client(self) -> Any:
        return super().get_llm_client() if self.tim is None else client_of(self.llm_server_manager)


@dataclass(frozen=True)
class _Part:
    """One update of a step: the batch, and what the workers said of it."""

    batch: StepBatch
    records: list[LossRecord]
    reports: list[LossReport]
    forwards: list[ForwardRecord]
    replays: list[ReplayReport]

    @classmethod
    def joined(cls, parts: Sequence[_Part]) -> _Part:
        """Several updates as one, with rows numbered through."""
        if len(parts) == 1:
            return parts[0]
        first = [0, *itertools.accumulate(len(part.batch) for part in parts)]
        return cls(
            StepBatch.joined([part.batch for part in parts]),
            [replace(r, row_B=r.row_B + start) for start, p in zip(first, parts, strict=False) for r in p.records],
            [report for part in parts for report in part.reports],
            [replace(f, row=f.row + start) for start, p in zip(first, parts, strict=False) for f in p.forwards],
            [report for part in parts for report in part.replays],
        )


def in_order_of_data(keys: Sequence[str], submitted: Mapping[str, int]) -> list[int]:
    """Row numbers sorted by the prompt's place in the data, the session and the output."""
    behind = max(submitted.values(), default=0) + 1

    def place(row: int) -> tuple[int, int, int]:
        uid, session, index = prompt_order(keys[row])
        return submitted.get(uid, behind), session, index

    return sorted(range(len(keys)), key=place)


def _plain(entry: Any) -> Any:
    """A value of a non-tensor field; TransferQueue's backends wrap it or not."""
    return getattr(entry, "data", entry)


class _Taker:
    """The actor's worker group during one update: takes records and reports out before verl reduces the metrics."""

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        self.records: list[LossRecord] = []
        self.reports: list[LossReport] = []
        self.forwards: list[ForwardRecord] = []
        self.replays: list[ReplayReport] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker_group, name)

    def update_actor(self, batch: Any) -> Any:
        output = self._worker_group.update_actor(batch)
        self.records, self.reports, self.forwards, self.replays = (
            take(output["metrics"], name) for name in (RECORD_METRIC, REPORT_METRIC, FORWARD_METRIC, REPLAY_METRIC)
        )
        return output


loaded(__name__)
