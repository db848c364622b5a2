"""`verify --ladder` and `--layers` on the command line: what they print and write, exit codes, bad input by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_tim.cli import app

runner = CliRunner()
SMALL = ["--requests", "4", "--tokens", "6", "--dtype", "float32"]


def verify(*words):
    return runner.invoke(app, ["verify", *words, *SMALL])


def test_the_ladder_of_a_moe_model(random_models):
    result = verify(random_models["qwen3_moe"], "--ladder", "--json")
    assert result.exit_code == 0, result.output
    (subject,) = json.loads(result.stdout)["subjects"]
    assert [rung["passed"] for rung in subject["rungs"]] == [True] * 6
    scenarios = sum(len(rung["scenarios"]) for rung in subject["rungs"])
    assert sum(": passed, " in line for line in result.stderr.splitlines()) == scenarios > 6


def test_a_planted_fault_stops_the_ladder_with_exit_code_1(random_models):
    result = verify(random_models["qwen3"], "--ladder", "--plant", "stock_activation", "--json")
    assert result.exit_code == 1
    (subject,) = json.loads(result.stdout)["subjects"]
    assert subject["summary"].startswith("FAIL at 3 aligned, dense, trainer against rollout")
    assert [rung["skipped"] for rung in subject["rungs"]] == [False] * 3 + [True] * 3


def test_layers_of_a_pair_that_must_agree(random_models, tmp_path):
    result = verify(random_models["qwen3"], "--layers", "--out", str(tmp_path / "exact"))
    assert result.exit_code == 0, result.output
    assert "agree bit for bit" in result.stdout
    assert json.loads((tmp_path / "exact/layers.json").read_text())["passed"]
    failed = verify(
        random_models["qwen3"], "--layers", "--plant", "stock_kernel", "--json", "--out", str(tmp_path / "planted")
    )
    assert failed.exit_code == 1
    (subject,) = json.loads(failed.stdout)["subjects"]
    assert subject["first_differing"] == "model.layers.0.self_attn.attention"
    assert "stands out" in (tmp_path / "planted" / subject["page"]).read_text()


def test_layers_of_other_pairs_are_sizes(random_models, tmp_path):
    words = ["--layers", "--rollout", "stock", "--trainer", "stock", "--json", "--out", str(tmp_path)]
    result = verify(random_models["qwen3"], *words)
    assert result.exit_code == 0, result.output
    assert not json.loads(result.stdout)["subjects"][0]["exact"]


@pytest.mark.parametrize("taken", ["layers.json", "layers.html"])
def test_a_place_of_layers_that_is_taken_is_named(random_models, tmp_path, taken):
    (tmp_path / taken).mkdir()
    words = ["--layers", "--dtype", "float32", "--requests", "4", "--tokens", "4", "--out", str(tmp_path)]
    result = verify(random_models["qwen3"], *words)
    assert result.exit_code == 2, result.output
    assert "--out: cannot write" in result.stderr


def test_bad_input_is_named(random_models, tmp_path):
    model = random_models["qwen3"]
    np.savez(tmp_path / "empty.npz", tokens=np.zeros(3))
    for words, named in (
        (["--ladder", "--layers"], "give one of them"),
        (["--ladder", "--ops"], "give one of them"),
        ([model, "--dump", "x.npz"], "goes with --ladder or --layers, not with the gate"),
        ([model, "--trainer", "stock"], "goes with --layers, not with the gate"),
        ([model, "--attention", "chunk64"], "goes with --ops, not with the gate"),
        ([model, "--ops"], "goes with --ladder or --layers or the gate, not with --ops"),
        (["--layers", "--dump", "x.npz"], "a dump is of one model"),
        ([model, "--layers", "--dump", str(tmp_path / "none.npz")], "there is no file"),
        ([model, "--ladder", "--dump", str(tmp_path / "empty.npz")], "lacks prompt_ids"),
        ([model, "--layers", "--trainer", "sglang"], "choose from contract, stock"),
        ([model, "--ladder", "--trainer", "stock"], "goes with --layers, not with --ladder"),
        ([model, "--ladder", "--plant", "one_ulp"], "choose from kept_generator"),
        ([str(tmp_path), "--ladder"], "neither a run folder"),
    ):
        result = verify(*words)
        assert result.exit_code == 2, (words, result.output)
        assert named in " ".join(result.stderr.split()), (words, result.stderr)
        assert not result.exception or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["probe", "baseline"])
def test_the_new_commands_have_help(name):
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output
