"""What the trainer's forward says of the sampled sequences: their likeliest tokens, and its router's choices.

The trainer writes row numbers and marks into the batch before its first forward of the step. The worker's engine
records each marked row once, in the first forward that sees it under the weights that generated the batch: that of the
old log-probs, or under bypass the first mini-batch. The records travel with the metrics of the update, as `records` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_tim.training.records import ROW_FIELD

SAMPLED_FIELD = "tim_sampled"  # int64 (rows, 1): 1 for a row to be recorded
FORWARD_METRIC = "tim/forward_records"


@dataclass(frozen=True)
class ForwardRecord:
    """One row's response, R tokens, under the weights that generated it.

    Attributes:
        row: number in the step's batch.
        top1_R: int32, the likeliest token at each place.
        routes_RLK: int16, the k experts that each sparse layer chose where the token is predicted, most probable first;
            None for a dense model and for plain transformers.
        layers: the model's layer number of each of the L sparse layers.
    """

    row: int
    top1_R: np.ndarray
    routes_RLK: np.ndarray | None = None
    layers: tuple[int, ...] = ()


class ForwardRecorder:
    """Of one worker's engine: which rows of a micro-batch to record, and what was recorded."""

    def __init__(self) -> None:
        self._records: list[ForwardRecord] = []
        self._seen: set[int] = set()

    def restart(self) -> None:
        """The rollout has new weights: another step begins."""
        self._records, self._seen = [], set()

    def wanted(self, micro_batch: Any) -> dict[int, int]:
        """place in the micro-batch -> row, of the marked rows that are not recorded yet."""
        if SAMPLED_FIELD not in micro_batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
            return {}
        rows, marks = (_column(micro_batch[name]).tolist() for name in (ROW_FIELD, SAMPLED_FIELD))
        pairs = enumerate(zip(rows, marks, strict=True))
        return {place: row for place, (row, mark) in pairs if mark and row not in self._seen}

    def add(
        self,
        wanted: dict[int, int],
        micro_batch: Any,
        *,
        top1: Tensor,
        routes: Tensor | None = None,
        layers: tuple[int, ...] = (),
    ) -> None:
        """Record the wanted rows.

        Args:
            top1: integer, of the token after each position: (1, tokens) packed, or (rows, width) with each row's tokens
                from its first column on.
            routes: the same with (..., layers, k) behind it.
        """
        packed = top1.shape[0] == 1 and len(micro_batch) != 1
        for place, row in wanted.items():
            predicting = _predicting(micro_batch, place, packed=packed)
            line = 0 if packed else place
            self._records.append(
                ForwardRecord(
                    row,
                    top1[line, predicting].cpu().numpy().astype(np.int32),
                    None if routes is None else routes[line, predicting].cpu().numpy().astype(np.int16),
                    layers if routes is not None else (),
                )
            )
            self._seen.add(row)

    def add_from_logits(self, wanted: dict[int, int], micro_batch: Any, logits: Any) -> None:
        """As `add`, from logits (1, tokens, vocabulary) or (rows, width, vocabulary), of the wanted rows alone.

        Logits that are sharded over the vocabulary are left alone: there is no top-1 id then.
        """
        if isinstance(logits, DTensor):
            return
        packed = logits.shape[0] == 1 and len(micro_batch) != 1
        top1 = torch.full(logits.shape[:2], -1, dtype=torch.int64, device=logits.device)
        for place in wanted:
            predicting, line = _predicting(micro_batch, place, packed=packed), 0 if packed else place
            top1[line, predicting] = logits[line, predicting].detach().argmax(-1)
        self.add(wanted, micro_batch, top1=top1)

    def take(self) -> list[ForwardRecord]:
        """What was recorded since the last call."""
        records, self._records = self._records, []
        return records


def _column(values: Tensor) -> Tensor:
    return (values.values() if values.is_nested else values).reshape(-1)  # nested in V1, dense in the legacy trainer


def _predicting(micro_batch: Any, place: int, *, packed: bool) -> slice:
    """Positions whose output predicts the response of one row: shifted by one, as verl's `no_padding_2_padding`."""
    responses, offsets = micro_batch["responses"], micro_batch["input_ids"].offsets()
    if responses.is_nested:
        length = int(responses.offsets().diff()[place])
    else:
        length = int(micro_batch["attention_mask"][place, micro_batch["prompts"].shape[1] :].sum())
    end = int(offsets[place + 1]) - (0 if packed else int(offsets[place]))
    return slice(end - length - 1, end - 1)
