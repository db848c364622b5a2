"""The few numbers of a run that a terminal shows, out of verl's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from verl_tim.diagnosis.ends import end_steps
from verl_tim.launch.process import Step

REWARD = "critic/score/mean"
# Nats; written by this package's trainer. Exactly 0 means equal bits.
MISMATCH = "tim/delta_abs_max"
# Of the tokens that the gate compared, and how many it could not: those of other weights than the trainer's.
COMPARED_MISMATCH, UNCOMPARED = "tim/compared_delta_abs_max", "tim/uncompared_tokens"
# Where no gate looks: of the tokens that the trainer's own weights drew; logged where others are of older ones.
FRESH_MISMATCH, OLDEST = "tim/delta_abs_max_at_lag_0", "tim/staleness_max"
STEP_TIME = "timing_s/step"
_VALIDATION_PREFIX = "val-core/"


def validation_of(metrics: dict[str, Any]) -> float | None:
    """The validation score of a step, None where none was taken; the first of several data sources by name."""
    names = sorted(name for name in metrics if name.startswith(_VALIDATION_PREFIX) and "/mean@" in name)
    return metrics[names[0]] if names else None


def mismatch_of(metrics: dict[str, Any]) -> float | None:
    """The largest |d| of a step; where the gate compared a part of it only, or where a part was drawn under older
    weights, of the tokens of the trainer's own (d of the others holds what other weights say, too). None where there
    are none."""
    if metrics.get(UNCOMPARED):
        return metrics.get(COMPARED_MISMATCH)
    return metrics.get(FRESH_MISMATCH if metrics.get(OLDEST) else MISMATCH)


def headline(steps: Sequence[Step]) -> dict[str, Any]:
    """Reward (mean of the first and of the last `reward_steps` steps, as many as a comparison takes: `end_steps`),
    validation, largest mismatch, seconds per step (median, without the first).

    A number that the run did not log is None.
    """
    rewards = [step.metrics[REWARD] for step in steps if REWARD in step.metrics]
    edge = end_steps(len(rewards))
    validations = [value for step in steps if (value := validation_of(step.metrics)) is not None]
    mismatches = [value for step in steps if (value := mismatch_of(step.metrics)) is not None]
    # the first step compiles and warms caches
    times = [step.metrics[STEP_TIME] for step in steps if STEP_TIME in step.metrics][1:]
    return {
        "steps": max((step.number for step in steps), default=0),
        "reward_steps": edge if rewards else None,
        "reward_first": mean(rewards[:edge]) if rewards else None,
        "reward_last": mean(rewards[-edge:]) if rewards else None,
        "validation_first": validations[0] if validations else None,
        "validation_last": validations[-1] if validations else None,
        "mismatch_max": max(mismatches) if mismatches else None,
        "seconds_per_step": median(times) if times else None,
    }


def reward_title(steps: int | None) -> str:
    """What a table calls `reward_first` and `reward_last`."""
    return "reward, first and last " + ("step" if steps in (1, None) else f"{steps} steps")


def number(value: float | None) -> str:
    """A number as a table shows it; exactly zero is `0`, so that it is never a rounded one."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3g}"
