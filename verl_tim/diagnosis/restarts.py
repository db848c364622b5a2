"""Rollout replicas that died during a run and were started again: the steps in which they did, and the words for it."""

from __future__ import annotations

from typing import Any

from verl_tim.diagnosis.formats import listed
from verl_tim.diagnosis.metric_log import RESTARTS, MetricLog

_SHOWN = 8  # steps in a sentence


def restarts_of(log: MetricLog) -> dict[int, int]:
    """Step -> restarts in it, of the steps with any."""
    return {step: int(count) for step, count in zip(*log.series(RESTARTS), strict=True) if count > 0}


def as_json(restarts: dict[int, int]) -> dict[str, Any]:
    """`{"count": all together, "steps": [{"step", "count"}, ...]}`."""
    steps = [{"step": step, "count": count} for step, count in restarts.items()]
    return {"count": sum(restarts.values()), "steps": steps}


def in_words(restarts: dict[int, int]) -> str:
    """For after a run's name; at least one restart. A count stands behind a step with several."""
    count = sum(restarts.values())
    several = len(restarts) > 1
    steps = [f"{step} ({number})" if several and number > 1 else f"{step}" for step, number in restarts.items()]
    if len(steps) > _SHOWN:
        steps = [*steps[: _SHOWN - 1], f"{len(steps) - _SHOWN + 1} more"]
    who = "1 rollout replica died and was" if count == 1 else f"{count} times a rollout replica died and was"
    return f"{who} started again, at step{'s' * several} {listed(steps)}"
