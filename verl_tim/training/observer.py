"""What verl_tim looks at in every training step, V1 and legacy alike: the gate, `tim/*`, samples, dumps.

The trainers hand over padded tensors (`StepBatch`) before the actor's update and the loss records after it; nothing
here knows which trainer that was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.estimators import trainer_self_delta
from verl_tim.diagnosis.gate import BitReport, GateError, compare_bits
from verl_tim.diagnosis.run_folder import RunFolder, Sample
from verl_tim.training.config import TimConfig
from verl_tim.training.records import LossRecord, SeenByLoss, assemble

logger = logging.getLogger(__name__)

# Metrics of the ratio the loss used; under bypass they come from all rows, the others from the rows that saw p_old.
_LOSS_RATIO_METRICS = ("ppo_k", "clipped_share_")


class MismatchError(RuntimeError):
    """The exact gate: rollout and trainer differ in at least one bit. Names step, row, token and both values."""


@dataclass
class StepBatch:
    """One step's batch before the actor's update; rows without a valid token are padding.

    Attributes:
        keys: name of each row, for messages and samples ("uid_session_index" in V1).
        old_log_probs_BT: the trainer's, float32; None under bypass, where nobody has computed them yet.
        rollout_log_probs_BT: as recorded when the token was drawn; None if the rollout records none.
        response_mask_BT: before any rejection.
        kept_mask_BT: after rejection; None where nothing can be rejected before the loss.
        advantages_BT, scores_B: as verl computed them; scores are the summed rewards.
        prompts, responses: token ids of each row, without padding.
        versions_B: weight version of each row (`global_steps`), None if unknown.
        data: further per-row values for samples.jsonl: index, ground_truth, data_source, ...
    """

    keys: Sequence[str]
    old_log_probs_BT: Tensor | None
    rollout_log_probs_BT: Tensor | None
    response_mask_BT: Tensor
    kept_mask_BT: Tensor | None
    advantages_BT: Tensor
    scores_B: Tensor
    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    versions_B: Tensor | None = None
    data: dict[str, Sequence[Any]] | None = None

    def __len__(self) -> int:
        return self.response_mask_BT.shape[0]


class StepObserver:
    """Applies the `tim` group of a run's config to each step.

    Args:
        tim: the checked group.
        gated: True where every bit must agree (rollout vexact, trainer contract, gate on).
        bypass: True if old log-probs are the rollout's.
        clip_ratio_low, clip_ratio_high: PPO's clip, for the clip metrics.
        decode: token ids to text.
    """

    def __init__(
        self,
        tim: TimConfig,
        *,
        gated: bool,
        bypass: bool,
        clip_ratio_low: float,
        clip_ratio_high: float,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.tim = tim
        self.gated = gated
        self.bypass = bypass
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.decode = decode
        self._writer = None

    # ------------------------------------------------------------------------------------------------- two moments

    def before_update(self, step: int, batch: StepBatch) -> None:
        """Dump, samples and, with recomputed old log-probs, the gate.

        Raises:
            MismatchError: the gate found a differing bit and `tim.gate.on_mismatch` is stop.
        """
        self._dump(step, batch)
        self._write_samples(step, batch)
        if self.gated and not self.bypass:
            if batch.rollout_log_probs_BT is None or batch.old_log_probs_BT is None:
                raise MismatchError(
                    "tim.gate.exact needs the rollout's log-probs: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=true"
                )
            self._gate(step, batch, batch.old_log_probs_BT, batch.response_mask_BT)

    def after_update(self, step: int, batch: StepBatch, records: list[LossRecord]) -> dict[str, float]:
        """`tim/*` of the step; under bypass the gate, too, on the rows that saw the rollout's weights.

        Raises:
            MismatchError: as in `before_update`.
        """
        if batch.rollout_log_probs_BT is None:
            return {}
        seen = assemble(records, len(batch), batch.response_mask_BT.shape[1])
        if not self.bypass:
            return self._recomputed(step, batch, seen)
        return self._bypassed(step, batch, seen)

    # ----------------------------------------------------------------------------------------------------- metrics

    def _recomputed(self, step: int, batch: StepBatch, seen: SeenByLoss) -> dict[str, float]:
        assert batch.old_log_probs_BT is not None
        assert batch.rollout_log_probs_BT is not None
        valid_BT = batch.response_mask_BT.bool()
        metrics = mismatch_metrics(
            old_log_probs=batch.old_log_probs_BT,
            rollout_log_probs=batch.rollout_log_probs_BT,
            response_mask=valid_BT,
            advantages=batch.advantages_BT,
            log_prob=seen.log_prob_BT if bool(seen.seen_B.any()) else None,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            kept_mask=batch.kept_mask_BT,
            **self._versions(step, batch, torch.arange(len(batch))),
        )
        fresh_BT = valid_BT & seen.fresh_B.unsqueeze(1)
        return metrics | trainer_self_delta(seen.log_prob_BT, batch.old_log_probs_BT, fresh_BT)

    def _bypassed(self, step: int, batch: StepBatch, seen: SeenByLoss) -> dict[str, float]:
        assert batch.rollout_log_probs_BT is not None
        valid_BT = batch.response_mask_BT.bool()
        tokens = int(valid_BT.sum())
        rows = seen.fresh_B.nonzero().squeeze(1)
        sampled = int(valid_BT[rows].sum())
        if sampled == 0:
            return {"tim/sampled_share": 0.0}
        if self.gated:
            self._gate(step, batch, seen.log_prob_BT, valid_BT & seen.fresh_B.unsqueeze(1))
        metrics = mismatch_metrics(
            old_log_probs=seen.log_prob_BT[rows],
            rollout_log_probs=batch.rollout_log_probs_BT[rows],
            response_mask=valid_BT[rows],
            advantages=batch.advantages_BT[rows],
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            bypass=True,
            **self._versions(step, batch, rows),
        )
        every = seen.seen_B.nonzero().squeeze(1)
        of_the_loss = mismatch_metrics(
            old_log_probs=batch.rollout_log_probs_BT[every],
            rollout_log_probs=batch.rollout_log_probs_BT[every],
            response_mask=valid_BT[every],
            advantages=batch.advantages_BT[every],
            log_prob=seen.log_prob_BT[every],
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            bypass=True,
        )
        metrics.update(
            {
                name: value
                for name, value in of_the_loss.items()
                if name.removeprefix("tim/").startswith(_LOSS_RATIO_METRICS)
            }
        )
        metrics["tim/sampled_share"] = sampled / tokens
        return metrics

    def _versions(self, step: int, batch: StepBatch, rows: Tensor) -> dict[str, Any]:
        """The step's rows were drawn under version step - 1 when training is synchronous; older is stale."""
        if batch.versions_B is None:
            return {}
        versions_BT = batch.versions_B[rows].unsqueeze(1).expand(-1, batch.response_mask_BT.shape[1])
        return {"weight_versions": versions_BT, "current_version": step - 1}

    # -------------------------------------------------------------------------------------------------------- gate

    def _gate(self, step: int, batch: StepBatch, train_BT: Tensor, mask_BT: Tensor) -> None:
        assert batch.rollout_log_probs_BT is not None
        try:
            report = compare_bits(train_BT.float(), batch.rollout_log_probs_BT.float(), mask_BT)
        except GateError as error:
            raise MismatchError(
                f"step {step}: the exact gate could not compare rollout and trainer: {error}"
            ) from error
        if report.passed:
            return
        message = self._describe_mismatch(step, batch, report)
        if self.tim.gate.on_mismatch == "stop":
            raise MismatchError(
                message + " (tim.gate.on_mismatch=warn goes on; tim.gate.exact=false turns the gate off)"
            )
        logger.error(message)

    def _describe_mismatch(self, step: int, batch: StepBatch, report: BitReport) -> str:
        first = report.first
        assert first is not None
        token_id = batch.responses[first.row][first.token]
        return (
            f"step {step}: rollout and trainer differ: {report}; row {first.row} is {batch.keys[first.row]}, response "
            f"token {first.token} has id {token_id} ({self.decode([token_id])!r}), trainer {float.hex(first.train)}, "
            f"rollout {float.hex(first.rollout)}"
        )

    # ----------------------------------------------------------------------------------------------- samples, dumps

    def _write_samples(self, step: int, batch: StepBatch) -> None:
        if not (self.tim.run_dir and self.tim.samples.per_step):
            return
        valid_B = batch.response_mask_BT.sum(dim=1) > 0
        rows = valid_B.nonzero().squeeze(1).tolist()[: self.tim.samples.per_step]
        RunFolder(self.tim.run_dir).add_samples(self._sample(step, batch, row) for row in rows)

    def _sample(self, step: int, batch: StepBatch, row: int) -> Sample:
        values = {name: column[row] for name, column in (batch.data or {}).items()}
        uid, truth = values.pop("index", None), values.pop("ground_truth", None)
        return Sample(
            step=step,
            prompt=self.decode(batch.prompts[row]),
            response=self.decode(batch.responses[row]),
            reward=_number(batch.scores_B[row]),
            uid=None if uid is None else str(uid),
            ground_truth=None if truth is None else str(truth),
            extra={"key": batch.keys[row], "response_tokens": len(batch.responses[row]), **values},
        )

    def _dump(self, step: int, batch: StepBatch) -> None:
        folder = self.tim.dump_dir
        if folder is None or step % self.tim.dump.every:
            return
        path = Path(folder) / f"step_{step:06d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "step": step,
                "keys": list(batch.keys),
                "prompts": [list(map(int, ids)) for ids in batch.prompts],
                "responses": [list(map(int, ids)) for ids in batch.responses],
                "response_mask": batch.response_mask_BT.bool(),
                "old_log_probs": batch.old_log_probs_BT,
                "rollout_log_probs": batch.rollout_log_probs_BT,
                "advantages": batch.advantages_BT,
                "scores": batch.scores_B,
            },
            path,
        )


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
