"""The child process: progress as it happens, the real cause of a failure, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from verl_tim.launch import process
from verl_tim.launch.process import MetricsReader, Step, exception_names, failure_cause, run_verl, verl_command

WRITES_STEPS = """
import json, sys, time
run_dir = sys.argv[1]
with open(run_dir + "/metrics.jsonl", "w", buffering=1) as file:
    for step in range(3):
        file.write(json.dumps({"step": step, "data": {"critic/score/mean": step / 10}}) + "\\n")
        time.sleep(0.3)
print("verl says goodbye")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Replaces verl by a script; its first argument is the run folder."""

    def use(source, *arguments):
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(source))
        monkeypatch.setattr(
            process, "verl_command", lambda run_dir: [sys.executable, str(script), str(run_dir), *arguments]
        )

    return use


def test_steps_arrive_while_it_runs(child, tmp_path):
    child(WRITES_STEPS, "0")
    seen = []

    def see(step):
        seen.append((step.number, time.monotonic()))

    outcome = run_verl(tmp_path, on_step=see, on_start=lambda stage: None)
    assert [number for number, _ in seen] == [0, 1, 2]
    assert seen[2][1] - seen[0][1] > 0.2
    assert outcome.exit_code == 0
    assert outcome.cause == ()
    assert [step.metrics["critic/score/mean"] for step in outcome.steps] == [0.0, 0.1, 0.2]
    assert outcome.log.read_text() == "verl says goodbye\n"


def test_the_stages_of_the_start_arrive_until_the_first_step(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(process, "_AGAIN_SECONDS", 3600.0)
    child(
        """
        import json, os, sys, time

        def told(number):
            while not os.path.exists(f"{sys.argv[1]}/told{number}"):
                time.sleep(0.01)

        told(1)
        print("config: {'a': 'ray init kwargs'}", flush=True)
        print("ray init kwargs: {}", flush=True)
        told(2)
        print("INFO worker.py:2038 -- Started a local Ray instance.", flush=True)
        told(3)
        with open(sys.argv[1] + "/metrics.jsonl", "w") as file:
            file.write(json.dumps({"step": 0, "data": {}}) + "\\n")
        told(4)
        print("(TaskRunner pid=1) colocated worker base class", flush=True)
        """
    )
    told = []

    def tell(what):
        told.append(what)
        (tmp_path / f"told{len(told)}").touch()

    run_verl(tmp_path, on_step=lambda step: tell(step.number), on_start=tell)
    assert told == ["loading verl", "starting Ray", "Ray is up; the trainer's process loads verl and data", 0]


def test_a_stage_that_takes_long_is_told_again(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(process, "_AGAIN_SECONDS", 0.05)
    child(
        """
        import os, sys, time

        while not os.path.exists(sys.argv[1] + "/told3"):
            time.sleep(0.01)
        """
    )
    told = []

    def tell(what):
        told.append(what)
        (tmp_path / f"told{len(told)}").touch()

    run_verl(tmp_path, on_step=lambda step: None, on_start=tell)
    assert told[:3] == ["loading verl"] * 3


def test_exit_code_is_the_childs(child, tmp_path):
    child(WRITES_STEPS, "7")
    outcome = run_verl(tmp_path, on_step=lambda step: None, on_start=lambda stage: None)
    assert outcome.exit_code == 7
    assert outcome.cause == ("verl says goodbye",)


@pytest.mark.parametrize(("number", "code"), [("SIGKILL", 137), ("SIGTERM", 143)])
def test_a_driver_that_was_killed_is_the_cause(child, tmp_path, number, code):
    child(f"import os, signal\nprint('step 3', flush=True)\nos.kill(os.getpid(), signal.{number})")
    outcome = run_verl(tmp_path, on_step=lambda step: None, on_start=lambda stage: None)
    assert outcome.exit_code == code
    (cause,) = outcome.cause
    assert cause.startswith("verl's driver (pid ")
    assert cause.endswith(f"was ended by {number}")


def test_reader_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new_steps() == []
    line = json.dumps({"step": 1, "data": {"a": 1}})
    path.write_text(line[:5])
    assert reader.new_steps() == []
    path.write_text(line + "\n" + line[:3])
    assert reader.new_steps() == [Step(1, {"a": 1})]
    assert reader.new_steps() == []


RAY_FAILURE = """\
(TaskRunnerV1 pid=11) Training Progress:   0%|          | 0/20 [00:00<?, ?it/s]
Error executing job with overrides: []
Traceback (most recent call last):
  File "/x/verl/trainer/main_ppo.py", line 171, in main
    run_ppo(config, task_runner_class=TaskRunnerV1)
  File "/x/ray/_private/worker.py", line 2858, in get
    values, debugger_breakpoint = worker.get_objects(object_refs, timeout=timeout)
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=11, ip=10.0.0.1, actor_id=ab)
  File "/x/verl/trainer/main_ppo.py", line 133, in run
    self.trainer.init()
  File "/x/verl_tim/engine/config.py", line 9, in check
    raise ValueError(
ValueError: engine_kwargs.vexact.pages: unknown option
  known: page_size, kv_cache_tokens

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""


def test_cause_of_a_ray_failure(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(RAY_FAILURE)
    cause = failure_cause(log)
    assert cause[-2:] == (
        "ValueError: engine_kwargs.vexact.pages: unknown option",
        "  known: page_size, kv_cache_tokens",
    )
    assert cause[-3] == "    raise ValueError("
    assert not any("HYDRA_FULL_ERROR" in line or "\x1b" in line for line in cause)


def test_cause_inside_a_worker_whose_driver_only_died(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(WorkerDict pid=7) Traceback (most recent call last):\n"
        '(WorkerDict pid=7)   File "a.py", line 1, in f\n'
        "(WorkerDict pid=7) torch.OutOfMemoryError: out of memory\n"
        "(raylet) some notice\n"
    )
    assert failure_cause(log) == (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "torch.OutOfMemoryError: out of memory",
    )


def test_what_a_worker_says_later_is_not_the_cause(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "main_ppo.py", line 90, in run_ppo\n'
        "ray.exceptions.RayTaskError(ProcessDied): ray::TaskRunnerV1.run() (pid=11, ip=10.77.0.2)\n"
        "verl_tim.training.processes.ProcessDied: actor 1 on node 10.77.0.2 (b, 1f), pid 7 died: SYSTEM_ERROR\n"
        "\x1b[36m(WorkerDict pid=8, ip=10.77.0.1)\x1b[0m Traceback (most recent call last):\n"
        "\x1b[36m(WorkerDict pid=8, ip=10.77.0.1)\x1b[0m RuntimeError: Connection closed by peer\n"
    )
    assert failure_cause(log)[-1].startswith("verl_tim.training.processes.ProcessDied: actor 1")


@pytest.mark.parametrize(
    "name",
    [
        "verl_tim.training.processes.EnginesFailed",
        "verl_tim.training.baseline_gate.BaselineExceeded",
        "verl_tim.rollout.vllm_death.EngineEnded",
        "omegaconf.errors.MissingMandatoryValue",
        "StopIteration",
    ],
)
def test_an_exception_is_one_whatever_its_name_is(tmp_path, name):
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "startup.py", line 124, in check\n'
        "    raise RolloutError(\n"
        "verl_tim.training.startup.RolloutError: 128 responses failed\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "\n"
        "ray::TaskRunnerV1.run() (pid=15969, ip=192.0.2.2)\n"
        '  File "processes.py", line 217, in named_when_dead\n'
        "    raise the_other from error\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"{name}: engines failed: RuntimeError: a kernel failed\n"
        "Config:\n"
        "  File: none\n"
        "Ended: yes\n"
    )
    cause = failure_cause(log)
    assert f"{name}: engines failed: RuntimeError: a kernel failed" in cause
    assert exception_names(cause)[-1] == name.rpartition(".")[2]


def test_cause_without_a_traceback_is_the_end_of_the_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("\n".join(f"line {index}" for index in range(40)))
    assert failure_cause(log, max_lines=3) == ("line 37", "line 38", "line 39")


SPAWNS_A_TREE = """
import signal, subprocess, sys, time
run_dir = sys.argv[1]
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"]
child = subprocess.Popen(sleeper, start_new_session=True)
open(run_dir + "/pid", "w").write(str(child.pid))
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(600)
"""


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_interrupt_ends_the_whole_tree(child, tmp_path, monkeypatch, manner):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 1.0)
    child(SPAWNS_A_TREE, manner)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def interrupt():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)  # handled like Ctrl-C

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        outcome = run_verl(tmp_path, on_step=lambda step: None, on_start=lambda stage: None)
        assert outcome.exit_code == 130
        grandchild = int((tmp_path / "pid").read_text())
        assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
        assert bystander.poll() is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        bystander.kill()
        bystander.wait()


def test_a_second_ctrl_c_does_not_cut_the_end_short(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 1.5)
    child(SPAWNS_A_TREE, "stubborn")

    def interrupt():
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            time.sleep(0.4)
            os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    assert run_verl(tmp_path, on_step=lambda step: None, on_start=lambda stage: None).exit_code == 130
    assert ended(int((tmp_path / "pid").read_text()))
    assert signal.getsignal(signal.SIGINT) is before


WATCHES = """
import pathlib, sys
from verl_tim.launch import process

process.verl_command = lambda run_dir: [sys.executable, "-c", CHILD, str(run_dir)]
CHILD = '''
import os, sys, time
path = sys.argv[1] + "/pid"
open(path + "_", "w").write(str(os.getpid()))
os.rename(path + "_", path)
time.sleep(600)
'''
process.run_verl(pathlib.Path(sys.argv[1]), on_step=lambda step: None, on_start=lambda stage: None)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_verl_ends_with_the_process_that_started_it(tmp_path, number):
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHES, str(tmp_path)],
        # these tests themselves may run under nohup, and what is ignored is inherited
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    wait_for((tmp_path / "pid").exists)
    watcher.send_signal(number)
    watcher.wait(timeout=120)
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


def test_a_background_job_of_a_shell_is_ended_politely(tmp_path):
    # a shell makes its background jobs ignore SIGINT, which children inherit
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHES, str(tmp_path)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for((tmp_path / "pid").exists)
    started = time.monotonic()
    watcher.terminate()
    watcher.wait(timeout=120)
    assert time.monotonic() - started < process._GRACE_SECONDS / 2


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_verl_command_quotes_the_folder_for_hydra(tmp_path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    folder = tmp_path / "a b=c,{d}'e"
    words = verl_command(folder)
    overrides = OverridesParser.create().parse_overrides([word for word in words if word.startswith("hydra.")])
    assert overrides[0].value() == str(folder)
    assert words[1:3] == ["-m", "verl.trainer.main_ppo"]
