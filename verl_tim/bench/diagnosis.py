"""What the diagnosis adds to a training step on the trainer's side: metrics, sampled choices, token dump."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from verl_tim.bench.correction import Batch
from verl_tim.bench.measure import Measured, measure
from verl_tim.rollout.recorded import Recorded
from verl_tim.training.config import DumpConfig, TimConfig
from verl_tim.training.forward_records import ForwardRecord
from verl_tim.training.observer import StepBatch, StepObserver
from verl_tim.training.records import LossRecord


@dataclass(frozen=True)
class Routed:
    """How a mixture-of-experts model routes: sparse layers, experts, experts per token."""

    layers: int
    experts: int
    top_k: int


def benchmark(
    batch: Batch,
    *,
    sampled: int,
    routed: Routed | None,
    dumped_tokens: int,
    mini_batches: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Measure `StepObserver.after_update` on a batch: with the metrics alone, with the choices of `sampled` sequences
    beside them, and with a token dump of `dumped_tokens` beside them."""
    rows = len(batch.response_mask)
    step_batch, records = _step(batch, mini_batches)
    recorded, forwards = _choices(batch, sampled, routed)
    chosen = StepBatch(**{**vars(step_batch), "recorded": [recorded.get(row) for row in range(rows)]})
    with tempfile.TemporaryDirectory() as folder:
        silent, dumping = _observer(TimConfig()), _observer(
            TimConfig(run_dir=folder, dump=DumpConfig(tokens_per_step=dumped_tokens))
        )  # fmt: skip
        functions: dict[str, Callable[[], object]] = {
            "metrics": lambda: silent.after_update(1, step_batch, records),
            "metrics, choices": lambda: silent.after_update(1, chosen, records, (), forwards),
            "metrics, token dump": lambda: dumping.after_update(1, step_batch, records),
        }
        return measure(functions, torch.device("cpu"), repeats=repeats, done=done)


def _observer(tim: TimConfig) -> StepObserver:
    return StepObserver(
        tim, gated=False, bypass=False, clip_ratio_low=0.2, clip_ratio_high=0.2, decode=lambda ids: str(list(ids))
    )


def _step(batch: Batch, mini_batches: int) -> tuple[StepBatch, list[LossRecord]]:
    rows = len(batch.response_mask)
    lengths = batch.response_mask.sum(1).tolist()
    step_batch = StepBatch(
        keys=[f"{row}_0_0" for row in range(rows)],
        old_log_probs_BT=batch.old_log_probs,
        rollout_log_probs_BT=batch.rollout_log_probs,
        response_mask_BT=batch.response_mask,
        advantages_BT=batch.advantages,
        scores_B=torch.zeros(rows),
        prompts=[[0]] * rows,
        responses=[range(length) for length in lengths],
        uids=[str(row // 8) for row in range(rows)],
        versions_B=torch.zeros(rows, dtype=torch.int64),
    )
    records = []
    for number, part in enumerate(torch.arange(rows).chunk(mini_batches)):
        width = max(lengths[row] for row in part.tolist())
        kept = batch.response_mask[part, :width].bool().numpy()
        log_prob = batch.log_prob[part, :width].numpy()
        records.append(LossRecord(part.numpy(), log_prob, kept, number, fresh=number == 0))
    return step_batch, records


def _choices(batch: Batch, sampled: int, routed: Routed | None) -> tuple[dict[int, Recorded], list[ForwardRecord]]:
    """Of the first sequences; both sides choose alike."""
    generator = np.random.default_rng(0)
    recorded, forwards = {}, []
    for row in range(min(sampled, len(batch.response_mask))):
        length = int(batch.response_mask[row].sum())
        top1 = generator.integers(0, 1000, length).astype(np.int32)
        routes: np.ndarray | None = None
        layers: tuple[int, ...] = ()
        if routed is not None:
            # neighbours, so that the experts of one token are distinct
            first = generator.integers(0, routed.experts, (length, routed.layers, 1))
            routes = ((first + np.arange(routed.top_k)) % routed.experts).astype(np.int16)
            layers = tuple(range(routed.layers))
        recorded[row] = Recorded(top1, routes, layers)
        forwards.append(ForwardRecord(row, top1, routes, layers))
    return recorded, forwards
