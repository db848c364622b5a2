"""verl's synchronous V1 trainer with verl_tim's eyes and correction: start-up checks, manifest, gate and `tim/*` in
every step; rejection and weights in the worker's loss.

Does nothing of its own for a run that uses nothing of verl_tim (`uses_verl_tim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from verl_tim.rollout.recorded import RECORDED_FIELD, Recorded
from verl_tim.training.baseline import counted_rows, take_kept_baseline, whole_sessions
from verl_tim.training.baseline_gate import StopAfterCheckpoint
from verl_tim.training.choices import marked_rows
from verl_tim.training.config import TimConfig, uses_verl_tim
from verl_tim.training.correction_config import install, optimizer_steps
from verl_tim.training.correction_loss import OLD_FORWARD_FIELD
from verl_tim.training.correction_report import REPORT_METRIC, LossReport, step_metrics
from verl_tim.training.forward_records import FORWARD_METRIC, SAMPLED_FIELD, ForwardRecord
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.records import RECORD_METRIC, ROW_FIELD, LossRecord, take
from verl_tim.training.reward_kl import missing_is_neutral
from verl_tim.training.startup import RolloutWatch, check_cluster, make_observer, record_run


class TimTrainerSync(StopAfterCheckpoint, PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync` as verl_tim registers it."""

    def __init__(self, config):
        self.tim: TimConfig | None = None
        self.observer: StepObserver | None = None
        self.watch: RolloutWatch | None = None
        self.correction: RolloutCorrectionConfig | None = None
        self._recorded: list[Recorded | None] = []  # of the step's batch, by row
        self._submitted: dict[str, int] = {}  # uid -> place in the order of the data, of prompts under way
        if uses_verl_tim(config):
            ensure_registered()
            self.tim = TimConfig.of(config)
            self.correction = install(config)
        super().__init__(config)
        if self.tim is not None:
            # verl looks every 2 s (replay_buffer.py:144), longer than a whole step of a small model takes.
            self.replay_buffer.poll_interval = self.tim.poll_interval

    def init(self) -> None:
        if self.tim is not None:
            check_cluster(self.config)
        super().init()
        if self.tim is not None:
            self.observer = make_observer(self.tim, self.config, self.tokenizer)
            self.watch = RolloutWatch(self.config, self.llm_server_manager)
            record_run(self.tim, self.config, self.actor_rollout_wg, self.llm_server_manager)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if self.tim is not None:
            first = len(self._submitted)
            self._submitted.update({_plain(uid): first + place for place, uid in enumerate(batch["uid"])})
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        # the first thing verl does with a sampled batch
        if self.watch is not None:
            metrics.update(self.watch.check())
            # Rows come in the order in which they were finished. In the order of the data a rerun repeats itself: which
            # rows make a mini-batch decides the weights.
            batch.reorder(in_order_of_data(batch.keys, self._submitted))
            self._submitted.clear()
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except Exception:
            # verl only says that nothing could be sampled; if requests failed, that is the cause
            if self.watch is not None:
                self.watch.check()
            raise

    def fit(self, agent_loop_manager: Any) -> None:
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
        if self.observer is not None:
            # before the step's first forward; from here on verl keeps the order of the rows
            fields = self._fields(batch, "extra_fields")
            extra = [_plain(entry) or {} for entry in fields["extra_fields"]]
            self._recorded = [Recorded.of_wire(entry.get(RECORDED_FIELD)) for entry in extra]
            rows = torch.arange(len(batch.keys)).unsqueeze(1)
            batch = self._put(batch, {ROW_FIELD: rows, SAMPLED_FIELD: marked_rows(self._recorded)})
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
        return super()._compute_old_log_prob(batch, metrics)

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
        self.correction.check_schedule(optimizer_steps(self.config, len(batch.keys)))
        step_batch = self._step_batch(batch)
        self.observer.before_update(self.global_steps, step_batch)
        worker_group = self.actor_rollout_wg
        taker = _Taker(worker_group)
        self.actor_rollout_wg = taker
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            self.actor_rollout_wg = worker_group
        metrics.update(step_metrics(taker.reports, self.correction))
        metrics.update(
            self.observer.after_update(self.global_steps, step_batch, taker.records, taker.reports, taker.forwards)
        )
        return batch

    def _step_batch(self, batch: KVBatchMeta) -> StepBatch:
        """The batch as padded tensors; all rows, padding rows with an empty mask."""
        fields = [
            "prompts",
            "responses",
            "response_mask",
            "rollout_log_probs",
            "old_log_probs",
            OLD_FORWARD_FIELD,
            "advantages",
            "rm_scores",
            "reward_model",
            "data_source",
            "index",
        ]
        data = self._fields(batch, *fields)
        prompts = [ids.tolist() for ids in data["prompts"].unbind()]
        responses = [ids.tolist() for ids in data["responses"].unbind()]

        def padded(name: str) -> torch.Tensor | None:
            return data[name].to_padded_tensor(padding=0) if name in data.keys() else None  # noqa: SIM118

        whole = padded("response_mask")
        rollout = padded("rollout_log_probs")
        advantages, scores = padded("advantages"), padded("rm_scores")
        assert self.observer is not None
        assert whole is not None
        assert advantages is not None
        assert scores is not None
        versions = [tag.get("min_global_steps") for tag in batch.tags]
        extra: dict[str, Sequence[Any]] = {}
        if "reward_model" in data.keys():  # noqa: SIM118 (a TensorDict is no dict)
            extra["ground_truth"] = [entry.get("ground_truth") for entry in map(_plain, data["reward_model"])]
        for name in ("data_source", "index"):
            if name in data.keys():  # noqa: SIM118
                extra[name] = [_plain(entry) for entry in data[name]]
        return StepBatch(
            keys=list(batch.keys),
            old_log_probs_BT=padded(OLD_FORWARD_FIELD if self.observer.bypass else "old_log_probs"),
            rollout_log_probs_BT=rollout,
            response_mask_BT=whole,
            advantages_BT=advantages,
            scores_B=scores.sum(dim=1),
            prompts=prompts,
            responses=responses,
            uids=[key.rsplit("_", 2)[0] for key in batch.keys],
            recorded=self._recorded,
            versions_B=None if any(v is None for v in versions) else torch.tensor(versions),
            data=extra,
        )


def in_order_of_data(keys: Sequence[str], submitted: Mapping[str, int]) -> list[int]:
    """Row numbers sorted by the prompt's place in the data, the session and the output ("{uid}_{session}_{index}")."""

    def place(row: int) -> tuple[int, int, int]:
        uid, session, index = keys[row].rsplit("_", 2)
        return submitted.get(uid, len(submitted)), int(session), int(index)

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker_group, name)

    def update_actor(self, batch: Any) -> Any:
        output = self._worker_group.update_actor(batch)
        self.records, self.reports, self.forwards = (
            take(output["metrics"], name) for name in (RECORD_METRIC, REPORT_METRIC, FORWARD_METRIC)
        )
        return output


loaded(__name__)
