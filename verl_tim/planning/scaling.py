"""A forecast on paper: two runs on 8, 64 and 512 GPUs, with the batch as it is and with one that grows.

The runs are configs like any other (overrides on a recipe), planned by `plan`; docs/scaling.md holds what `markdown`
prints. What does not shrink with more GPUs is shown apart: the last answers of a batch, the weight sync, verl's work
per sample on one machine, and the bytes that pass through its queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_tim.planning.gpu import GIB, Gpu
from verl_tim.planning.plan import Plan, make_plan
from verl_tim.planning.rates import table
from verl_tim.planning.settings import ACTOR, FSDP, MODEL, ROLLOUT
from verl_tim.planning.shape import find_shape
from verl_tim.planning.source import planned

GPU_COUNTS = (8, 64, 512)
_BASE_GPUS = 64  # whose batch is the case's
# Of one token on its way through verl's queue: five int64 fields (ids, masks, positions), five float32 (log-probs of
# rollout and trainer, advantages, returns, rewards).
_QUEUE_BYTES = 5 * 8 + 5 * 4


@dataclass(frozen=True)
class Case:
    """One run: a name, overrides on recipe cpu_grpo, prompts per step and per optimiser step."""

    name: str
    words: tuple[str, ...]
    prompts: int
    mini_prompts: int
    mean_prompt: int
    mean_answer: int


_COMMON = (
    "recipe=cpu_grpo",
    "cluster=gpu8",
    "model=hf",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    f"{ROLLOUT}.max_num_seqs=512",
    f"{ACTOR}.ppo_max_token_len_per_gpu=32768",
    f"{ACTOR}.optim.override_optimizer_config={{fused: true}}",
)
CASES = (
    Case(
        "Qwen3-1.7B, GRPO",
        (
            *_COMMON,
            f"{MODEL}.path=Qwen/Qwen3-1.7B",
            f"{ROLLOUT}.n=8",
            "data.max_prompt_length=1024",
            "data.max_response_length=8192",
        ),
        512, 128, 256, 4096,
    ),
    Case(
        "Qwen3-30B-A3B, GRPO",
        (
            *_COMMON,
            f"{MODEL}.path=Qwen/Qwen3-30B-A3B",
            f"{ROLLOUT}.n=16",
            "data.max_prompt_length=2048",
            "data.max_response_length=20480",
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            f"{FSDP}.optimizer_offload=true",
        ),
        512, 512, 256, 10240,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """One case on a number of GPUs. `grown`: the batch grows with the GPUs."""

    case: Case
    gpus: int
    grown: bool
    plan: Plan

    @property
    def sequences(self) -> int:
        return self.plan.memory.settings.sequences

    @property
    def tokens_per_gpu_second(self) -> float | None:
        step = self.plan.step
        return None if step is None else step.tokens / step.seconds / self.gpus

    @property
    def queue_bytes(self) -> float | None:
        """Per step, through verl's TransferQueue."""
        return None if self.plan.step is None else self.plan.step.tokens * _QUEUE_BYTES

    def seconds(self, name: str) -> float | None:
        """Of one part of the step."""
        step = self.plan.step
        return None if step is None else sum(part.seconds for part in step.parts if part.name == name)

    def to_mapping(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "case": self.case.name,
            "gpus": self.gpus,
            "batch_grows": self.grown,
            "sequences": self.sequences,
            "tokens_per_gpu_second": self.tokens_per_gpu_second,
            "queue_bytes": self.queue_bytes,
            "plan": plan.to_mapping(),
        }


def forecasts(gpu: Gpu, cases: Sequence[Case] = CASES) -> list[Forecast]:
    """Every case on every number of GPUs, with a batch that stays and one that grows."""
    found = []
    for case in cases:
        config = planned(case.words).config
        shape = find_shape(config.actor_rollout_ref.model.path)
        for grown in (False, True):
            for gpus in GPU_COUNTS:
                more = gpus / _BASE_GPUS if grown else 1.0
                config.trainer.nnodes = gpus // config.trainer.n_gpus_per_node
                config.data.train_batch_size = int(case.prompts * more)
                config.actor_rollout_ref.actor.ppo_mini_batch_size = int(case.mini_prompts * more)
                means = {"mean_prompt": case.mean_prompt, "mean_answer": case.mean_answer}
                found.append(Forecast(case, gpus, grown, make_plan(config, shape, gpu, **means)))
    return found


_COLUMNS = (
    "batch", "GPUs", "sequences", "fullest phase, GiB", "step, s", "rollout, s (tail)", "verl, s", "log-probs, s",
    "update, s (collectives)", "sync, s", "tokens / GPU s", "queue, GB",
)  # fmt: skip


def markdown(rows: Sequence[Forecast]) -> str:
    """One table per case, and one of the rates behind them that were not measured."""
    parts = []
    for name in dict.fromkeys(row.case.name for row in rows):
        mine = [row for row in rows if row.case.name == name]
        gpu = mine[0].plan.memory.gpu.name
        parts += [
            f"### {name}, {gpu}", "",
            "| " + " | ".join(_COLUMNS) + " |", "| " + " | ".join("---" for _ in _COLUMNS) + " |",
            *("| " + " | ".join(_cells(row)) + " |" for row in mine), "",
        ]  # fmt: skip
    parts += ["### Rates that were not measured", "", "| rate | value | from |", "| --- | --- | --- |"]
    for name, entry in table().items():
        # `cpu_*` are of machines without a GPU, of which there is no forecast
        if isinstance(entry, dict) and entry.get("kind") == "assumed" and not name.startswith("cpu_"):
            parts.append(f"| `{name}` | {entry['value']:.3g} | {entry['source']} |")
    return "\n".join([*parts, ""])


def _cells(row: Forecast) -> list[str]:
    plan, step = row.plan, row.plan.step
    fullest = max(plan.memory.phases, key=lambda phase: phase.total)
    head = [
        "grows" if row.grown else "stays", f"{row.gpus}", f"{row.sequences:,}",
        f"{fullest.name} {fullest.total / GIB:.0f}",
    ]  # fmt: skip
    if step is None:
        return [*head, "does not fit", *("-" for _ in range(7))]
    collectives = step.update.network * plan.memory.settings.prompts / plan.memory.settings.mini_prompts
    assert row.tokens_per_gpu_second is not None
    assert row.queue_bytes is not None
    return [
        *head,
        f"{step.seconds:,.0f}",
        f"{step.rollout.seconds:,.0f} ({step.rollout.tail:,.0f})",
        _short(row.seconds("verl's own work")),
        _short(row.seconds("old log-probs")),
        f"{_short(row.seconds('update'))} ({_short(collectives)})",
        _short(row.seconds("weight sync")),
        f"{row.tokens_per_gpu_second:,.0f}",
        f"{row.queue_bytes / 1e9:,.2g}",
    ]


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
