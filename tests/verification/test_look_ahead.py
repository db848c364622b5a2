"""The gate with an engine that launches a step before the last one has ended, as on a GPU."""

from __future__ import annotations

import pytest

from tests.engine.deferred_device import DeferredDevice
from verl_tim.diagnosis.gate import climb
from verl_tim.engine import start_engine
from verl_tim.verification import scenarios, subject
from verl_tim.verification.subject import Subject

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def _looks_ahead(monkeypatch):
    monkeypatch.setattr(
        subject, "start_engine", lambda config, crew=None: start_engine(config, device=DeferredDevice, crew=crew)
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_every_scenario_passes(random_models, kind):
    result = climb(scenarios.ladder(Subject(random_models[kind], requests=8, response_tokens=12)))
    assert result.passed, result.to_dict()


@pytest.mark.parametrize("tokens", [16, 20, 32])
def test_a_response_that_ends_in_the_step_under_way_is_not_sent_again(random_models, tokens):
    result = scenarios.partial_rollouts(Subject(random_models["qwen3"], requests=24, response_tokens=tokens))
    assert result.passed, result.failures
