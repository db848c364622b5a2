"""When a run starts again by itself, from where, and what is left of the attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_tim.launch import restarts
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.process import Outcome, Step
from verl_tim.launch.restarts import is_infrastructure, joined, resuming, run_with_restarts
from verl_tim.launch.run_folder import State

DIED = ("verl_tim.training.processes.ProcessDied: actor 1 on node 10.0.0.2 (b, 1f), pid 7 died: SYSTEM_ERROR",)
ACTOR_DIED = (
    "Traceback (most recent call last):",
    '  File "main_ppo.py", line 90, in run_ppo',
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: TaskRunnerV1",
    "\tpid: 22688",
)
NEVER_STARTED = (
    "ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, ray::Server()",
    "ValueError: kv_cache_tokens=16 holds no request",
)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def config(tmp_path):
    return OmegaConf.create(
        {
            "tim": {"run_dir": str(tmp_path), "restarts": {"limit": 2, "wait": 0}},
            "trainer": {
                "resume_mode": "disable",
                "resume_from_path": None,
                "val_before_train": True,
                "default_local_dir": str(tmp_path / "checkpoints"),
            },
        }
    )


def outcome(code=1, cause=DIED, first=1, last=3, seconds=10.0):
    steps = tuple(Step(number, {"seen": seconds}) for number in range(first, last + 1))
    return Outcome(code, seconds, steps, Path("train.log"), tuple(cause))


def checkpoint(config, step):
    folder = Path(config.trainer.default_local_dir)
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize(
    ("code", "cause", "again"),
    [
        (1, DIED, True),
        (1, ACTOR_DIED, True),
        (137, ("verl's driver (pid 5) was ended by SIGKILL",), True),
        (139, ("verl's driver (pid 5) was ended by SIGSEGV",), True),
        (143, ("verl's driver (pid 5) was ended by SIGTERM",), False),
        (130, (), False),
        (0, (), False),
        (1, NEVER_STARTED, False),
        (1, ("verl_tim.diagnosis.gate.MismatchError: step 3: rollout and trainer differ",), False),
        (1, ("verl_tim.training.config.ConfigError: this run cannot work as configured:",), False),
        (1, ("verl_tim.training.startup.RolloutError: 4 requests to the rollout failed",), False),
        # the last exception is the verdict: this one only began with a dead process
        (1, (*ACTOR_DIED, "ValueError: the reward function cannot be pickled"), False),
        (1, ("verl says goodbye",), False),
        (1, (), False),
    ],
)
def test_only_what_died_is_started_again(code, cause, again):
    assert is_infrastructure(outcome(code, cause)) is again


def test_the_next_attempt_goes_on_from_the_checkpoint_and_says_so(config, tmp_path):
    ended = [outcome(last=5), outcome(code=0, cause=(), first=5, last=8, seconds=20.0)]
    given, said = [], []

    def run_once(config):
        given.append((config.trainer.resume_mode, config.trainer.val_before_train))
        checkpoint(config, 4)
        return ended[len(given) - 1]

    last = run_with_restarts(config, run_once, said.append)
    assert given == [("disable", True), ("auto", False)]
    assert (last.exit_code, last.attempts, last.seconds) == (0, 2, 30.0)
    assert [(step.number, step.metrics["seen"]) for step in last.steps] == [
        *((number, 10.0) for number in range(1, 5)),
        *((number, 20.0) for number in range(5, 9)),
    ]
    assert any("attempt 1 died after step 5" in line and "actor 1 on node 10.0.0.2" in line for line in said)
    assert any("checkpoint of step 4" in line and "restart 1 of 2" in line for line in said)
    entries = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [(e["attempt"], e["exit_code"], e["first_step"], e["last_step"]) for e in entries] == [
        (1, 1, 1, 5),
        (2, 0, 5, 8),
    ]
    assert entries[0]["cause"] == list(DIED)


def test_a_list_that_cannot_be_written_hides_no_cause(config, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_tim.launch.restarts.write_whole", refuse)
    said = []
    last = run_with_restarts(config, lambda _: outcome(3, ("OSError: no room",), last=5), said.append)
    assert (last.exit_code, last.cause) == (3, ("OSError: no room",))
    assert any("No space left on device: how this attempt ended is not written down" in line for line in said)


def test_what_cannot_be_removed_is_named(config, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder / "train.log"))

    monkeypatch.setattr(restarts, "state_of", lambda *_, **__: (State.UNFINISHED, ""))
    monkeypatch.setattr(restarts.shutil, "rmtree", refuse)
    with pytest.raises(LaunchError, match=r"cannot be removed: .*Permission denied") as caught:
        restarts.again(config)
    assert caught.value.findings[0].key == "tim.run_dir"


def test_the_limit_holds(config):
    said = []
    last = run_with_restarts(config, lambda config: outcome(), said.append)
    assert (last.exit_code, last.attempts) == (1, 3)
    assert "used up" in said[-1]


def test_what_the_run_decided_is_not_tried_again(config):
    said, calls = [], []
    refused = outcome(cause=("verl_tim.diagnosis.gate.MismatchError: step 3",))
    last = run_with_restarts(config, lambda config: calls.append(1) or refused, said.append)
    assert (last.exit_code, last.attempts, len(calls)) == (1, 1, 1)
    assert "no failure of the infrastructure" in said[-1]


def test_without_restarts_nothing_is_said_or_tried(config):
    config.tim.restarts.limit = 0
    said = []
    assert run_with_restarts(config, lambda config: outcome(), said.append).attempts == 1
    assert said == []


def test_before_the_first_checkpoint_it_begins_again(config):
    again = resuming(config)
    assert (again.trainer.resume_mode, again.trainer.val_before_train) == ("auto", True)
    assert config.trainer.resume_mode == "disable"


def test_a_run_that_began_from_a_checkpoint_elsewhere_begins_there_again_until_it_has_its_own(config):
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", "/other/global_step_7"
    assert resuming(config).trainer.resume_mode == "resume_path"
    assert restarts.checkpoint_in_words(resuming(config)) == "/other/global_step_7"
    checkpoint(config, 9)
    assert resuming(config).trainer.resume_mode == "auto"


def test_an_attempt_without_steps_takes_none_away():
    before = outcome(last=2).steps
    assert joined(before, ()) == before
