"""Where a run's time goes."""

from __future__ import annotations

import pytest

from verl_tim.diagnosis.metric_log import MetricLog, Record
from verl_tim.diagnosis.speed import speed


def log(*steps):
    return MetricLog.merged(Record(at + 1, data) for at, data in enumerate(steps))


def test_medians_shares_and_stages():
    found = speed(
        log(
            {
                "timing_s/step": 10.0,
                "timing_s/gen": 9.0,
                "perf/total_num_tokens": 100.0,
                "timing_per_token_ms/gen": 20.0,
            },
            {"timing_s/step": 2.0, "timing_s/gen": 1.0, "timing_s/update_actor": 0.5, "perf/total_num_tokens": 100.0},
            {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "perf/total_num_tokens": 100.0},
        )
    )
    assert found.step_seconds == 4.0
    assert found.tokens_per_second == 25.0
    assert found.generated_per_second == 50.0
    assert found.rollout_share == pytest.approx(12 / 16)
    assert found.stage_seconds == pytest.approx({"rollout": 4.0, "actor update": 0.5, "other": 16 / 3 - 4.5})
    assert list(found.stage_seconds)[-1] == "other"


def test_what_was_not_logged_is_none():
    found = speed(log({"critic/score/mean": 0.5}))
    assert vars(found) == {
        "step_seconds": None,
        "tokens_per_second": None,
        "generated_per_second": None,
        "rollout_share": None,
        "stage_seconds": {},
    }


def test_the_legacy_name_of_the_step_time_serves():
    found = speed(log({"perf/time_per_step": 3.0}))
    assert found.step_seconds == 3.0
    assert found.stage_seconds == {}
    assert speed(log({"perf/time_per_step": 3.0, "timing_s/step": 2.0})).step_seconds == 2.0
    assert speed(log({"timing_s/step": 0.0})).step_seconds is None
