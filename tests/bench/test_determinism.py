"""`verl-tim bench determinism`: each variant really runs under its flags, and the process is afterwards as before."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tests.training.tiny import model_folder
from verl_tim.bench import determinism as bench
from verl_tim.cli import app
from verl_tim.numerics import determinism
from verl_tim.training.in_process import InProcessTrainer, single_rank_group

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model"), layers=1))


def test_every_variant_runs_under_its_flags_and_leaves_none_behind(model, monkeypatch):
    seen = []
    update = InProcessTrainer.update

    def watched(self, *args, **kwargs):
        flags = determinism.flags()
        seen.append((flags["deterministic_algorithms"], flags["fill_uninitialized_memory"]))
        return update(self, *args, **kwargs)

    monkeypatch.setattr(InProcessTrainer, "update", watched)
    before = determinism.flags()
    with single_rank_group():
        measured = bench.benchmark(model, numerics="contract", dtype="float32", sequences=2, tokens=8, repeats=1)
    assert list(measured) == [bench.OFF, bench.ON, bench.FILLING]
    assert [on for on, _ in seen] == [False, True, True] * 2
    assert [fill for on, fill in seen if on] == [False, True] * 2
    assert all(one.cpu_seconds > 0 for one in measured.values())
    assert determinism.flags() == before
    assert torch.backends.cudnn.deterministic is before["cudnn_deterministic"]


def test_the_command_prints_ratios(model):
    words = ["bench", "determinism", model, "--dtype", "float32", "--sequences", "2", "--tokens", "8", "--repeats", "1"]
    result = runner.invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["results"]["off"]["cpu_ratio"] == 1.0
    assert content["results"]["deterministic"]["cpu_ratio"] > 0


@pytest.mark.parametrize(("words", "key"), [(["--numerics", "exact"], "--numerics"), (["--dtype", "fp8"], "--dtype")])
def test_words_that_mean_nothing_are_refused(model, words, key):
    result = runner.invoke(app, ["bench", "determinism", model, *words])
    assert result.exit_code == 2
    assert f"{key}: is {words[1]}" in result.stderr


def test_a_folder_without_a_model_is_refused(tmp_path):
    result = runner.invoke(app, ["bench", "determinism", str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json" in result.stderr
