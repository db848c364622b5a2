"""What the worker dumped of its updates (`tim.dump.every`), put together by optimiser step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class MiniBatch:
    """The rows of one optimiser step, put together from the dumps."""

    rows: list[int] = field(default_factory=list)
    log_prob: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)


def mini_batches(update: dict[str, Any], width: int) -> dict[int, MiniBatch]:
    made: dict[int, MiniBatch] = {}
    for record in update["records"]:
        part = made.setdefault(record["mini_batch"], MiniBatch())
        missing = width - record["log_prob"].shape[1]
        part.rows += record["rows"].tolist()
        part.log_prob.append(torch.nn.functional.pad(record["log_prob"], (0, missing)))
        part.kept.append(torch.nn.functional.pad(record["kept"], (0, missing)))
    return made


def size_of_terms(batch: dict[str, Any], part: MiniBatch, aggregation: str) -> float:
    """What |A| and |A log p| come to where nothing cancels: the sums' rounding is relative to it, not to the loss."""
    mask = batch["response_mask"][part.rows]
    sizes = (batch["advantages"][part.rows].abs() * torch.cat(part.log_prob).abs().clamp(min=1))[mask]
    per_sequence = float(sizes.sum()) / max(1, int(mask.any(dim=1).sum()))
    return {"seq-mean-token-sum": per_sequence, "seq-mean-token-sum-norm": per_sequence / 24}.get(
        aggregation, float(sizes.mean())
    )
