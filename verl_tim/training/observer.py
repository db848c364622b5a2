"""What verl_tim looks at in every training step, V1 and legacy alike: the gate, `tim/*`, samples, dumps.

The trainers hand over padded tensors (`StepBatch`) before the actor's update and the loss records after it; nothing
here knows which trainer that was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.estimators import trainer_self_delta
from verl_tim.diagnosis.gate import BitReport, GateError, compare_bits
from verl_tim.diagnosis.loss_ratio import LossRatioSums
from verl_tim.diagnosis.run_folder import RunFolder, Sample
from verl_tim.rollout.recorded import Recorded
from verl_tim.training.baseline_gate import BaselineGate
from verl_tim.training.choices import Choices
from verl_tim.training.config import TimConfig
from verl_tim.training.correction_report import LossReport
from verl_tim.training.forward_records import ForwardRecord
from verl_tim.training.records import LossRecord, SeenByLoss, assemble, padded
from verl_tim.training.token_dumps import TokenDumper

logger = logging.getLogger(__name__)

SPEARMAN_TOKENS = 1_000_000  # ranks of more tokens than that are those of a sample


class MismatchError(RuntimeError):
    """The exact gate: rollout and trainer differ in at least one bit. Names step, row, token and both values."""


@dataclass
class StepBatch:
    """One step's batch before the actor's update; rows without a valid token are padding.

    Attributes:
        keys: name of each row, for messages and samples ("uid_session_index" in V1).
        old_log_probs_BT: the trainer's, float32; None under bypass without `old_forward`, where nobody has computed
            them yet.
        rollout_log_probs_BT: as recorded when the token was drawn; None if the rollout records none.
        response_mask_BT: before any rejection; what was kept is known after the update (`SeenByLoss`).
        advantages_BT, scores_B: as verl computed them; scores are the summed rewards.
        prompts, responses: token ids of each row, without padding.
        uids: of each row's prompt.
        versions_B: weight version of each row (`global_steps`), None if unknown.
        recorded: what the rollout recorded of sampled rows, None for the others.
        data: further per-row values for samples.jsonl: index, ground_truth, data_source, ...
    """

    keys: Sequence[str]
    old_log_probs_BT: Tensor | None
    rollout_log_probs_BT: Tensor | None
    response_mask_BT: Tensor
    advantages_BT: Tensor
    scores_B: Tensor
    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    uids: Sequence[str] = ()
    versions_B: Tensor | None = None
    recorded: Sequence[Recorded | None] | None = None
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
        correction: the correction's settings, and `model_path` that of the model, for the token dumps.

    Attributes:
        baseline: watches every step's metrics where a run asks for it.
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
        correction: Mapping[str, Any] | None = None,
        model_path: str = "",
    ) -> None:
        self.tim = tim
        self.gated = gated
        self.bypass = bypass
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.decode = decode
        self.baseline = BaselineGate.of(tim.gate)
        self._tokens = TokenDumper(tim, decode, correction=correction or {}, model_path=model_path)

    # ------------------------------------------------------------------------------------------------- two moments

    def before_update(self, step: int, batch: StepBatch) -> None:
        """Dump, samples and, where the trainer has scored the batch, the gate.

        Raises:
            MismatchError: the gate found a differing bit and `tim.gate.on_mismatch` is stop.
        """
        self._dump(step, batch)
        self._write_samples(step, batch)
        if self.gated and (not self.bypass or batch.old_log_probs_BT is not None):
            if batch.rollout_log_probs_BT is None or batch.old_log_probs_BT is None:
                raise MismatchError(
                    "tim.gate.exact needs the rollout's log-probs: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=true"
                )
            self._gate(step, batch, batch.old_log_probs_BT, batch.response_mask_BT)

    def after_update(
        self,
        step: int,
        batch: StepBatch,
        records: list[LossRecord],
        reports: Sequence[LossReport] = (),
        forwards: Sequence[ForwardRecord] = (),
    ) -> dict[str, float]:
        """`tim/*` of the step; under bypass the gate, too, on the rows that saw the rollout's weights.

        Args:
            records, reports: what the workers' loss saw, for the metrics, and what it came to, for the dump.
            forwards: what the workers' forward chose in the sampled rows.

        Raises:
            MismatchError: as in `before_update`.
        """
        self._dump_update(step, records, reports)
        seen = assemble(records, len(batch), batch.response_mask_BT.shape[1])
        choices = Choices.of(batch.recorded, forwards)
        self._tokens.write(step, batch, seen, choices)
        if batch.rollout_log_probs_BT is None:
            return {}
        scored = batch.old_log_probs_BT is not None
        metrics = self._scored(step, batch, seen) if scored else self._bypassed(step, batch, seen)
        metrics |= self._of_the_loss(batch, records)
        train_BT = batch.old_log_probs_BT if batch.old_log_probs_BT is not None else seen.log_prob_BT
        valid_BT = batch.response_mask_BT.bool() & train_BT.isfinite() & batch.rollout_log_probs_BT.isfinite()
        metrics |= choices.metrics(valid_BT)
        return metrics | (self.baseline.check(step, metrics) if self.baseline is not None else {})

    # ----------------------------------------------------------------------------------------------------- metrics

    def _scored(self, step: int, batch: StepBatch, seen: SeenByLoss) -> dict[str, float]:
        """The trainer has scored the whole batch before the update: recomputation, or bypass with `old_forward`."""
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
            bypass=self.bypass,
            kept_mask=_kept(batch, seen),
            spearman_sample=SPEARMAN_TOKENS,
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
            kept_mask=None if seen.kept_BT is None else seen.kept_BT[rows],
            spearman_sample=SPEARMAN_TOKENS,
            **self._versions(step, batch, rows),
        )
        metrics["tim/sampled_share"] = sampled / tokens
        return metrics

    def _of_the_loss(self, batch: StepBatch, records: Sequence[LossRecord]) -> dict[str, float]:
        """Metrics of the ratio that the loss used, over every mini-batch and epoch, in either mode."""
        reference_BT = batch.rollout_log_probs_BT if self.bypass else batch.old_log_probs_BT
        assert reference_BT is not None
        mask_BT = batch.response_mask_BT.bool()
        sums = LossRatioSums()
        for record in records:
            rows = torch.from_numpy(record.row_B.copy())
            sums += LossRatioSums.of(
                padded(record.log_prob_BT, mask_BT.shape[1]),
                reference_BT[rows],
                mask_BT[rows],
                batch.advantages_BT[rows],
                (self.clip_ratio_low, self.clip_ratio_high),
            )
        return sums.metrics()

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

    def _dump_update(self, step: int, records: list[LossRecord], reports: Sequence[LossReport]) -> None:
        """Beside the batch's dump, what the loss made of it: enough to compute every mini-batch's loss again."""
        folder = self.tim.dump_dir
        if folder is None or step % self.tim.dump.every:
            return
        torch.save(
            {
                "step": step,
                "records": [
                    {
                        "mini_batch": record.number,
                        "rows": torch.tensor(record.row_B),
                        "log_prob": torch.tensor(record.log_prob_BT),
                        "kept": None if record.kept_BT is None else torch.tensor(record.kept_BT),
                    }
                    for record in records
                ],
                "policy_loss": {report.number: report.policy_loss for report in reports},
                "kept_tokens": {report.number: report.kept_tokens for report in reports},
            },
            Path(folder) / f"update_{step:06d}.pt",
        )


def _kept(batch: StepBatch, seen: SeenByLoss) -> Tensor | None:
    """What the loss was taken over; a row that no mini-batch drew lost nothing to a rejection."""
    if seen.kept_BT is None:
        return None
    return torch.where(seen.seen_B.unsqueeze(1), seen.kept_BT, batch.response_mask_BT.bool())


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
