"""`bench rollout`: the floor's arithmetic, what is measured, and the command at a size that a CPU can run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.engine.tiny_models import save
from verl_tim.bench import rollout
from verl_tim.bench.rollout import WORKLOADS, Figures, Load
from verl_tim.cli import app
from verl_tim.models import load_model_config
from verl_tim.tasks.random_model import hf_config

H200 = 4.3e12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save("qwen3", tmp_path_factory.mktemp("tiny"))


def config_of(shape, folder):
    hf_config(shape).save_pretrained(folder)
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("shape", "load", "floor"),
    # design figures: 3.44 GB of weights and 114,688 B of KV per token; about 60 GB and 98,304 B
    [
        ("qwen3-1.7b", Load(256, 128, 512), 74_600),
        ("qwen3-1.7b", Load(16, 128, 512), 16_600),
        ("qwen3-1.7b", Load(64, 512, 4096), 12_400),
        ("qwen3-1.7b", Load(16, 512, 4096), 8_450),
        ("qwen3-30b-a3b", Load(256, 128, 512), 15_600),
        ("qwen3-30b-a3b", Load(64, 128, 512), 4_410),
    ],
)
def test_the_floor_is_that_of_the_memory(tmp_path, shape, load, floor):
    assert load in WORKLOADS[shape]
    assert rollout.floor_tokens_per_second(config_of(shape, tmp_path), load, H200) == pytest.approx(floor, rel=0.02)


def test_figures_are_of_the_median():
    figures = Figures("vexact", Load(4, 8, 10), seconds=[1.0, 2.0, 4.0])
    assert figures.tokens_per_second == 20
    assert figures.spread == 3


def test_a_peer_gives_the_ratio(tmp_path):
    load = Load(2, 3, 4)
    rows = [Figures("vexact", load, [1.0]), Figures("vllm", load, [2.0]), Figures("stock", load, problem="broken")]
    entries = rollout.as_json(rows, config_of("qwen3-0.6b", tmp_path), H200)
    assert [entry["over_vllm"] for entry in entries] == [2.0, 1.0, None]
    assert entries[0]["share_of_floor"] == 8 / entries[0]["floor_tokens_per_second"]
    assert entries[2]["share_of_floor"] is None


@pytest.mark.parametrize("text", ["", "1x2", "0x1x1", "axbxc", "1x2x3x4"])
def test_a_load_has_three_sizes(text):
    with pytest.raises(ValueError, match="REQUESTSxPROMPTxOUTPUT"):
        Load.parse(text)


def test_the_command_measures_what_is_there(tiny, tmp_path):
    file = tmp_path / "profile.txt"
    result = CliRunner().invoke(
        app,
        ["bench", "rollout", "--model", str(tiny), "--load", "3x9x6", "--load", "1x4x5", "--device", "cpu",
         "--engine", "vexact", "--engine", "vllm", "--repeats", "2", "--profile", str(file), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    (section,) = told["models"]
    ours, vllm = section["rows"][:2], section["rows"][2:]
    assert [row["load"] for row in ours] == [
        {"requests": 3, "prompt": 9, "output": 6},
        {"requests": 1, "prompt": 4, "output": 5},
    ]
    for row in ours:
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"] > 0
        assert row["host"]["steps"] == row["load"]["output"]
        assert row["share_of_floor"] is None, "nobody knows this memory's speed"
    assert {row["problem"] for row in vllm} == {"vLLM is compared on a GPU only"}
    assert "aten::" in file.read_text()


def test_an_engine_that_fails_is_named(tiny):
    loads = ["--load", "1x4x3", "--load", "1x2000x9"]  # the second is beyond the model's context
    asked = ["bench", "rollout", "--model", str(tiny), *loads, "--device", "cpu", "--engine", "stock", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["models"][0]["rows"]
    assert all("max_model_len=2010 exceeds" in row["problem"] for row in rows)


def test_unknown_names_are_refused():
    for wrong in (["--engine", "sglang"], ["--shape", "gpt"], ["--load", "7"], ["--device", "tpu"], ["--model", "no"]):
        result = CliRunner().invoke(app, ["bench", "rollout", "--device", "cpu", *wrong])
        assert result.exit_code == 2
        assert wrong[0] in result.stderr


def test_an_engine_on_two_ranks(tiny):
    asked = ["bench", "rollout", "--model", str(tiny), "--load", "3x9x6", "--device", "cpu", "--repeats", "1", "--json"]
    result = CliRunner().invoke(app, [*asked, "--engine", "vexact", "--tensor-parallel", "2"])
    assert result.exit_code == 0, result.stdout
    told = json.loads(result.stdout)
    assert told["split"] == [2, 1]
    assert told["models"][0]["rows"][0]["tokens_per_second"] > 0
    result = CliRunner().invoke(app, [*asked, "--engine", "stock", "--pipeline-parallel", "2"])
    assert result.exit_code == 2
    assert "runs on one rank" in " ".join(result.stderr.split())
