"""The optimiser steps of the gate: they move the weights, and leave a model of which equal bits show something."""

from __future__ import annotations

import weakref

import pytest
import torch

from verl_tim.engine import EngineDeadError
from verl_tim.training.in_process import InProcessTrainer
from verl_tim.verification.random_models import make_random_model
from verl_tim.verification.scenarios import UNCERTAIN, alone_and_in_company, bound, ladder, update_in_flight
from verl_tim.verification.subject import Subject

pytestmark = pytest.mark.usefixtures("one_rank")


def subject(folder, **changes):
    return Subject(str(folder), **{"requests": 4, "response_tokens": 24, "dtype": "float32", **changes})


@pytest.mark.parametrize("width", [64, 1024])
def test_a_step_moves_a_wide_model_as_far_as_a_narrow_one(tmp_path, width):
    made = subject(make_random_model("qwen3", tmp_path / "model", hidden_size=width, num_hidden_layers=1))
    drawn = made.generate(made.engine(), made.draw_prompts(4, tag="before"))
    before = torch.cat(made.score(drawn))
    made.update(drawn)
    moved = (torch.cat(made.score(drawn)) - before).abs()
    assert 0.0 < moved.mean() < 10.0


def test_a_model_that_is_certain_of_every_token_passes_nothing(tmp_path):
    result = alone_and_in_company(subject(make_random_model("qwen3", tmp_path / "model", peak=1e9)))
    assert not result.passed
    assert any(UNCERTAIN in failure for failure in result.failures)


def test_an_update_without_a_gradient_fails_its_scenario_by_name(random_models, monkeypatch):
    monkeypatch.setattr(InProcessTrainer, "update", lambda *_: 0.0)
    scenarios = dict(next(rung for rung in ladder(subject(random_models["qwen3"])) if rung.name == "weights").scenarios)
    for title in ("after weight updates", "update in flight", "partial rollouts"):
        result = scenarios[title]()
        assert result.name == title
        assert "gradient norm 0.0" in result.failures[0]


def test_a_scenario_holds_no_engine_and_no_older_weights_when_it_has_ended(random_models, monkeypatch):
    """Engines and weights of all scenarios together did not fit beside a trainer of 1.7 B parameters on 140 GiB."""
    made = subject(random_models["qwen3"])
    engines, weights = [], []

    def seen(list_of, method):
        def call(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            list_of.append(result)
            return result

        return call

    monkeypatch.setattr(Subject, "engine", seen(engines, Subject.engine))
    monkeypatch.setattr(Subject, "update", seen(weights, Subject.update))
    _title, run = bound(update_in_flight, made)
    assert run().passed
    assert run().passed
    assert len(engines) == 4
    for engine in engines:
        assert not engine.has_kv_cache
        assert not engine.model.nbytes
        with pytest.raises(EngineDeadError, match="was closed"):
            engine.step()
    first, last = ([weakref.ref(tensor) for _, tensor in update] for update in weights)
    weights.clear()
    assert all(ref() is None for ref in first)
    assert all(ref() is not None for ref in last)
