"""What verl_tim looks at in every training step, V1 and legacy alike: the gate, `tim/*`, samples, dumps.

The trainers hand over padded tensors (`StepBatch`) before the actor's update and the loss records after it; nothing
here knows which trainer that was.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.estimators import trainer_self_delta
from verl_tim.diagnosis.gate import BitReport, GateError, compare_bits
from verl_tim.diagnosis.loss_ratio import LossRatioSums
from verl_tim.diagnosis.metrics import BatchMismatch
from verl_tim.diagnosis.run_folder import RunFolder, Sample
from verl_tim.diagnosis.tokens import finite_fp32
from verl_tim.rollout.recorded import Recorded
from verl_tim.rollout.versions import UNKNOWN
from verl_tim.training.baseline_gate import BaselineGate
from verl_tim.training.choices import Choices
from verl_tim.training.config import TimConfig
from verl_tim.training.correction_report import LossReport
from verl_tim.training.errands import Errand, Errands
from verl_tim.training.forward_records import ForwardRecord
from verl_tim.training.records import LossRecord, SeenByLoss, assemble, padded
from verl_tim.training.reuse import LogProbReuse, check_usable
from verl_tim.training.token_dumps import TokenDumper

logger = logging.getLogger(__name__)

LOSS_CHUNK = 1 << 16  # padded tokens of the loss's records that are looked at together
Ids = Sequence[int] | np.ndarray
SPEARMAN_TOKENS = 1_000_000  # ranks of more tokens than that are those of a sample


class MismatchError(RuntimeError):
    """The exact gate: rollout and trainer differ in at least one bit. Names step, row, token and both values."""


@dataclass
class StepBatch:
    """One step's batch before the actor's update; rows without a valid token are padding.

    Attributes:
        keys: name of each row, for messages and samples ("uid_session_index" in V1).
        old_log_probs_BT: the trainer's, float32; None where the trainer has not computed them: under bypass without
            `old_forward`, and on a step that takes the rollout's (`reuse`).
        rollout_log_probs_BT: as recorded when the token was drawn; None if the rollout records none.
        response_mask_BT: before any rejection; what was kept is known after the update (`SeenByLoss`).
        advantages_BT, scores_B: as verl computed them; scores are the summed rewards.
        prompts, responses: token ids of each row, without padding.
        uids: of each row's prompt.
        versions_B: oldest weight version of each row (`global_steps`), None if unknown.
        versions_BT: int64, the version of each token, `UNKNOWN` where there is no record; None where all tokens were
            drawn under the weights that the update starts from.
        recorded: what the rollout recorded of sampled rows, None for the others.
        data: further per-row values for samples.jsonl: index, ground_truth, data_source, ...
    """

    keys: Sequence[str]
    old_log_probs_BT: Tensor | None
    rollout_log_probs_BT: Tensor | None
    response_mask_BT: Tensor
    advantages_BT: Tensor
    scores_B: Tensor
    prompts: Sequence[Ids]
    responses: Sequence[Ids]
    uids: Sequence[str] = ()
    versions_B: Tensor | None = None
    versions_BT: Tensor | None = None
    recorded: Sequence[Recorded | None] | None = None
    data: dict[str, Sequence[Any]] | None = None

    def __len__(self) -> int:
        return self.response_mask_BT.shape[0]

    @property
    def tokens(self) -> int:
        """What a forward over the batch runs over: prompts and responses."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))

    @classmethod
    def joined(cls, parts: Sequence[StepBatch]) -> StepBatch:
        """Batches one below the other; what one of them lacks the whole lacks."""
        width = max(part.response_mask_BT.shape[1] for part in parts)

        def tensors(name: str, fill: float = 0) -> Any:
            given = [getattr(part, name) for part in parts]
            if any(x is None for x in given):
                return None
            return torch.cat(
                [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill) if x.dim() == 2 else x for x in given]
            )

        def rows(name: str) -> list[Any]:
            return [value for part in parts for value in getattr(part, name) or ()]

        names = set.intersection(*(set(part.data or ()) for part in parts))
        return cls(
            keys=rows("keys"),
            old_log_probs_BT=tensors("old_log_probs_BT"),
            rollout_log_probs_BT=tensors("rollout_log_probs_BT"),
            response_mask_BT=tensors("response_mask_BT"),
            advantages_BT=tensors("advantages_BT"),
            scores_B=tensors("scores_B"),
            prompts=rows("prompts"),
            responses=rows("responses"),
            uids=rows("uids"),
            versions_B=tensors("versions_B"),
            versions_BT=tensors("versions_BT", UNKNOWN),
            recorded=None if any(part.recorded is None for part in parts) else rows("recorded"),
            data={name: [value for part in parts for value in (part.data or {})[name]] for name in sorted(names)},
        )


class StepObserver:
    """Applies the `tim` group of a run's config to each step.

    Args:
        tim: the checked group.
        gated: True where every bit must agree (rollout vexact, trainer contract, gate on).
        bypass: True if old log-probs are the rollout's.
        clip_ratio_low, clip_ratio_high: PPO's clip, for the clip metrics.
        decode: token ids to text.
        longest_response: tokens, the run's limit; None: each batch's own width.
        reuse: which steps take old log-probs from the rollout; None: no step does.
        correction: the correction's settings, and `model_path` that of the model, for the token dumps.

    Attributes:
        baseline: watches every step's metrics where a run asks for it.
        errands: what is done while the workers are busy.
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
        longest_response: int | None = None,
        reuse: LogProbReuse | None = None,
        correction: Mapping[str, Any] | None = None,
        model_path: str = "",
    ) -> None:
        self.tim = tim
        self.gated = gated
        self.reuse = reuse
        self.bypass = bypass
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.decode = decode
        self.longest_response = longest_response
        self.baseline = BaselineGate.of(tim.gate)
        self._compared = 0  # tokens of the step under way that the gate has compared
        self._largest = 0.0  # nats, their largest difference
        self._part = 0  # of the step under way
        self._seconds = 0.0  # of the step under way
        self.errands = Errands()
        self._ahead: tuple[StepBatch, Errand[BatchMismatch]] | None = None  # of the step under way
        self._tokens = TokenDumper(tim, decode, correction=correction or {}, model_path=model_path)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The block is this package's work for the step under way."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def timing(self) -> dict[str, float]:
        """`timing_s/tim` of the step, which ends with it: by how much diagnosis, gate and dumps made it longer.

        `timing_s/tim_beside_workers`, where there is something, is what was done while the workers were busy.
        """
        seconds, self._seconds = self._seconds, 0.0
        beside = self.errands.seconds()
        return {"timing_s/tim": seconds} | ({"timing_s/tim_beside_workers": beside} if beside else {})

    # ------------------------------------------------------------------------------------------------- two moments

    def before_update(self, step: int, batch: StepBatch, *, whole: bool = True) -> None:
        """Dump, samples and, where the trainer has scored the batch, the gate and the beginning of the metrics.

        Args:
            whole: False where the step's batch comes in parts, each with an update of its own, and this is one of them.
                Metrics are of all parts, so none can begin.

        Raises:
            MismatchError: the gate found a differing bit and `tim.gate.on_mismatch` is stop.
            ReuseError: the step takes old log-probs from the rollout, and one is missing.
        """
        self._dump(step, batch)
        if self._part == 0:
            self._write_samples(step, batch)
        reuses = self.reuse is not None and not self.reuse.audits(step)
        if self.gated and not reuses and (not self.bypass or batch.old_log_probs_BT is not None):
            if batch.rollout_log_probs_BT is None or batch.old_log_probs_BT is None:
                raise MismatchError(
                    "tim.gate.exact needs the rollout's log-probs: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=true"
                )
            self._gate(step, batch, batch.old_log_probs_BT, batch.response_mask_BT)
        if whole and batch.old_log_probs_BT is not None and batch.rollout_log_probs_BT is not None:
            self._ahead = batch, self.errands.send(self._mismatch, step, batch)
        if self.reuse is None:
            return
        if reuses:
            check_usable(step, batch.keys, batch.rollout_log_probs_BT, batch.response_mask_BT)
            self.reuse.reused(step)
        else:
            self.reuse.audited(step, batch.tokens)

    def after_update(
        self,
        step: int,
        batch: StepBatch,
        records: list[LossRecord],
        reports: Sequence[LossReport] = (),
        forwards: Sequence[ForwardRecord] = (),
    ) -> dict[str, float]:
        """`tim/*` of the step; where the trainer has not scored the batch the gate, too, on the rows that saw the
        rollout's weights.

        Args:
            batch: of the whole step.
            records, reports: what the workers' loss saw, for the metrics, and what it came to, for the dump.
            forwards: what the workers' forward chose in the sampled rows.

        Raises:
            MismatchError: as in `before_update`.
        """
        self._part = 0
        lengths = self._lengths(batch)
        seen = assemble(records, len(batch), batch.response_mask_BT.shape[1])
        choices = Choices.of(batch.recorded, forwards)
        self._tokens.write(step, batch, seen, choices)
        if batch.rollout_log_probs_BT is None:
            return lengths
        scored = batch.old_log_probs_BT is not None
        look = self._scored if scored else self._unscored
        metrics = look(step, batch, seen) | self._of_the_loss(batch, records)
        metrics |= lengths | self._coverage(step, batch)
        if choices.rollout and choices.train:
            train_BT = batch.old_log_probs_BT if batch.old_log_probs_BT is not None else seen.log_prob_BT
            valid_BT = batch.response_mask_BT.bool() & finite_fp32(train_BT) & finite_fp32(batch.rollout_log_probs_BT)
            # other weights choose otherwise, which is no mismatch
            metrics |= choices.metrics(valid_BT & self.within_lag(step, batch, 0))
        return metrics | (self.baseline.check(step, metrics) if self.baseline is not None else {})

    # ----------------------------------------------------------------------------------------------------- metrics

    def _scored(self, step: int, batch: StepBatch, seen: SeenByLoss) -> dict[str, float]:
        """The trainer has scored the whole batch before the update: recomputation, or bypass with `old_forward`."""
        assert batch.old_log_probs_BT is not None
        valid_BT = batch.response_mask_BT.bool()
        ahead, self._ahead = self._ahead, None
        mismatch = ahead[1].result() if ahead is not None and ahead[0] is batch else self._mismatch(step, batch)
        metrics = mismatch.with_loss(
            log_prob=seen.log_prob_BT if bool(seen.seen_B.any()) else None,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            bypass=self.bypass,
            kept_mask=_kept(batch, seen),
            loss_ratio=False,  # `_of_the_loss`
        )
        fresh = seen.fresh_B
        return metrics | trainer_self_delta(seen.log_prob_BT[fresh], batch.old_log_probs_BT[fresh], valid_BT[fresh])

    def _unscored(self, step: int, batch: StepBatch, seen: SeenByLoss) -> dict[str, float]:
        """Bypass, or a step that took the rollout's log-probs: only the first mini-batch's forward saw the weights that
        generated the batch."""
        assert batch.rollout_log_probs_BT is not None
        valid_BT = batch.response_mask_BT.bool()
        tokens = int(valid_BT.sum())
        rows = seen.fresh_B.nonzero().squeeze(1)
        sampled = int(valid_BT[rows].sum())
        if sampled == 0:
            return {"tim/sampled_share": 0.0}
        if self.gated:
            self._gate(step, batch, seen.log_prob_BT, valid_BT & seen.fresh_B.unsqueeze(1))
        mismatch = self._mismatch(step, batch, seen.log_prob_BT, rows)
        metrics = mismatch.with_loss(
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            bypass=self.bypass,
            kept_mask=None if seen.kept_BT is None else seen.kept_BT[rows],
        )
        metrics["tim/sampled_share"] = sampled / tokens
        return metrics

    def _mismatch(
        self, step: int, batch: StepBatch, train_BT: Tensor | None = None, rows: Tensor | slice = slice(None)
    ) -> BatchMismatch:
        """What needs nothing of the loss. `train_BT`: in place of the batch's old log-probs."""
        train_BT = batch.old_log_probs_BT if train_BT is None else train_BT
        assert train_BT is not None
        assert batch.rollout_log_probs_BT is not None
        return BatchMismatch.of(
            old_log_probs=train_BT[rows],
            rollout_log_probs=batch.rollout_log_probs_BT[rows],
            response_mask=batch.response_mask_BT[rows].bool(),
            advantages=batch.advantages_BT[rows],
            longest_response=self.longest_response,
            spearman_sample=SPEARMAN_TOKENS,
            **self._versions(step, batch, rows),
        )

    def _lengths(self, batch: StepBatch) -> dict[str, float]:
        """Share of rows as long as a response may be. verl's `response_length/clip_ratio` is of the batch's width, to
        which V1 pads: of its longest row, however short (trainer/ppo/v1, verl 0.9.1)."""
        valid_B = (batch.response_mask_BT.sum(dim=1) > 0).tolist()
        lengths = [len(ids) for ids, valid in zip(batch.responses, valid_B, strict=True) if valid]
        if self.longest_response is None or not lengths:
            return {}
        return {"tim/response_at_limit": sum(n >= self.longest_response for n in lengths) / len(lengths)}

    def _of_the_loss(self, batch: StepBatch, records: Sequence[LossRecord]) -> dict[str, float]:
        """Metrics of the ratio that the loss used, over every mini-batch and epoch, in either mode."""
        scored = not self.bypass and batch.old_log_probs_BT is not None
        reference_BT = batch.old_log_probs_BT if scored else batch.rollout_log_probs_BT
        assert reference_BT is not None
        mask_BT = batch.response_mask_BT.bool()
        sums = LossRatioSums()
        # micro-batches are too small to be worth a pass each, and all of them at once take much memory
        for together in _in_chunks(records, max(1, LOSS_CHUNK // max(1, mask_BT.shape[1]))):
            rows = torch.from_numpy(np.concatenate([record.row_B for record in together]))
            sums += LossRatioSums.of(
                torch.cat([padded(record.log_prob_BT, mask_BT.shape[1]) for record in together]),
                reference_BT[rows],
                mask_BT[rows],
                batch.advantages_BT[rows],
                (self.clip_ratio_low, self.clip_ratio_high),
            )
        return sums.metrics()

    def _coverage(self, step: int, batch: StepBatch) -> dict[str, float]:
        """On how many tokens the gate looked, and on how many it could not."""
        if not self.gated:
            return {}
        compared, self._compared = self._compared, 0
        largest, self._largest = self._largest, 0.0
        found = {
            "tim/compared_tokens": float(compared),
            "tim/uncompared_tokens": float(int(batch.response_mask_BT.bool().sum()) - compared),
        }
        if compared:
            found["tim/compared_delta_abs_max"] = largest
        return found | (self.reuse.metrics(step, batch.tokens) if self.reuse is not None else {})

    def within_lag(self, step: int, batch: StepBatch, lag: int) -> Tensor:
        """(B, T) bool: tokens drawn under weights at most `lag` versions older than those that the update starts from.

        These are version step - 1: each step ends by giving its weights to the rollout. A token of unknown version is
        not among them; without versions every token is.
        """
        if batch.versions_BT is None:
            return torch.ones_like(batch.response_mask_BT, dtype=torch.bool)
        return (batch.versions_BT != UNKNOWN) & (batch.versions_BT >= step - 1 - lag)

    def _versions(self, step: int, batch: StepBatch, rows: Tensor | slice) -> dict[str, Any]:
        """Versions by token, for a token without a record the oldest of its row; older than step - 1 is stale."""
        if batch.versions_B is None:
            return {}
        versions_BT = batch.versions_B[rows].unsqueeze(1).expand(-1, batch.response_mask_BT.shape[1])
        if batch.versions_BT is not None:
            known_BT = batch.versions_BT[rows]
            versions_BT = torch.where(known_BT == UNKNOWN, versions_BT, known_BT)
        return {"weight_versions": versions_BT, "current_version": step - 1}

    # -------------------------------------------------------------------------------------------------------- gate

    def _gate(self, step: int, batch: StepBatch, train_BT: Tensor, mask_BT: Tensor) -> None:
        """Compare the tokens of the weights that `train_BT` was computed under; others say nothing about exactness."""
        assert batch.rollout_log_probs_BT is not None
        mask_BT = mask_BT.bool() & self.within_lag(step, batch, 0)
        if batch.versions_BT is not None and not bool(mask_BT.any()):
            return
        try:
            report = compare_bits(train_BT.float(), batch.rollout_log_probs_BT.float(), mask_BT)
        except GateError as error:
            raise MismatchError(
                f"step {step}: the exact gate could not compare rollout and trainer: {error}"
            ) from error
        self._compared += report.tokens
        self._largest = max(self._largest, report.max_abs)
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
        token_id = int(batch.responses[first.row][first.token])
        return (
            f"step {step}: rollout and trainer differ: {report}; row {first.row} is {batch.keys[first.row]}, response "
            f"token {first.token} has id {token_id} ({self.decode([token_id])!r}), trainer {float.hex(first.train)}, "
            f"rollout {float.hex(first.rollout)}" + ("" if self.reuse is None else self.reuse.since_last_audit(step))
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
            prompt=self.decode(np.asarray(batch.prompts[row]).tolist()),
            response=self.decode(np.asarray(batch.responses[row]).tolist()),
            reward=_number(batch.scores_B[row]),
            uid=None if uid is None else str(uid),
            ground_truth=None if truth is None else str(truth),
            extra={"key": batch.keys[row], "response_tokens": len(batch.responses[row]), **values},
        )

    def _dump(self, step: int, batch: StepBatch) -> None:
        folder = self.tim.dump_dir
        if folder is None or step % self.tim.dump.every:
            return
        path = Path(folder) / f"step_{self._dump_name(step)}.pt"
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
                "versions": batch.versions_BT,
            },
            path,
        )

    def _dump_name(self, step: int) -> str:
        return f"{step:06d}" + (f"_part{self._part}" if self._part else "")

    def dump_update(self, step: int, records: list[LossRecord], reports: Sequence[LossReport]) -> None:
        """Beside the batch's dump, what the loss made of it: enough to compute every mini-batch's loss again.

        To be called after each update, with what `before_update` was given.
        """
        folder, name = self.tim.dump_dir, self._dump_name(step)
        self._part += 1
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
            Path(folder) / f"update_{name}.pt",
        )


def _in_chunks(records: Sequence[LossRecord], rows: int) -> Iterator[list[LossRecord]]:
    """Records that follow each other, together until they have that many rows."""
    chunk: list[LossRecord] = []
    held = 0
    for record in records:
        chunk.append(record)
        held += len(record.row_B)
        if held >= rows:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _kept(batch: StepBatch, seen: SeenByLoss) -> Tensor | None:
    """What the loss was taken over; a row that no mini-batch drew lost nothing to a rejection."""
    if seen.kept_BT is None:
        return None
    return torch.where(seen.seen_B.unsqueeze(1), seen.kept_BT, batch.response_mask_BT.bool())


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
