"""What the loss saw, row by row: the log-probs of every mini-batch, carried from the workers to the trainer.

verl's loss returns scalars only. Whether the mismatch bends the objective is read from the
log-prob of each token as the loss used it, and under bypass the first mini-batch is the only one that sees p_old. A
record is a plain object under one metric key; verl gathers metric values over ranks and micro-batches as they are, and
the trainer takes the records out before verl reduces the metrics (`take_records`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl.workers.utils.padding import no_padding_2_padding

# Row number within the step's batch; the trainer writes it before the update, so that records find their row again.
ROW_FIELD = "tim_row"
RECORD_METRIC = "tim/loss_records"


@dataclass(frozen=True)
class LossRecord:
    """One micro-batch as the loss saw it.

    Attributes:
        row_B: int64, the row's number in the step's batch.
        log_prob_BT: float32, padded to the longest response of the micro-batch; meaningless where the row has no token.
        fresh: True if no optimiser step happened since the rollout was given these weights, so log p = log p_old.
    """

    row_B: np.ndarray
    log_prob_BT: np.ndarray
    fresh: bool


def recording_loss(loss_function: Callable, *, fresh: bool) -> Callable:
    """Wrap verl's loss so that its metrics carry a `LossRecord`; its value and other metrics are untouched.

    Data without `ROW_FIELD` (a trainer that is not ours) is not recorded.
    """

    def loss(*args: Any, **kwargs: Any):
        result = loss_function(*args, **kwargs)
        data = kwargs.get("data")
        model_output = kwargs.get("model_output")
        # verl also calls the loss as a logits processor (top-k distillation), without model_output
        if model_output is None or data is None or ROW_FIELD not in data.keys():  # noqa: SIM118 (a TensorDict is no dict)
            return result
        value, metrics = result
        metrics[RECORD_METRIC] = _record(model_output["log_probs"], data, fresh)
        return value, metrics

    return loss


def _record(log_probs: torch.Tensor, data: Any, fresh: bool) -> LossRecord:
    log_prob_BT = no_padding_2_padding(log_probs.detach(), data)
    rows = data[ROW_FIELD]
    rows = rows.values() if rows.is_nested else rows  # nested in V1, dense in the legacy trainer
    return LossRecord(
        row_B=rows.reshape(-1).cpu().numpy().astype(np.int64),
        log_prob_BT=log_prob_BT.float().cpu().numpy(),
        fresh=fresh,
    )


def take_records(metrics: dict[str, Any]) -> list[LossRecord]:
    """Remove and return the records from unreduced worker metrics, whatever prefix verl has put before the key."""
    records: list[LossRecord] = []
    for key in [key for key in metrics if key.endswith(RECORD_METRIC)]:
        value = metrics.pop(key)
        records.extend(value if isinstance(value, list) else [value])
    return records


@dataclass(frozen=True)
class SeenByLoss:
    """The first epoch's records put back into the order of the step's batch.

    Attributes:
        log_prob_BT: float32, NaN where a row or token was not recorded.
        seen_B: bool, rows that were recorded.
        fresh_B: bool, rows recorded before the step's first optimiser update.
    """

    log_prob_BT: torch.Tensor
    seen_B: torch.Tensor
    fresh_B: torch.Tensor


def assemble(records: list[LossRecord], rows: int, width: int) -> SeenByLoss:
    """Records to one (rows, width) tensor. With several PPO epochs a row's first appearance counts."""
    log_prob_BT = torch.full((rows, width), float("nan"), dtype=torch.float32)
    seen_B = torch.zeros(rows, dtype=torch.bool)
    fresh_B = torch.zeros(rows, dtype=torch.bool)
    for record in records:
        for row, values_T in zip(record.row_B.tolist(), record.log_prob_BT, strict=True):
            if seen_B[row]:
                continue
            take = min(width, len(values_T))
            log_prob_BT[row, :take] = torch.tensor(values_T[:take])  # copied: Ray's arrays are read-only
            seen_B[row] = True
            fresh_B[row] = record.fresh
    return SeenByLoss(log_prob_BT, seen_B, fresh_B)
