"""verl's legacy trainer (`trainer.use_v1=false`) with verl_tim's eyes, as `trainer_v1` has them.

Does nothing of its own for a run that uses nothing of verl_tim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_tim.plugin import ensure_registered
from verl_tim.training.config import TimConfig, uses_verl_tim
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.records import ROW_FIELD, take_records
from verl_tim.training.startup import RolloutWatch, check_cluster, make_observer, record_run


class TimRayPPOTrainer(RayPPOTrainer):
    """`RayPPOTrainer` as verl_tim puts it into `verl.trainer.main_ppo_v0`."""

    def __init__(self, config, *args, **kwargs):
        self.tim: TimConfig | None = None
        self.observer: StepObserver | None = None
        self.watch: RolloutWatch | None = None
        self._whole_mask: torch.Tensor | None = None
        if uses_verl_tim(config):
            ensure_registered()
            self.tim = TimConfig.of(config)
        super().__init__(config, *args, **kwargs)

    def init_workers(self) -> None:
        if self.tim is not None:
            check_cluster(self.config)
        super().init_workers()
        if self.tim is not None:
            self.observer = make_observer(self.tim, self.config, self.tokenizer)
            self.watch = RolloutWatch(self.config, self.llm_server_manager)
            record_run(self.tim, self.config, self.actor_rollout_wg, self.llm_server_manager)

    def _compute_old_log_prob(self, batch: DataProto):
        # verl's rejection puts a smaller response_mask over this one before the update
        self._whole_mask = batch.batch["response_mask"].clone()
        return super()._compute_old_log_prob(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.observer is None or self.watch is None:
            return super()._update_actor(batch)
        counters = self.watch.check()
        step_batch = self._step_batch(batch)
        self.observer.before_update(self.global_steps, step_batch)
        batch.batch[ROW_FIELD] = torch.arange(len(batch)).unsqueeze(1)
        output = super()._update_actor(batch)
        batch.batch.pop(ROW_FIELD)
        records = take_records(output.meta_info["metrics"])
        output.meta_info["metrics"].update(counters)
        output.meta_info["metrics"].update(self.observer.after_update(self.global_steps, step_batch, records))
        return output

    def _step_batch(self, batch: DataProto) -> StepBatch:
        tensors, others = batch.batch, batch.non_tensor_batch
        assert self.observer is not None
        kept = tensors["response_mask"]
        whole = kept if self.observer.bypass or self._whole_mask is None else self._whole_mask
        prompt_width = tensors["prompts"].shape[1]
        attention = tensors["attention_mask"].bool()
        prompts = [
            ids[mask].tolist() for ids, mask in zip(tensors["prompts"], attention[:, :prompt_width], strict=True)
        ]
        responses = [
            ids[mask].tolist() for ids, mask in zip(tensors["responses"], attention[:, prompt_width:], strict=True)
        ]
        extra: dict[str, Sequence[Any]] = {}
        if "reward_model" in others:
            extra["ground_truth"] = [entry.get("ground_truth") for entry in others["reward_model"]]
        if "data_source" in others:
            extra["data_source"] = list(others["data_source"])
        if "extra_info" in others:
            # verl moves the index itself into the generation batch, which is gone by now
            extra["index"] = [(entry or {}).get("index") for entry in others["extra_info"]]
        versions = list(others.get("min_global_steps", ()))
        known = bool(versions) and all(version is not None for version in versions)
        return StepBatch(
            keys=[f"{uid}_{row}" for row, uid in enumerate(others["uid"])],
            old_log_probs_BT=None if self.observer.bypass else tensors["old_log_probs"],
            rollout_log_probs_BT=tensors.get("rollout_log_probs", None),
            response_mask_BT=whole,
            kept_mask_BT=None if self.observer.bypass else kept,
            advantages_BT=tensors["advantages"],
            scores_B=tensors["token_level_scores"].sum(dim=1),
            prompts=prompts,
            responses=responses,
            versions_B=torch.tensor([int(version) for version in versions]) if known else None,
            data=extra,
        )
