"""The gate catches each planted error and names its kind; without one it passes with everything counted."""

from __future__ import annotations

import contextlib
import json

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import verify
from verl_tim.commands.verify import default_dtypes
from verl_tim.diagnosis.gate import climb
from verl_tim.training.in_process import single_rank_group
from verl_tim.verification.faults import FAULTS
from verl_tim.verification.random_models import KINDS, make_random_model
from verl_tim.verification.scenarios import ladder, preempted
from verl_tim.verification.subject import Subject

# What the gate must say: the rung that fails first, and words of the cause.
NAMED = {
    "one_ulp": ("batch", ("1 ulp apart", "record:")),
    "stock_kernel": ("batch", ("model.layers.0.self_attn.attention: first op whose bits differ",)),
    "wrong_temperature": ("sampling", ("temperature: the rollout recorded its log-prob at T=1",)),
    "skipped_update": ("weights", ("weights: the rollout says version", "did not reach it")),
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model_path(request, tmp_path_factory):
    return str(make_random_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    return str(make_random_model("qwen3", tmp_path_factory.mktemp("dense")))


def run(path, *, dtype="bfloat16", rollout="vexact", fault=None):
    with single_rank_group(), FAULTS[fault]() if fault else contextlib.nullcontext():
        return climb(ladder(Subject(path, dtype=dtype, rollout=rollout, requests=6, response_tokens=12)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gate_passes(model_path, dtype):
    result = run(model_path, dtype=dtype)
    assert result.passed, result.summary()
    totals = result.totals()
    for name in (
        "preemptions",
        "chunk cuts",
        "prefix hit tokens",
        "weight updates",
        "tokens at T=0",
        "tokens at T=1.3",
    ):
        assert totals[name] > 0, name


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(dense_path, fault):
    result = run(dense_path, fault=fault)
    assert result.exit_code == 1
    rung, scenario = result.first_failure()
    expected_rung, words = NAMED[fault]
    assert rung.name == expected_rung
    for word in words:
        assert word in scenario.failures[0], scenario.failures[0]


@pytest.mark.parametrize(("requests", "tokens"), [(4, 4), (4, 5), (4, 6), (8, 4)])
def test_the_smallest_gate_still_preempts(dense_path, requests, tokens):
    with single_rank_group():
        result = preempted(Subject(dense_path, requests=requests, response_tokens=tokens))
    assert result.passed, result.failures


@pytest.mark.parametrize("fault", FAULTS)
def test_the_command_catches_it_in_every_model_and_dtype(fault):
    result = CliRunner().invoke(app, ["verify", "--plant", fault, "--requests", "4", "--tokens", "6", "--json"])
    assert result.exit_code == 1, result.output
    subjects = json.loads(result.stdout)["subjects"]
    assert len(subjects) == len(KINDS) * len(default_dtypes())
    assert not any(subject["passed"] for subject in subjects)


def test_without_a_model_the_gate_takes_the_dtypes_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "default_dtypes", lambda: ("bfloat16",))
    targets = verify.resolve([], rollout=None, dtypes=None, work=tmp_path)
    assert [target.dtypes for target in targets] == [("bfloat16",)] * len(KINDS)


def test_stock_rollout_is_sized_not_judged(dense_path):
    result = run(dense_path, rollout="stock")
    assert result.passed
    assert all(scenario.report.differing > 0 for rung in result.rungs for scenario in rung.results)


def test_random_models_are_peaked(model_path):
    with single_rank_group():
        spread = Subject(model_path, requests=6, response_tokens=24).spread()
    assert spread["mean_top_probability"] > 0.5
    assert spread["log_prob_std"] > 1.0
