"""`bench rollout`: the floor's arithmetic, what is measured, and the command at a size that a CPU can run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
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


def test_a_second_stop_does_not_cut_the_clean_end_short(tiny, monkeypatch):
    order, end_trees = [], rollout.end_trees

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout, "_wait", interrupted)
    monkeypatch.setattr(rollout, "end_trees", lambda trees: (order.append("end"), end_trees(trees)))
    rows = rollout.run(
        tiny, [("vexact", Split())], [Load(1, 4, 4)], device="cpu", repeats=1, memory=0.5,
        stopping=lambda: order.append("stopping"),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        list(rows)
    assert order == ["stopping", "end"]


def as_worker(monkeypatch, tmp_path, code: str) -> None:
    """Processes of `bench rollout` run this code instead of an engine."""
    program = tmp_path / "worker"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_an_engine_that_hangs_is_ended(tiny, tmp_path, monkeypatch):
    as_worker(monkeypatch, tmp_path, "import time; print('loading weights', flush=True); time.sleep(600)")
    before = psutil.Process().children()  # other tests' helpers
    asked = ["--model", str(tiny), "--device", "cpu", "--load", "2x4x3", "--engine", "vexact", "--limit", "2", "--json"]
    result = CliRunner().invoke(app, ["bench", "rollout", *asked])
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["models"][0]["rows"]
    assert row["problem"] == "ended after 2 s without a figure: loading weights"
    assert set(psutil.Process().children()) <= set(before)


def test_a_figure_gives_an_engine_new_time(tiny, tmp_path, monkeypatch):
    code = (
        "import json, sys, time\n"
        "for done in (1, 2, 3):\n"
        "    time.sleep(2)\n"
        "    one = {'seconds': [1.0], 'start_seconds': 1.0, 'host': {}}\n"
        "    open(sys.argv[4] + '.part', 'w').write(json.dumps([one] * done))\n"
        "    __import__('os').replace(sys.argv[4] + '.part', sys.argv[4])"
    )
    as_worker(monkeypatch, tmp_path, code)
    rows = rollout.run(
        tiny, [("vexact", Split())], [Load(1, 4, 4)] * 3, device="cpu", repeats=1, memory=0.5, limit=5
    )  # fmt: skip
    assert [row.problem for row in rows] == [""] * 3


def test_a_dead_replica_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    """An engine's own processes go with it, also where it was killed and could not end them."""
    note = tmp_path / "pid"
    code = (
        "import os, signal, subprocess\n"
        f"open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    as_worker(monkeypatch, tmp_path, code)
    (row,) = rollout.run(tiny, [("vexact", Split())], [Load(1, 4, 4)], device="cpu", repeats=1, memory=0.5)
    assert row.problem.startswith("exit code -9")
    pid = int(note.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_profile_that_cannot_be_written_is_refused_at_once(tiny, tmp_path):
    file = tmp_path / "nowhere" / "profile.txt"
    asked = ["--model", str(tiny), "--device", "cpu", "--load", "2x4x3", "--engine", "vexact", "--profile", str(file)]
    result = CliRunner().invoke(app, ["bench", "rollout", *asked])
    assert result.exit_code == 2
    assert "--profile" in result.stderr


def test_no_temporary_folder_is_told_by_name(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    asked = ["--model", str(tiny), "--device", "cpu", "--load", "2x4x3", "--engine", "vexact"]
    result = CliRunner().invoke(app, ["bench", "rollout", *asked])
    assert result.exit_code == 2
    assert "TMPDIR" in result.stderr


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, [["0", "1"], ["2", "3"]]),
        ("4,5,6,7,8", [["4", "5"], ["6", "7"]]),
        (" 3, 2 ,1,0", [["3", "2"], ["1", "0"]]),
        ("GPU-aa,GPU-bb, GPU-cc,GPU-dd", [["GPU-aa", "GPU-bb"], ["GPU-cc", "GPU-dd"]]),
    ],
)
def test_each_replica_sees_its_own_devices(monkeypatch, visible, devices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rollout._visible_devices(Split(tensor=2, data=2)) == devices


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
