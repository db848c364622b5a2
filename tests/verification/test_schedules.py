"""Scenarios of arrivals, step sizes and sleep: they bring about what they are named for, and a wrong bit fails them."""

from __future__ import annotations

import pytest

from verl_tim.verification.faults import FAULTS
from verl_tim.verification.scenarios import asleep_and_awake, every_step_size, staggered_arrivals
from verl_tim.verification.subject import Subject

pytestmark = pytest.mark.usefixtures("one_rank")


def subject(folder, **changes):
    return Subject(folder, **{"requests": 6, "response_tokens": 10, "dtype": "float32", **changes})


@pytest.mark.parametrize("scenario", [staggered_arrivals, every_step_size, asleep_and_awake])
def test_one_ulp_fails_it(random_models, scenario):
    made = subject(random_models["qwen3"])
    with FAULTS["one_ulp"]():
        result = scenario(made)
    assert not result.passed
    assert result.report.differing > 0
    assert scenario(made).passed


def test_a_pool_too_small_for_the_largest_step_is_said(random_models, monkeypatch):
    made = subject(random_models["qwen3"])
    small = made.engine
    monkeypatch.setattr(made, "engine", lambda **settings: small(**settings, page_size=4, kv_cache_tokens=40))
    result = every_step_size(made)
    assert not result.passed
    assert "no step had 9 to 12 rows; they had " in result.failures[0]


def test_weights_that_come_back_wrong_from_sleep_fail_it(random_models, monkeypatch):
    made = subject(random_models["qwen3"])
    stream = made.trainer.weights

    def wrong():
        for name, tensor in stream():
            yield name, tensor * 1.01 if name.endswith("mlp.down_proj.weight") else tensor

    monkeypatch.setattr(made.trainer, "weights", wrong)
    result = asleep_and_awake(made)
    assert not result.passed
    assert result.report.differing > 0
