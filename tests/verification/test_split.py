"""`verl-tim verify` of a rollout on several ranks against the trainer on one."""

from __future__ import annotations

import contextlib
import json

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.gate import climb
from verl_tim.training.in_process import single_rank_group
from verl_tim.verification.random_models import make_random_model
from verl_tim.verification.scenarios import ladder
from verl_tim.verification.subject import Subject


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_random_model("qwen3_moe", tmp_path_factory.mktemp("model")))


def test_a_rollout_that_did_not_get_the_update_is_named(folder, monkeypatch):
    """The cause is found with a replay on one rank."""
    from verl_tim.engine.parallel_engine import ParallelEngine

    def skip(self, weights, version, **_):
        self._weight_version = version
        return []

    with single_rank_group():
        subject = Subject(folder, requests=4, response_tokens=6, tensor_parallel=2)
        with contextlib.closing(subject):
            subject.update(subject.generate(subject.whole_engine(), subject.draw_prompts(4, tag="a")))
            monkeypatch.setattr(ParallelEngine, "update_weights", skip)
            result = climb(ladder(subject))
    assert not result.passed
    assert "did not reach it" in str(result.to_dict())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tensor-parallel", "2", "--plant", "one_ulp"], "plants in one process"),
        (["--pipeline-parallel", "2", "--ladder"], "goes with the gate, not with --ladder"),
        (["--pipeline-parallel", "2", "--rollout", "stock"], "runs on one rank"),
        (["--tensor-parallel", "8", "--dtype", "float32"], "does not divide the model's"),
    ],
)
def test_what_does_not_go_together(folder, arguments, says):
    result = CliRunner().invoke(app, ["verify", folder, *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_the_gate_passes_on_four_ranks(folder):
    split = ["--tensor-parallel", "2", "--pipeline-parallel", "2"]
    arguments = [*split, "--dtype", "bfloat16", "--requests", "6", "--tokens", "12", "--json"]
    result = CliRunner().invoke(app, ["verify", folder, *arguments])
    assert result.exit_code == 0, result.output
    (subject,) = json.loads(result.stdout)["subjects"]
    assert subject["passed"]
    assert (subject["tensor_parallel"], subject["pipeline_parallel"]) == (2, 2)
