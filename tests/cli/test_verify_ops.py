"""`verl-tim verify --ops` on a machine without a GPU: the CPU's schedules at a model's shapes."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import verify as verify_command
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
    ops = [name.split("(")[0] for name in of_model["comparisons"]]
    assert {"attention", "head", "moe"} <= set(ops)


def test_a_schedule_that_differs_fails_by_name(model, monkeypatch):
    exact = probe.swiglu_inference
    monkeypatch.setattr(probe, "swiglu_inference", lambda gate, up: exact(gate, up) * (1 + 0.5 * (len(gate) < 3)))
    result = verify(model)
    assert result.exit_code == 1
    assert "swiglu(" in (said := " ".join(result.stdout.split()))
    assert ") is not exact" in said


def test_a_contract_that_this_machine_has_not_fails_with_the_reason(model):
    result = verify(model, "--attention", "fa3")
    assert result.exit_code == 1
    assert "it needs a GPU" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--ops --attention chunk32", "--attention: 'chunk32' is unknown -> choose from auto, chunk64, fa3"),
        ("--ops --plant one_ulp", "--plant: goes with --ladder or --layers or the gate, not with --ops"),
        ("--ops --dtype float32", "--dtype: goes with"),
        ("--ops --rollout vexact", "--rollout: goes with"),
        ("--ops --out .", "--out: goes with --layers"),
        ("--ops --layers", "give one of them"),
        ("--ops --ladder", "give one of them"),
        ("--ops --dump x.npz", "--dump: goes with --ladder or --layers, not with --ops -> leave it out"),
        ("--trainer contract", "--trainer: goes with --layers, not with the gate"),
        ("--ladder --out x", "--out: goes with --layers, not with --ladder"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(model, words, says):
    result = CliRunner().invoke(app, ["verify", model, *words.split()])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_every_option_belongs_to_a_command():
    (command,) = (c for c in app.registered_commands if c.name == verify_command.NAME)
    names = set(inspect.signature(command.callback).parameters)
    assert names == {"context", "subjects", "ops", "ladder", "layers", "as_json"}.union(*verify_command.TAKES.values())


def test_a_folder_without_a_model_is_refused(tmp_path):
    result = verify(str(tmp_path))
    assert result.exit_code == 2
    assert "has no config.json" in " ".join(result.stderr.split())
