"""`bench rollout`: the floor's arithmetic, what is measured, and the command at a size that a CPU can run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from tests.engine.tiny_models import save
from verl_tim.bench import rollout
from verl_tim.bench.rollout import WORKLOADS, Figures, Load, Split
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
    rows = [
        Figures("vexact", load, seconds=[1.0]),
        Figures("vllm", load, Split(tensor=2), seconds=[4.0]),
        Figures("vllm", load, seconds=[2.0]),
        Figures("stock", load, problem="broken"),
    ]
    entries = rollout.as_json(rows, config_of("qwen3-0.6b", tmp_path), H200)
    assert [entry["over_vllm"] for entry in entries] == [2.0, 0.5, 1.0, None], "of vLLM's fastest split"
    assert entries[0]["share_of_floor"] == 8 / entries[0]["floor_tokens_per_second"]
    assert entries[3]["share_of_floor"] is None


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


@pytest.mark.parametrize("form", ["tp2", "dp2"])
def test_an_engine_on_two_ranks(tiny, form):
    asked = ["bench", "rollout", "--model", str(tiny), "--load", "3x9x6", "--device", "cpu", "--repeats", "2", "--json"]
    result = CliRunner().invoke(app, [*asked, "--engine", f"vexact:{form}", "--bandwidth", "1e-6"])
    assert result.exit_code == 0, result.stdout
    (row,) = json.loads(result.stdout)["models"][0]["rows"]
    assert row["engine"] == f"vexact:{form}"
    assert len(row["seconds"]) == 2
    assert row["tokens_per_second"] == pytest.approx(18 / (sum(row["seconds"]) / 2))
    # the floor of one device, doubled: all weights are read by each replica, a share of them by each rank
    shares, each = ([Load(2, 9, 6), Load(1, 9, 6)], 1.0) if form == "dp2" else ([Load(3, 9, 6)], 2.0)
    config = load_model_config(tiny)
    assert row["floor_tokens_per_second"] == pytest.approx(
        sum(rollout.floor_tokens_per_second(config, share, each * 1e6) for share in shares)
    )


def test_a_stop_keeps_what_was_measured_and_leaves_no_process(tiny):
    asked = ["--model", str(tiny), "--device", "cpu", "--load", "2x4x3", "--engine", "vexact", "--engine", "vexact:dp2"]
    command = [sys.executable, "-m", "verl_tim.cli", "bench", "rollout", *asked, "--repeats", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        first = bench.stderr.readline()
        assert "vexact, 2 x 4 -> 3: " in first, first + bench.stderr.read()
        children = []
        while len(children) < 2:
            children = psutil.Process(bench.pid).children()
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        told, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert [row["engine"] for row in json.loads(told)["models"][0]["rows"]] == ["vexact"]
    assert not any(child.is_running() for child in children)


def test_a_replica_that_fails_ends_the_others(tiny, monkeypatch):
    start = rollout._start

    def one_broken(place, replica, spec, split):
        return start(place, replica, {**spec, "folder": "/nowhere"} if replica else spec, split)

    monkeypatch.setattr(rollout, "_start", one_broken)
    (row,) = rollout.run(
        tiny, [("vexact", Split(data=2))], [Load(2, 4, 4)], device="cpu", repeats=1, memory=0.5
    )  # fmt: skip
    assert row.seconds == []
    assert row.problem.startswith("exit code 1"), row.problem
    assert "/nowhere" in row.problem


@pytest.mark.parametrize(
    ("text", "split"),
    [("tp1", Split()), ("tp2", Split(2)), ("pp4", Split(1, 4)), ("dp8", Split(data=8)), ("tp2dp2", Split(2, 1, 2))],
)
def test_a_split_is_read_as_it_is_written(text, split):
    assert Split.parse(text) == split
    assert str(split) == text


@pytest.mark.parametrize("text", ["", "2", "tp", "tp0", "tp2tp2", "ep2", "tp2-pp2", " tp2"])
def test_another_split_is_refused(text):
    with pytest.raises(ValueError, match="tpN"):
        Split.parse(text)
    result = CliRunner().invoke(app, ["bench", "rollout", "--device", "cpu", "--engine", f"vexact:{text}"])
    assert result.exit_code == 2
    assert "--engine" in result.stderr


def test_requests_are_shared():
    assert [share.requests for share in Split(data=3).shares(Load(8, 1, 1))] == [3, 3, 2]


def test_each_replica_needs_a_request(tiny):
    asked = ["bench", "rollout", "--model", str(tiny), "--device", "cpu", "--load", "1x4x4", "--engine", "vexact:dp2"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "--load" in result.stderr


def test_stock_is_not_split():
    result = CliRunner().invoke(app, ["bench", "rollout", "--device", "cpu", "--engine", "stock:pp2"])
    assert result.exit_code == 2
    assert "runs on one rank" in " ".join(result.stderr.split())
