"""Predictions beside what was measured: the rows of rates.yaml, computed again by the same formulas.

A row with role fit gave the formula its rates, so that its own time agrees by construction (which shows that the
arithmetic is right); `step`, `peak` and rows with role check are predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_tim.planning.decode import Decode
from verl_tim.planning.gpu import GIB
from verl_tim.planning.rates import ENGINES, Speeds, measured_gpu, measured_shape, table
from verl_tim.planning.rollout_time import simulate
from verl_tim.planning.settings import Settings
from verl_tim.planning.trainer_memory import TrainerMemory
from verl_tim.planning.trainer_time import TrainerTime, Work

MEMORY_BAND = 0.10
TIME_BAND = 0.25


@dataclass(frozen=True)
class Anchor:
    """One measured figure and its prediction.

    Attributes:
        what, unit: of the figure.
        fitted: the prediction's rates come from this very figure.
        band: how far the prediction may be off.
    """

    what: str
    unit: str
    measured: float
    predicted: float
    fitted: bool
    band: float
    source: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def good(self) -> bool:
        return abs(self.ratio - 1) <= self.band


def anchors() -> list[Anchor]:
    """Every figure of rates.yaml that a formula predicts."""
    return [*_rollouts(), *_trainers()]


def _rollouts() -> list[Anchor]:
    group, found = table()["rollout"], []
    speeds = Speeds(measured_gpu())
    for engine in ENGINES:
        for row in group[engine]:
            settings = _alone(engine=engine, sequences=row["sequences"])
            shape = row.get("shape", group["shape"])
            decode = Decode(measured_shape(shape), settings, speeds)
            answers = np.full(row["sequences"], float(row["output"]))
            time = simulate(decode, row["prompt"], answers, pool_tokens=1 << 30)
            load = f"{row['sequences']} x {row['prompt']} -> {row['output']}"
            drawn = row["sequences"] * row["output"]
            found.append(
                Anchor(
                    f"rollout {engine}, {shape}, {load}",
                    "tokens/s",
                    drawn / row["seconds"],
                    time.tokens_per_second,
                    row["role"] == "fit",
                    TIME_BAND,
                    group["source"],
                )
            )
    return found


def _trainers() -> list[Anchor]:
    group, found = table()["trainer"], []
    for numerics in ("contract", "stock"):
        for row in group[numerics]:
            shape = measured_shape(row["shape"], row["layers"])
            settings = _alone(numerics=numerics)
            tokens = row["sequences"] * row["length"]
            time = TrainerTime(shape, settings, Speeds(measured_gpu()))
            work = Work(float(tokens), float(row["sequences"] * row["length"] ** 2))
            depth = "" if row["role"] == "fit" else f" with {row['layers']} layers"
            name = f"{numerics}, {row['shape']}{depth}, {row['sequences']} x {row['length']}"
            step, forward = time.update(work, tokens).seconds, time.forward(work, tokens).seconds
            found += [
                Anchor(f"step, {name}", "s", row["step"], step, False, TIME_BAND, group["source"]),
                Anchor(f"forward, {name}", "s", row["forward"], forward, True, TIME_BAND, group["source"]),
            ]
            if numerics == "contract":  # the bench's stock side makes logits in row chunks, verl's does not
                peak = _peak(row, settings) / GIB
                found.append(Anchor(f"peak, {name}", "GiB", row["peak_gib"], peak, False, MEMORY_BAND, group["source"]))
    return found


def _peak(row: Mapping[str, Any], settings: Settings) -> float:
    """Bytes that PyTorch's allocator had given out at most: one micro-batch, embedding and head in the root."""
    shape = measured_shape(row["shape"], row["layers"])
    memory = TrainerMemory(shape, settings, accumulates=False, root_holds_all=True)
    moments = memory.update_moments(row["sequences"] * row["length"])
    return memory.parameters + memory.moments + max(moment.total for moment in moments)


def _alone(*, engine: str = "vexact", numerics: str = "contract", sequences: int = 256) -> Settings:
    """A process of its own on one GPU, as the benches run: fused AdamW, gradient checkpointing, nothing offloaded."""
    return Settings(
        nodes=1, gpus_per_node=1, cpu=False, prompts=1, samples=1, mini_prompts=1, epochs=1, prompt_length=1,
        response_length=1, numerics=numerics, master_bytes=4, shards=1, reshard=True, sequence_parallel=1,
        checkpointing=True, activation_offload=False, param_offload=False, optimizer_offload=False,
        offload_policy=False, foreach_adam=False, entropy=False, update_tokens=None, update_sequences=1,
        log_prob_tokens=None, log_prob_sequences=1, recompute_share=0.0, reference=False, engine=engine,
        rollout_bytes=2, tensor_parallel=1, pipeline_parallel=1, utilization=0.85, max_sequences=sequences,
        max_batched_tokens=8192, max_model_length=40960, graphs=True, frees=True, kv_tokens=None, kv_bytes=None,
        kv_fraction=0.3, page_size=64, cpu_page_size=16, prefix_cache=False, bucket_bytes=1 << 29, agent_workers=1,
        steps=1, training_epochs=1,
    )  # fmt: skip
