"""verl's legacy trainer (`trainer.use_v1=false`) with verl_tim's eyes and correction, as `trainer_v1` has them.

Does nothing of its own for a run that uses nothing of verl_tim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import open_dict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage

from verl_tim.correction import RolloutCorrectionConfig
from verl_tim.plugin import ensure_registered
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD, Recorded
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD, raise_route_errors
from verl_tim.training.baseline import counted_rows, take_kept_baseline
from verl_tim.training.baseline_gate import StopAfterCheckpoint
from verl_tim.training.checkpoints import settle
from verl_tim.training.choices import marked_rows
from verl_tim.training.config import TimConfig, uses_verl_tim
from verl_tim.training.correction_config import install
from verl_tim.training.correction_loss import OLD_FORWARD_FIELD
from verl_tim.training.correction_report import REPORT_METRIC, step_metrics
from verl_tim.training.forward_records import FORWARD_METRIC, SAMPLED_FIELD
from verl_tim.training.loaders import workers_ended
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.processes import RunProcesses, RunRoles
from verl_tim.training.records import RECORD_METRIC, ROW_FIELD, take
from verl_tim.training.replay_report import REPLAY_METRIC, replay_metrics
from verl_tim.training.reuse import LogProbReuse
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


class TimRayPPOTrainer(StopAfterCheckpoint, RayPPOTrainer):
    """`RayPPOTrainer` as verl_tim puts it into `verl.trainer.main_ppo_v0`."""

    def __init__(self, config, *args, **kwargs):
        self.tim: TimConfig | None = None
        self.observer: StepObserver | None = None
        self.watch: RolloutWatch | None = None
        self.processes: RunProcesses | None = None
        self.correction: RolloutCorrectionConfig | None = None
        self.reuse: LogProbReuse | None = None
        if uses_verl_tim(config):
            ensure_registered()
            self.tim = TimConfig.of(config)
            self.correction = install(config)
            self.reuse = LogProbReuse.of(self.tim.reuse_rollout_log_probs)
            begin_deterministic(self.tim, config, self)
        super().__init__(config, *args, **kwargs)

    def init_workers(self) -> None:
        if self.tim is not None:
            check_cluster(self.config)
            # verl loads it later, in `fit`
            resumed_from = settle(self.config)
        super().init_workers()
        if self.tim is not None:
            say(SERVERS_ANSWER)
            self.observer = make_observer(self.tim, self.config, self.tokenizer, self.reuse)
            self.watch = RolloutWatch(self.config, [self.llm_server_manager])
            roles = RunRoles.of(self, [self.llm_server_manager], self.async_rollout_manager)
            self.processes = record_run(self.tim, self.config, roles, resumed_from=resumed_from)
            forget_later_steps(self.tim, resumed_from or 0)

    def _compute_old_log_prob(self, batch: DataProto):
        if self.observer is None:
            return super()._compute_old_log_prob(batch)
        raise_route_errors(batch.non_tensor_batch.pop(ROUTE_ERROR_FIELD, ()))
        recorded = batch.non_tensor_batch.pop(RECORDED_FIELD, None)
        self._number_rows(batch, recorded)
        began = time.perf_counter()
        try:
            scored = super()._compute_old_log_prob(batch)
            if self.reuse is not None:
                self.reuse.timed(time.perf_counter() - began)
            return scored
        finally:
            _forget_rows(batch)
            if recorded is not None:
                batch.non_tensor_batch[RECORDED_FIELD] = recorded

    def _number_rows(self, batch: DataProto, recorded: Any) -> None:
        batch.batch[ROW_FIELD] = torch.arange(len(batch)).unsqueeze(1)
        if recorded is not None:
            batch.batch[SAMPLED_FIELD] = marked_rows(recorded)

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.observer is None or self.watch is None or self.correction is None:
            return super()._update_actor(batch)
        self._choose_old_log_probs(from_rollout=False)  # `fit` has read it
        counters = self.watch.check()
        raise_route_errors(batch.non_tensor_batch.pop(ROUTE_ERROR_FIELD, ()))
        if self.correction.old_forward:
            # the actor still has the weights that generated the batch
            batch.batch[OLD_FORWARD_FIELD] = self._compute_old_log_prob(batch)[0].batch["old_log_probs"]
        if self.correction.baseline_scope == "kept":
            self._kept_baseline(batch)
        with self.observer.timed():
            step_batch = self._step_batch(batch)
            self.observer.before_update(self.global_steps, step_batch)
        # of no use to the workers, and large
        batch.non_tensor_batch.pop(RECORDED_FIELD, None)
        batch.non_tensor_batch.pop(RECORD_PARAM, None)
        self._number_rows(batch, step_batch.recorded)
        output = super()._update_actor(batch)
        _forget_rows(batch)
        assert self.tim is not None
        watch_flags(self.tim, self, self.global_steps)
        metrics = output.meta_info["metrics"]
        records, reports, forwards = (take(metrics, name) for name in (RECORD_METRIC, REPORT_METRIC, FORWARD_METRIC))
        metrics.update(counters)
        with self.observer.timed():
            metrics.update(step_metrics(reports, self.correction, reused=self._reuses))
            metrics.update(replay_metrics(take(metrics, REPLAY_METRIC)))
            self.observer.dump_update(self.global_steps, records, reports)
            metrics.update(self.observer.after_update(self.global_steps, step_batch, records, reports, forwards))
        metrics.update(self.observer.timing())
        self._save_if_stopped()
        return output

    def fit(self) -> None:
        if self.tim is None:
            super().fit()
            return
        assert self.processes is not None
        # verl computes rewards in the middle of it
        with closed_at_the_end(), workers_ended(self), missing_is_neutral(), self.processes.named_when_dead():
            super().fit()
        self._raise_if_stopped(at_end=True)

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        # the first thing verl does with a step's prompts; it also opens a validation, which belongs to its step
        self._raise_if_stopped()
        self._choose_old_log_probs(from_rollout=self._reuses)
        return super()._get_gen_batch(batch)

    @property
    def _reuses(self) -> bool:
        """Whether this step takes old log-probs from the rollout."""
        return self.reuse is not None and not self.reuse.audits(self.global_steps)

    def _choose_old_log_probs(self, *, from_rollout: bool) -> None:
        """Tell verl's `fit` which of its two branches this step takes; there is no other way past its first.

        It reads `bypass_mode` of the driver's config in each step, to decide between the pass and a copy of the
        rollout's log-probs. The loss does not: the workers have their own copy of the correction, and `self.correction`
        is what the run was started with. Entropy and verl's difference metrics come with the pass only.
        """
        if self.reuse is None:
            return
        with open_dict(self.config):
            self.config.algorithm.rollout_correction.bypass_mode = from_rollout

    def _kept_baseline(self, batch: DataProto) -> None:
        """verl computes advantages in the middle of `fit`; the actor has not used them yet."""
        assert self.correction is not None
        algorithm = self.config.algorithm

        def compute(part: DataProto, rows: list[int]) -> DataProto:
            return compute_advantage(
                part,
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
                config=algorithm,
            )

        take_kept_baseline(batch, counted_rows(self.correction, batch), algorithm.adv_estimator, compute)

    def _step_batch(self, batch: DataProto) -> StepBatch:
        tensors, others = batch.batch, batch.non_tensor_batch
        assert self.observer is not None
        prompt_width = tensors["prompts"].shape[1]
        attention = tensors["attention_mask"].bool()
        prompts = [ids[mask].numpy() for ids, mask in zip(tensors["prompts"], attention[:, :prompt_width], strict=True)]
        responses = [
            ids[mask].numpy() for ids, mask in zip(tensors["responses"], attention[:, prompt_width:], strict=True)
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
        scored = OLD_FORWARD_FIELD if self.observer.bypass else "old_log_probs"
        known = bool(versions) and all(version is not None for version in versions)
        return StepBatch(
            keys=[f"{uid}_{row}" for row, uid in enumerate(others["uid"])],
            old_log_probs_BT=None if self._reuses else tensors.get(scored, None),
            rollout_log_probs_BT=tensors.get("rollout_log_probs", None),
            response_mask_BT=tensors["response_mask"],
            advantages_BT=tensors["advantages"],
            scores_B=tensors["token_level_scores"].sum(dim=1),
            prompts=prompts,
            responses=responses,
            uids=[str(uid) for uid in others["uid"]],
            recorded=[Recorded.of_wire(entry) for entry in others.get(RECORDED_FIELD, [None] * len(batch))],
            versions_B=torch.tensor([int(version) for version in versions]) if known else None,
            data=extra,
        )


def _forget_rows(batch: DataProto) -> None:
    for name in (ROW_FIELD, SAMPLED_FIELD):
        batch.batch.pop(name, None)
