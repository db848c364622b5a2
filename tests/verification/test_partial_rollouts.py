"""Several weight updates while responses are drawn: exact at each token's version, and the scenario can fail."""

from __future__ import annotations

import pytest

from verl_tim.engine.engine import Engine
from verl_tim.engine.rows import RowTable
from verl_tim.engine.scheduler import Scheduler
from verl_tim.verification.scenarios import UPDATES, partial_rollouts
from verl_tim.verification.subject import Subject

pytestmark = pytest.mark.usefixtures("one_rank")


def subject(folder, **changes):
    return Subject(folder, **{"requests": 16, "response_tokens": 20, **changes})


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_token_is_exact_at_its_version(random_models, kind, dtype):
    result = partial_rollouts(subject(random_models[kind], dtype=dtype))
    assert result.passed, result.failures
    assert result.report.tokens == sum(result.counts[f"tokens at version {v}"] for v in range(UPDATES + 1))
    assert result.counts["responses of several versions"] > 1
    assert min(result.counts[f"tokens at version {v}"] for v in range(UPDATES + 1)) > 5


def test_stock_is_sized(random_models):
    result = partial_rollouts(subject(random_models["qwen3"], rollout="stock"))
    assert result.passed
    assert result.report.differing > 0


def test_keys_and_values_of_older_weights_are_noticed(random_models, monkeypatch):
    original = Scheduler.start_version

    def keep_the_cache(self, weight_version):
        if weight_version == 0:
            original(self, weight_version)

    monkeypatch.setattr(Scheduler, "start_version", keep_the_cache)
    result = partial_rollouts(subject(random_models["qwen3"]))
    assert not result.passed
    assert result.report.differing > 0


def test_a_wrong_version_is_noticed(random_models, monkeypatch):
    original = RowTable.record

    def one_too_old(self, slots, token, log_prob, kept_mass, top1, version):
        original(self, slots, token, log_prob, kept_mass, top1, max(0, version - 1))

    monkeypatch.setattr(RowTable, "record", one_too_old)
    result = partial_rollouts(subject(random_models["qwen3"]))
    assert not result.passed
    assert result.report.differing > 0


def test_an_update_that_did_not_arrive_is_noticed(random_models, monkeypatch):
    original = Engine.update_weights

    arrived = {}

    def lose_the_second(self, weights, version, **options):
        arrived[version] = arrived[1] if version == 2 else list(weights)
        return original(self, arrived[version], version, **options)

    monkeypatch.setattr(Engine, "update_weights", lose_the_second)
    result = partial_rollouts(subject(random_models["qwen3"]))
    assert not result.passed
    assert result.report.differing > 0
