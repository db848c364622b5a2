"""`verl-tim verify --ops` on a machine without a GPU: the CPU's schedules at a model's shapes."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.numerics import probe
from verl_tim.verification.random_models import make_random_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_random_model("qwen3_moe", tmp_path_factory.mktemp("model")))


def verify(*arguments):
    return CliRunner().invoke(app, ["verify", "--ops", *arguments])


def test_reports_what_was_compared(model):
    result = verify(model, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    (of_model,) = report["models"]
    assert report["passed"]
    assert of_model["subject"] == model
    assert of_model["contract"].startswith("chunk64/cpu-e/bfloat16/")
    assert {"attention", "head", "moe"} <= set(of_model["comparisons"])


def test_a_schedule_that_differs_fails_by_name(model, monkeypatch):
    exact = probe.swiglu_inference
    monkeypatch.setattr(probe, "swiglu_inference", lambda gate, up: exact(gate, up) * (1 + 0.5 * (len(gate) < 3)))
    result = verify(model)
    assert result.exit_code == 1
    assert "swiglu is not exact" in " ".join(result.stdout.split())


def test_a_contract_that_this_machine_has_not_fails_with_the_reason(model):
    result = verify(model, "--attention", "fa3")
    assert result.exit_code == 1
    assert "it needs a GPU" in " ".join(result.stdout.split())


def test_a_contract_of_no_such_name_is_refused(model):
    result = verify(model, "--attention", "fa2")
    assert result.exit_code == 2
    assert "choose from auto, chunk64, fa3" in " ".join(result.stderr.split())


def test_a_folder_without_a_model_is_refused(tmp_path):
    result = verify(str(tmp_path))
    assert result.exit_code == 2
    assert "has no config.json" in " ".join(result.stderr.split())
