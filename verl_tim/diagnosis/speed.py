"""Where a run's time goes: summaries of verl's `timing_s/*` and `perf/*` (verl 0.9.1, trainer/ppo/metric_utils.py)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from verl_tim.diagnosis.metric_log import MetricLog

STEP_TIME = ("timing_s/step", "perf/time_per_step")
# Stages that follow one another inside a step, in order; what they leave of the step is "other".
STAGES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
}


@dataclass(frozen=True)
class Speed:
    """Times of a run's training steps. None where the metrics needed were not logged.

    Attributes:
        step_seconds: median time of a step; validation between steps is not in it.
        tokens_per_second: median over steps of prompt and response tokens of the batch per second of the step, all
            devices together.
        generated_per_second: median over steps of response tokens per second of generation.
        rollout_share: time spent generating as a share of all step time.
        stage_seconds: mean seconds per step by stage name, "other" last; empty when no stage was logged.
    """

    step_seconds: float | None
    tokens_per_second: float | None
    generated_per_second: float | None
    rollout_share: float | None
    stage_seconds: dict[str, float]


def step_seconds(log: MetricLog) -> dict[int, float]:
    """Step -> its time, of the steps that logged one."""
    times: dict[int, float] = {}
    for name in reversed(STEP_TIME):
        times |= dict(zip(*log.series(name), strict=True))
    return {step: seconds for step, seconds in times.items() if seconds > 0}


def speed(log: MetricLog) -> Speed:
    """Summarise a run's times."""
    times = step_seconds(log)
    total = sum(times.values())

    tokens = dict(zip(*log.series("perf/total_num_tokens"), strict=True))
    rates = [tokens[step] / seconds for step, seconds in times.items() if step in tokens]
    _, per_token_ms = log.series("timing_per_token_ms/gen")
    generated = [1000.0 / milliseconds for milliseconds in per_token_ms if milliseconds > 0]

    stages: dict[str, float] = {}
    if times:
        for key, label in STAGES.items():
            seconds = dict(zip(*log.series(f"timing_s/{key}"), strict=True))
            spent = sum(value for step, value in seconds.items() if step in times)
            if seconds:
                stages[label] = spent / len(times)
        if stages:
            stages["other"] = max(0.0, total / len(times) - sum(stages.values()))
    return Speed(
        step_seconds=median(times.values()) if times else None,
        tokens_per_second=median(rates) if rates else None,
        generated_per_second=median(generated) if generated else None,
        rollout_share=stages["rollout"] * len(times) / total if "rollout" in stages else None,
        stage_seconds=stages,
    )
