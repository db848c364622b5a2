"""Several runs at once: as many as asked for, within the time, each to its end or cleanly ended, and none twice."""

import errno
import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from verl_tim.commands.several import not_begun, time_is_up
from verl_tim.launch import process, side_by_side
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.exit_code import TIME_IS_UP
from verl_tim.launch.matrix import Cell, Matrix, finished, prepared, run_all
from verl_tim.launch.recipes import find_recipe
from verl_tim.launch.record import held
from verl_tim.launch.side_by_side import State, run_side_by_side, took

# A run: a grandchild that would outlive it, `steps` lines of metrics, and the exit code that its folder's name says.
VERL = """
import json, os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
steps, pause = int(sys.argv[2]), float(sys.argv[3])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
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
                    "device": "cpu",
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
    assert took(tmp_path / "runs" / "a").seconds > 0


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
    began = time.monotonic()
    run(*matrix_of(tmp_path / "first", "a"), at_once=1)
    enough_for_one = 1.7 * (time.monotonic() - began)  # also on a machine that is busy
    states, code, _ = run(*matrix_of(tmp_path / "runs", "a", "b"), at_once=1, seconds=enough_for_one)
    assert code == TIME_IS_UP
    assert [state.state for state in states.values()] == [State.FINISHED, State.WAITING]
    assert "s are left to run, and a took" in states["b"].not_begun[0]
    assert not_begun(list(states.values()))[0].startswith("not begun: b; ")
    # with checkpoints a beginning is not lost
    states, _, _ = run(*matrix_of(tmp_path / "more", "a", "b", save_freq=1), at_once=1, seconds=enough_for_one)
    assert [state.state for state in states.values()] == [State.FINISHED, State.STOPPED]


def test_what_another_machine_took_counts_until_a_run_has_finished_here(verl, tmp_path):
    """A matrix goes on on another machine with what `matrix.json` and the runs' folders brought."""
    verl(steps=2, pause=1.0)
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b", "c", "d")
    run(matrix, {"a": configs["a"]})
    attempts = root / "a" / "attempts.jsonl"
    entry = json.loads(attempts.read_text())

    def says(**changes):
        attempts.write_text(json.dumps({**entry, **changes}) + "\n")

    left = {name: configs[name] for name in "bcd"}
    says(seconds=100.0, machine="another")
    states, code, _ = run(matrix, left, at_once=1, seconds=90)
    assert code == TIME_IS_UP
    assert {states[name].state for name in "bcd"} == {State.WAITING}
    why, remedy = states["b"].not_begun
    assert why.endswith("s are left to run, and a took 100 s, on another machine")
    assert not_begun(list(states.values())) == [f"not begun: 3 runs; {why}", f"  -> {remedy}"]
    assert states["b"].to_dict()["not_begun"] == [why, remedy]
    says(seconds=0.5, machine="another")
    run(matrix, {"b": configs["b"]}, at_once=1, seconds=90)
    says(seconds=100.0, machine="another")
    left = {name: configs[name] for name in "cd"}
    states, code, _ = run(matrix, left, at_once=1, seconds=90)
    assert (code, {states[name].state for name in "cd"}) == (0, {State.FINISHED}), "b has finished here"


def test_what_runs_took_on_this_machine_counts_in_later_calls_too(verl, tmp_path):
    """A long kind of run is not begun because a short kind has just ended."""
    verl(steps=2)
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "long", "short", "next")
    run(matrix, {"long": configs["long"]})
    attempts = root / "long" / "attempts.jsonl"
    attempts.write_text(json.dumps({**json.loads(attempts.read_text()), "seconds": 100.0}) + "\n")
    left = {name: configs[name] for name in ("short", "next")}
    states, code, _ = run(matrix, left, at_once=1, seconds=90)
    assert (code, states["short"].state) == (TIME_IS_UP, State.WAITING)
    assert states["short"].not_begun[0].endswith("and long took 100 s")


def test_what_the_time_left_is_said(tmp_path):
    def state(name, kind, steps):
        return side_by_side.RunState(name, tmp_path, kind, steps, 20)

    states = [state("a", State.FINISHED, 20), state("b", State.STOPPED, 7), state("c", State.WAITING, 0)]
    assert time_is_up(states, 25) == ["25 minutes are up: 2 of 3 runs are left, and the same command goes on"]
    early = time_is_up([*states, state("d", State.STOPPED, 0)], 0.5)
    assert early == [
        "0.5 minutes are up: 3 of 4 runs are left, and the same command goes on",
        "  1 of them had not come to a step, and will begin anew: give more --minutes",
    ]


def test_one_that_waits_for_another_try_keeps_its_cause(tmp_path):
    """Its lines are of what it failed with, however many, and none of them a remedy."""
    lost = ("Traceback", "  in step", "ActorDiedError: gone")
    waits = side_by_side.RunState("a", tmp_path, State.WAITING, 3, 20, cause=lost)
    assert not_begun([waits]) == []
    assert not_begun([side_by_side.replace(waits, not_begun=("9 s are left", "more"))]) == [
        "not begun: a; 9 s are left",
        "  -> more",
    ]


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

    monkeypatch.setattr(start, "make_ready", lambda config, **_: None)
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
    assert "9 minutes are up: 1 of 1 runs are left" in shown.stderr
    ended = [
        side_by_side.RunState("a", tmp_path / "a", State.FAILED, 3, 20, 12.0, 7, cause=("ValueError: no",)),
        side_by_side.RunState("b", tmp_path / "b", State.FAILED, 0, 20, cause=("tim.run_dir: is a file",)),
    ]
    monkeypatch.setattr(side_by_side, "run_side_by_side", lambda *_, **given: (asked.update(given), (ended, 7))[1])
    shown = CliRunner().invoke(app, [*words, "--minutes", "9"])
    said = " ".join(shown.stderr.split())
    assert f"a ended with exit code 7 ValueError: no the whole log: {tmp_path / 'a' / 'train.log'}" in said
    assert "b could not be started tim.run_dir: is a file" in said
    assert asked["at_once"] == 1
    alone = CliRunner().invoke(app, ["train", "recipe=cpu_grpo", "--at-once", "2"])
    assert alone.exit_code == 2


def test_a_run_that_cannot_be_started_keeps_none_from_running(verl, tmp_path):
    verl()
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b", "c")
    root.mkdir()
    (root / "b").write_text("a file in the place of its folder")
    states, code, _ = run(matrix, configs, at_once=1)
    assert code == 1
    assert [state.state for state in states.values()] == [State.FINISHED, State.FAILED, State.FINISHED]
    assert "is a file" in states["b"].cause[0]
    assert states["b"].exit_code is None
    (root / "b").unlink()
    left = {name: config for name, config in configs.items() if name not in finished(matrix)}
    states, code, _ = run(matrix, left)
    assert (code, states["b"].state, states["a"].earlier) == (0, State.FINISHED, True)


def test_a_run_that_failed_is_done_again_the_next_time(verl, tmp_path):
    verl()
    matrix, configs = matrix_of(tmp_path / "runs", "bad", "a")
    assert run(matrix, configs)[1] == 7
    left = {name: config for name, config in configs.items() if name not in finished(matrix)}
    assert list(left) == ["bad"]
    states, code, _ = run(matrix, left)
    assert (code, states["bad"].exit_code, states["bad"].steps) == (7, 7, 2)
    assert len((tmp_path / "runs" / "bad" / "attempts.jsonl").read_text().splitlines()) == 1, "its folder is new"


@pytest.fixture
def no_room(monkeypatch):
    """The lists of what has ended cannot be written."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(side_by_side, "record", refuse)
    monkeypatch.setattr(side_by_side.restarts, "record", refuse)


def test_a_full_disk_ends_nothing_but_is_said(verl, tmp_path, no_room):
    verl()
    states, code, _ = run(*matrix_of(tmp_path / "runs", "a", "b"), at_once=1)
    assert [state.steps for state in states.values()] == [2, 2], "both ran to their end"
    assert all("No space left" in state.cause[-1] for state in states.values())
    assert code == 0


def test_while_nothing_has_finished_no_run_is_begun_that_would_have_less_time_than_those_under_way(verl, tmp_path):
    verl(steps=2, pause=30)
    matrix, configs = matrix_of(tmp_path / "runs", "a", "bad", "c")
    (tmp_path / "quick.py").write_text("import sys, time; time.sleep(1.5); sys.exit(7)")
    slow = process.verl_command

    def command(folder):
        return [sys.executable, str(tmp_path / "quick.py")] if folder.name == "bad" else slow(folder)

    process.verl_command = command  # `verl` restores it
    states, code, _ = run(matrix, configs, at_once=2, seconds=2.9)
    assert [state.state for state in states.values()] == [State.STOPPED, State.FAILED, State.WAITING]
    assert code == 7


def test_the_end_has_the_time_that_ending_takes():
    assert process.END_SECONDS >= process._GRACE_SECONDS + 2 * process._FORCE_SECONDS


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("matrix.json", '{"a": ["data.s', "matrix.json"),
        ("matrix.json", "[1]", "matrix.json"),
        ("a/attempts.jsonl", 'no JSON\n{"seconds": 1}\n', "attempts.jsonl"),
        ("a/attempts.jsonl", '{"attempt": 1}\n', "attempts.jsonl"),
    ],
)
def test_a_damaged_record_names_itself(verl, tmp_path, file, content, named):
    verl()
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b")
    run(matrix, {"a": configs["a"]})
    (root / file).write_text(content)
    with pytest.raises(LaunchError, match=named):
        run(matrix, {"b": configs["b"]})


def test_a_record_that_a_full_disk_cut_off_is_read_up_to_there_and_goes_on(tmp_path):
    from verl_tim.diagnosis.run_folder import ATTEMPTS_NAME
    from verl_tim.launch.process import Outcome
    from verl_tim.launch.restarts import record

    (tmp_path / ATTEMPTS_NAME).write_text('{"attempt": 1, "seconds": 2.5}\n{"attempt": 2, "sec')
    assert took(tmp_path).seconds == 2.5
    record(tmp_path, Outcome(0, 4.0, (), tmp_path / "log", ()))
    entries = [json.loads(line) for line in (tmp_path / ATTEMPTS_NAME).read_text().splitlines()]
    assert [entry["attempt"] for entry in entries] == [1, 2]
    assert took(tmp_path).seconds == 6.5


def test_what_has_finished_stays_so_in_another_place(verl, tmp_path):
    verl()
    here, configs = matrix_of(tmp_path / "runs", "a", "b")
    run(here, {"a": configs["a"]})
    there, _ = matrix_of(tmp_path / "elsewhere", "a", "b")
    there.folder.mkdir()
    (here.folder / "matrix.json").rename(there.folder / "matrix.json")
    left = []
    prepared(there, lambda recipe, overrides: left.append(overrides) or configs["b"])
    assert left == [there.cells[1].overrides]


def placed(root):
    return {path.parent.name: path.read_text() for path in root.glob("*/gpus")}


def on_gpus(configs, device="cuda", count=1):
    for config in configs.values():
        config.trainer.device = device
        config.ray_kwargs.ray_init.num_gpus = count
    return configs


def test_each_run_sees_the_gpus_with_the_fewest_runs_alone(verl, tmp_path, monkeypatch):
    verl(steps=2, pause=1.0)
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: ("2", "GPU-5f"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    root = tmp_path / "runs"
    matrix, configs = matrix_of(root, "a", "b", "c", "d", "e")
    states, code, seen = run(matrix, on_gpus(configs), at_once=4)
    assert code == 0
    found = placed(root)  # what each run saw; which one it was given depends on how fast the others were
    assert {name: [gpus] for name, gpus in found.items()} == {name: states[name].to_dict()["gpus"] for name in "abcde"}
    assert set(found.values()) == {"2", "GPU-5f"}
    assert found["a"] == "2"
    for now in seen:
        busy = [state.gpus for state in now if state.state is State.RUNNING]
        assert all(busy.count((gpu,)) <= 2 for gpu in ("2", "GPU-5f"))


def test_a_place_that_is_free_again_is_the_next_ones(verl, tmp_path, monkeypatch):
    """At the same number of runs on each GPU, the one whose run ended first gets the next."""
    verl(steps=1, pause=0.2)
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: ("0", "1"))
    matrix, configs = matrix_of(tmp_path / "runs", "slow", "b", "bad", "d")
    quick = process.verl_command
    process.verl_command = lambda folder: [*quick(folder)[:-1], "6" if folder.name == "slow" else "0.2"]
    _, code, _ = run(matrix, on_gpus(configs), at_once=2)
    assert code == 7
    assert placed(tmp_path / "runs") == {"slow": "0", "b": "1", "bad": "1", "d": "1"}


def test_runs_on_cpus_and_machines_without_gpus_are_left_as_they_are(verl, tmp_path, monkeypatch):
    verl()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: ("0", "1"))
    matrix, configs = matrix_of(tmp_path / "cpu", "a")
    run(matrix, on_gpus(configs, "cpu"))
    assert placed(tmp_path / "cpu") == {"a": "0,1"}
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: ())
    matrix, configs = matrix_of(tmp_path / "none", "a")
    run(matrix, on_gpus(configs))
    assert placed(tmp_path / "none") == {"a": "0,1"}


def test_time_that_is_up_while_models_are_made_ends_that_too(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from verl_tim.cli import app
    from verl_tim.launch import start

    left_behind = []

    def endless(config, **_):
        # however long composing took, the time is up now
        main = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR2)).start()
        try:
            for _ in range(600):
                time.sleep(0.1)
        except Exception:
            pytest.fail("taken for a failure")
        finally:
            left_behind.append("cleared")

    monkeypatch.setattr(start, "make_ready", endless)
    words = ["train", "recipe=cpu_grpo", "+matrix=paper", "tim.only=vexact", f"tim.run_dir={tmp_path}"]
    result = CliRunner().invoke(app, [*words, "--minutes", "5", "--json"])
    assert result.exit_code == TIME_IS_UP, result.output
    assert left_behind == ["cleared"]
    found = json.loads(result.stdout)
    assert [run["state"] for run in found["runs"]] == ["waiting"]
    assert "before the first run" in result.stderr


def test_a_stop_while_models_are_made_is_an_interruption(tmp_path, monkeypatch, heard_interrupts):
    from typer.testing import CliRunner

    from verl_tim.cli import app
    from verl_tim.launch import start

    for number in (signal.SIGINT, signal.SIGTERM):
        monkeypatch.setattr(start, "make_ready", lambda config, **_: os.kill(os.getpid(), number))  # noqa: B023
        words = ["train", "recipe=cpu_grpo", "+matrix=paper", "tim.only=vexact", f"tim.run_dir={tmp_path}"]
        result = CliRunner().invoke(app, [*words, "--at-once", "2", "--json"])
        assert result.exit_code == 130, result.output
        assert json.loads(result.stdout)["exit_code"] == 130


def test_how_a_run_is_kept_going_makes_it_no_other(verl, tmp_path):
    verl()
    matrix, configs = matrix_of(tmp_path / "runs", "a")
    run(matrix, configs)
    (cell,) = matrix.cells
    kept = ("data.seed=9", "tim.restarts.limit=2", *cell.overrides, "trainer.save_freq=50", "tim.run_dir='elsewhere'")
    again = Matrix(matrix.recipe, matrix.folder, (Cell(cell.name, kept),))
    assert prepared(again, lambda *_: pytest.fail("it has finished")) == {}


def test_a_run_that_ended_well_is_not_removed_for_one_of_another_length(verl, tmp_path):
    verl()
    matrix, configs = matrix_of(tmp_path / "runs", "a")
    run(matrix, configs)
    (cell,) = matrix.cells
    more = Matrix(matrix.recipe, matrix.folder, (Cell(cell.name, (*cell.overrides, "trainer.total_training_steps=9")),))
    with pytest.raises(LaunchError, match=r"ended well with other overrides \(trainer.total_training_steps=9 now\)"):
        prepared(more, lambda *_: configs["a"])
    checkpoints = Path(configs["a"].trainer.default_local_dir)
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    assert list(prepared(more, lambda *_: configs["a"])) == ["a"], "it goes on"


def test_one_that_ends_just_before_the_time_is_up_has_finished(verl, tmp_path, monkeypatch):
    verl(steps=2, pause=0.1)
    monkeypatch.setattr(side_by_side, "_POLL_SECONDS", 3.0)  # nobody looks in between
    matrix, configs = matrix_of(tmp_path / "runs", "a")
    states, code, _ = run(matrix, configs, seconds=2.5)
    assert (code, states["a"].state, states["a"].exit_code) == (0, State.FINISHED, 0)
    assert set(finished(matrix)) == {"a"}


def test_half_a_line_of_metrics_ends_nothing(verl, tmp_path):
    """As a full disk leaves it, with the next line behind it."""
    verl()
    script = tmp_path / "verl.py"
    broken = (
        """    file.write('{"step": 1, "da{"step": 1, "data": {}}' + chr(10) + '7' + chr(10))\n    for step in range"""
    )
    script.write_text(script.read_text().replace("    for step in range", broken))
    states, code, _ = run(*matrix_of(tmp_path / "runs", "a"))
    assert (code, states["a"].steps) == (0, 2)


def test_a_folder_is_one_commands_at_a_time(verl, tmp_path):
    verl()
    matrix, configs = matrix_of(tmp_path / "runs", "a", "b")
    with held(matrix.folder):
        for does in (lambda: run(matrix, configs), lambda: run_all(matrix, configs, lambda *_: 0, print)):
            with pytest.raises(LaunchError, match="another command"):
                does()
    assert run(matrix, configs)[1] == 0
    assert run_all(matrix, {}, lambda *_: 0, print) == 0
    (tmp_path / "file").write_text("x")
    with pytest.raises(LaunchError, match="cannot be taken"):
        run(*matrix_of(tmp_path / "file", "a"))
