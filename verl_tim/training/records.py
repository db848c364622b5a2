"""What the loss saw, row by row: the log-probs of every mini-batch, carried from the workers to the trainer.

verl's loss returns scalars only. Whether the mismatch bends the objective is read from the
log-prob of each token as the loss used it, and under bypass the first mini-batch is the only one that sees p_old. A
record is a plain object under one metric key; verl gathers metric values over ranks and micro-batches as they are, and
the trainer takes the records out before verl reduces the metrics (`take`).
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
        kept_BT: bool, the tokens that the loss was taken over; None where verl's own loss took all valid ones.
        number: mini-batches since the rollout was given weights, from 0.
        fresh: True if no optimiser step happened since the rollout was given these weights, so log p = log p_old.
    """

    row_B: np.ndarray
    log_prob_BT: np.ndarray
    kept_BT: np.ndarray | None
    number: int
    fresh: bool


def recording_loss(loss_function: Callable, *, number: int, fresh: bool) -> Callable:
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
        log_prob_BT = no_padding_2_padding(model_output["log_probs"].detach(), data)
        metrics[RECORD_METRIC] = record(log_prob_BT, None, data, number=number, fresh=fresh)
        return value, metrics

    return loss


def record(
    log_prob_BT: torch.Tensor, kept_BT: torch.Tensor | None, data: Any, *, number: int, fresh: bool
) -> LossRecord:
    """The record of a micro-batch `data` that has a `ROW_FIELD`."""
    rows = data[ROW_FIELD]
    rows = rows.values() if rows.is_nested else rows  # nested in V1, dense in the legacy trainer
    return LossRecord(
        row_B=rows.reshape(-1).cpu().numpy().astype(np.int64),
        log_prob_BT=log_prob_BT.detach().float().cpu().numpy(),
        kept_BT=None if kept_BT is None else kept_BT.cpu().numpy(),
        number=number,
        fresh=fresh,
    )


def take(metrics: dict[str, Any], name: str) -> list[Any]:
    """Remove and return the plain objects under one key of unreduced worker metrics, whatever prefix verl put before
    it."""
    taken: list[Any] = []
    for key in [key for key in metrics if key.endswith(name)]:
        value = metrics.pop(key)
        taken.extend(value if isinstance(value, list) else [value])
    return taken


def padded(values_BT: np.ndarray, width: int) -> torch.Tensor:
    """A record's (B, T) array at the width of the step's batch; what is added is 0 and behind every response."""
    # copied: what Ray delivers is read-only
    values = torch.tensor(values_BT[:, :width])
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


@dataclass(frozen=True)
class SeenByLoss:
    """The first epoch's records put back into the order of the step's batch.

    Attributes:
        log_prob_BT: float32, NaN where a row or token was not recorded.
        kept_BT: bool, the tokens of recorded rows that the loss was taken over; None where no mask was recorded.
        seen_B: bool, rows that were recorded.
        fresh_B: bool, rows recorded before the step's first optimiser update.
    """

    log_prob_BT: torch.Tensor
    kept_BT: torch.Tensor | None
    seen_B: torch.Tensor
    fresh_B: torch.Tensor


def assemble(records: list[LossRecord], rows: int, width: int) -> SeenByLoss:
    """Records to one (rows, width) tensor. With several PPO epochs a row's first appearance counts."""
    log_prob_BT = np.full((rows, width), np.nan, np.float32)
    masked = bool(records) and all(record.kept_BT is not None for record in records)
    kept_BT = np.zeros((rows, width), bool)
    seen_B, fresh_B = np.zeros(rows, bool), np.zeros(rows, bool)
    for record in records:
        rows_P, places_P = np.unique(record.row_B, return_index=True)  # a row may stand in a record twice
        new_P = ~seen_B[rows_P]
        rows_P, places_P = rows_P[new_P], places_P[new_P]
        length = min(width, record.log_prob_BT.shape[1])
        log_prob_BT[rows_P, :length] = record.log_prob_BT[places_P, :length]
        if record.kept_BT is not None:
            kept_BT[rows_P, :length] = record.kept_BT[places_P, :length]
        seen_B[rows_P], fresh_B[rows_P] = True, record.fresh
    log_prob, kept, seen, fresh = (torch.from_numpy(array) for array in (log_prob_BT, kept_BT, seen_B, fresh_B))
    return SeenByLoss(log_prob, kept if masked else None, seen, fresh)
