"""Several runs at once: as many as asked for, within the time, each to its end or cleanly ended, and none twice."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from verl_tim.launch import process, side_by_side
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.matrix import Cell, Matrix, finished
from verl_tim.launch.recipes import find_recipe
from verl_tim.launch.side_by_side import TIME_IS_UP, State, run_side_by_side, took

# A run: a grandchild that would outlive it, `steps` lines of metrics, and the exit code that its folder's name says.
VERL = """
import json, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
steps, pause = int(sys.argv[2]), float(sys.argv[3])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "pids").write_text(f"{child.pid}")
(folder / "span").write_text(f"{time.time()}")
with open(folder / "metrics.jsonl", "a", buffering=1) as file:
    for step in range(1, steps + 1):
        time.sleep(pause)
        data = {"critic/score/mean": step / 10, "tim/delta_abs_max": 0.5}
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
(folder / "span").write_text((folder / "span").read_text() + f" {time.time()}")
child.kill()
if folder.name.startswith("dies"):
    print("ray.exceptions.ActorDiedError: The actor died unexpectedly")
    sys.exit(0 if (folder / "metrics.1.jsonl").exists() else 1)
sys.exit(7 if folder.name.startswith("bad") else 0)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(side_by_side, "_GAP_SECONDS", 0.0)
    monkeypatch.setattr(side_by_side, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(side_by_side, "_END_SECONDS", 0.0)


@pytest.fixture
def verl(monkeypatch, tmp_path):
    """Replaces verl by a script of so many steps and so long a pause before each."""
    script = tmp_path / "verl.py"
    script.write_text(textwrap.dedent(VERL))

    def use(steps=2, pause=0.05):
        words = [str(steps), str(pause)]
        monkeypatch.setattr(process, "verl_command", lambda folder: [sys.executable, str(script), str(folder), *words])

    return use


def matrix_of(root: Path, *names: str, save_freq=-1, restarts=0, **ray):
    cells = tuple(Cell(name, (f"data.seed={number}",)) for number, name in enumerate(names))
    configs = {
        name: OmegaConf.create(
            {
                "tim": {"run_dir": str(root / name), "restarts": {"limit": restarts, "wait": 0}},
                "trainer": {
                    "resume_mode": "disable",
                    "resume_from_path": None,
                    "val_before_train": True,
                    "default_local_dir": str(root / name / "checkpoints"),
                    "total_training_steps": 2,
                    "save_freq": save_freq,
                },
                "ray_kwargs": {"ray_init": ray},
            }
        )
        for name in names
    }
    return Matrix(find_recipe("cpu_grpo"), root, cells), configs


def run(matrix, configs, *, at_once=2, seconds=None):
    seen = []
    states, code = run_side_by_side(matrix, configs, at_once=at_once, seconds=seconds, on_change=seen.append)
    return {state.name: state for state in states}, code, seen


def spans(root):
    return {path.parent.name: list(map(float, path.read_text().split())) for path in root.glob("*/span")}


def alive(root):
    pids = [int(path.read_text()) for path in root.glob("*/pids")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_two_at_a_time_and_never_three(verl, tmp_path):
    verl(steps=2, pause=0.4)
    states, code, seen = run(*matrix_of(tmp_path / "runs", "a", "b", "c"))
    assert code == 0
    assert {state.state for state in states.values()} == {State.FINISHED}
    assert max(sum(state.state is State.RUNNING for state in now) for now in seen) == 2
    span = spans(tmp_path / "runs")
    assert span["b"][0] < span["a"][1], "side by side"
    assert span["c"][0] > min(span["a"][1], span["b"][1]), "the third waits for a place"
    assert states["a"].metrics["critic/score/mean"] == 0.2
    assert not alive(tmp_path / "runs")


def test_a_failure_is_the_exit_code_and_keeps_none_from_running(verl, tmp_path):
    verl()
    matrix, configs = matrix_of(tmp_path / "runs", "bad", "a", "b")
    states, code, _ = run(matrix, configs, at_once=1)
    assert code == 7
    assert [state.state for state in states.values()] == [State.FAILED, State.FINISHED, State.FINISHED]
    assert set(finished(matrix)) == {"a", "b"}
    (attempt,) = (tmp_path / "runs" / "bad" / "attempts.jsonl").read_text().splitlines()
    assert json.loads(attempt)["exit_code"] == 7
    assert took(tmp_path / "runs" / "a") > 0


def test_when_the_time_is_up_everything_is_ended_and_can_go_on(verl, tmp_path):
    verl(steps=2, pause=30)
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b", "c")
    began = time.monotonic()
    states, code, _ = run(matrix, configs, seconds=2.5)
    assert time.monotonic() - began < 20
    assert code == TIME_IS_UP
    assert [state.state for state in states.values()] == [State.STOPPED, State.STOPPED, State.WAITING]
    assert not alive(root)
    assert finished(matrix) == {}
    # the same again: what was interrupted begins anew, in a folder of its own again
    (root / "a" / "left").write_text("of the first start")
    verl(steps=2, pause=0.05)
    states, code, _ = run(matrix, configs, seconds=60)
    assert code == 0
    assert not (root / "a" / "left").exists()
    assert set(finished(matrix)) == {"a", "b", "c"}


def test_nothing_is_begun_that_would_not_end_in_time(verl, tmp_path):
    verl(steps=2, pause=1.0)
    states, code, _ = run(*matrix_of(tmp_path / "runs", "a", "b"), at_once=1, seconds=3.5)
    assert code == TIME_IS_UP
    assert [state.state for state in states.values()] == [State.FINISHED, State.WAITING]
    # with checkpoints a beginning is not lost
    states, _, _ = run(*matrix_of(tmp_path / "more", "a", "b", save_freq=1), at_once=1, seconds=3.5)
    assert [state.state for state in states.values()] == [State.FINISHED, State.STOPPED]


def test_a_run_with_a_checkpoint_goes_on_from_it(verl, tmp_path):
    verl(steps=1)
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", save_freq=1)
    (root / "a" / "checkpoints").mkdir(parents=True)
    (root / "a" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (root / "a" / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {}}) + "\n")
    plain = OmegaConf.to_container(configs["a"])
    (root / "a" / "config.yaml").write_text(json.dumps(plain))
    _, code, _ = run(matrix, configs)
    assert code == 0
    assert (root / "a" / "metrics.1.jsonl").is_file(), "the first attempt's file is kept"
    assert OmegaConf.load(root / "a" / "config.yaml").trainer.resume_mode == "auto"


def test_a_process_that_died_is_begun_again_as_restarts_say(verl, tmp_path):
    verl()
    states, code, _ = run(*matrix_of(tmp_path / "runs", "dies", restarts=1))
    assert code == 0
    assert states["dies"].state is State.FINISHED
    states, code, _ = run(*matrix_of(tmp_path / "more", "dies"))
    assert (code, states["dies"].state) == (1, State.FAILED)


def test_runs_in_one_cluster_are_refused(verl, tmp_path, monkeypatch):
    verl()
    joining = matrix_of(tmp_path / "runs", "a", "b", address="auto")
    with pytest.raises(LaunchError, match="joins a Ray cluster"):
        run(*joining)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(LaunchError, match="joins a Ray cluster"):
        run(*matrix_of(tmp_path / "runs", "a", "b"))
    assert run(*joining, at_once=1)[1] == 0


@pytest.fixture
def heard_interrupts():
    """A background job of a shell ignores SIGINT, and these tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_all_of_them(verl, tmp_path, heard_interrupts):
    verl(steps=2, pause=30)
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b")

    # on_change is called at the starts only, so the second start's call may come before its script has begun
    def on_change(states):
        if sum(state.state is State.RUNNING for state in states) == 2:
            deadline = time.monotonic() + 60
            while len(list(root.glob("*/span"))) < 2:
                assert time.monotonic() < deadline, "the two scripts did not begin"
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    states, code = run_side_by_side(matrix, configs, at_once=2, seconds=None, on_change=on_change)
    assert code == 130
    assert {state.state for state in states} == {State.STOPPED}
    assert not alive(root)


def test_the_command_takes_the_limits(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from verl_tim.cli import app
    from verl_tim.launch import start

    monkeypatch.setattr(start, "make_ready", lambda config, folder_is_free: None)
    asked = {}

    def fake(matrix, configs, *, at_once, seconds, on_change):
        asked.update(runs=list(configs), at_once=at_once, seconds=seconds)
        state = side_by_side.RunState("vexact", tmp_path, State.STOPPED, 3, 20, 12.0, 130)
        on_change([state])
        return [state], TIME_IS_UP

    monkeypatch.setattr(side_by_side, "run_side_by_side", fake)
    words = ["train", "recipe=cpu_grpo", "+matrix=paper", "tim.only=vexact", f"tim.run_dir={tmp_path}"]
    result = CliRunner().invoke(app, [*words, "--at-once", "3", "--minutes", "9", "--json"])
    assert result.exit_code == TIME_IS_UP, result.output
    assert asked["runs"] == ["vexact"]
    assert asked["at_once"] == 3
    assert 0 < asked["seconds"] < 540, "composing is part of the time"
    found = json.loads(result.stdout)
    assert found["exit_code"] == TIME_IS_UP
    assert found["runs"][0]["state"] == "stopped"
    shown = CliRunner().invoke(app, [*words, "--minutes", "9"])
    assert "stopped" in shown.stdout
    assert asked["at_once"] == 1
    alone = CliRunner().invoke(app, ["train", "recipe=cpu_grpo", "--at-once", "2"])
    assert alone.exit_code == 2
