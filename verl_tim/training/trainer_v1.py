"""verl's synchronous V1 trainer with verl_tim's eyes: start-up checks, manifest, gate and `tim/*` in every step.

Does nothing of its own for a run that uses nothing of verl_tim (`uses_verl_tim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tim.plugin import ensure_registered, loaded
from verl_tim.training.config import TimConfig, uses_verl_tim
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.records import ROW_FIELD, LossRecord, take_records
from verl_tim.training.startup import RolloutWatch, check_cluster, make_observer, record_run


class TimTrainerSync(PPOTrainerSync):
    """`trainer.v1.trainer_mode=sync` as verl_tim registers it."""

    def __init__(self, config):
        self.tim: TimConfig | None = None
        self.observer: StepObserver | None = None
        self.watch: RolloutWatch | None = None
        self._whole_mask: torch.Tensor | None = None
        self._submitted: dict[str, int] = {}  # uid -> place in the order of the data, of prompts under way
        if uses_verl_tim(config):
            ensure_registered()
            self.tim = TimConfig.of(config)
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

    def on_validate_end(self) -> None:
        super().on_validate_end()
        if self.watch is not None:
            self.watch.check()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.observer is not None:
            # verl's rejection writes a smaller response_mask over this one in _compute_advantage
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
            self._whole_mask = data["response_mask"].to_padded_tensor(padding=0)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.observer is None:
            return super()._update_actor(batch, metrics)
        step_batch = self._step_batch(batch)
        self.observer.before_update(self.global_steps, step_batch)
        rows = torch.arange(len(batch.keys)).unsqueeze(1)
        # the returned meta names the new field, too, and a worker gets the fields that the meta names
        batch = tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({ROW_FIELD: rows}, batch_size=len(batch.keys)),
        )
        worker_group = self.actor_rollout_wg
        recorder = _RecordTaker(worker_group)
        self.actor_rollout_wg = recorder
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            self.actor_rollout_wg = worker_group
        metrics.update(self.observer.after_update(self.global_steps, step_batch, recorder.records))
        return batch

    def _step_batch(self, batch: KVBatchMeta) -> StepBatch:
        """The batch as padded tensors; all rows, padding rows with an empty mask."""
        fields = [
            "prompts",
            "responses",
            "response_mask",
            "rollout_log_probs",
            "old_log_probs",
            "advantages",
            "rm_scores",
            "reward_model",
            "data_source",
            "index",
        ]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        prompts = [ids.tolist() for ids in data["prompts"].unbind()]
        responses = [ids.tolist() for ids in data["responses"].unbind()]

        def padded(name: str) -> torch.Tensor | None:
            return data[name].to_padded_tensor(padding=0) if name in data.keys() else None  # noqa: SIM118

        kept = padded("response_mask")
        rollout = padded("rollout_log_probs")
        old = padded("old_log_probs")
        advantages, scores = padded("advantages"), padded("rm_scores")
        whole = self._whole_mask
        assert self.observer is not None
        assert kept is not None
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
            old_log_probs_BT=None if self.observer.bypass else old,
            rollout_log_probs_BT=rollout,
            response_mask_BT=whole,
            kept_mask_BT=None if self.observer.bypass else kept,
            advantages_BT=advantages,
            scores_B=scores.sum(dim=1),
            prompts=prompts,
            responses=responses,
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


class _RecordTaker:
    """The actor's worker group during one update: takes the loss records out before verl reduces the metrics."""

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        self.records: list[LossRecord] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker_group, name)

    def update_actor(self, batch: Any) -> Any:
        output = self._worker_group.update_actor(batch)
        self.records = take_records(output["metrics"])
        return output


loaded(__name__)
