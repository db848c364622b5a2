"""Dead processes are named, with their node, whatever error showed it."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError

from verl_tim.diagnosis.manifest import Place
from verl_tim.launch.process import Outcome
from verl_tim.launch.restarts import is_infrastructure
from verl_tim.rollout.away import AwayEngine, ReplicaAwayError
from verl_tim.rollout.successor import ENGINE_ERROR, RESTARTS
from verl_tim.training import processes
from verl_tim.training.processes import EnginesFailed, ProcessDied, RunProcesses

SAYS = """The actor died unexpectedly before finishing this task.
\tpid: 7
The actor is dead because its worker process has died.
Worker exit type: SYSTEM_ERROR Some common causes include: the moon"""


class Reference:
    """An object reference; `value` is what it gives, an exception raises, None never comes."""

    def __init__(self, value):
        self.value = value


class Actor:
    """What `RunProcesses` uses of an actor handle."""

    def __init__(self, number):
        self.state = False  # what `why_away` says, False: that it is not
        place = Place(node=f"{number}" * 8, ip=f"10.0.0.{number}", host=f"host{number}", pid=100 + number)
        self.__ray_call__ = SimpleNamespace(
            remote=lambda function, *args: Reference(self.state if function is processes.why_away else place)
        )
        self.left = {ENGINE_ERROR: "", RESTARTS: ""}


class FakeRay:
    @staticmethod
    def get(references):
        if isinstance(references, list):
            return [FakeRay.get(reference) for reference in references]
        if isinstance(references.value, Exception):
            raise references.value
        return None if references.value is False else references.value

    @staticmethod
    def wait(references, *, num_returns, timeout):
        done = [reference for reference in references if reference.value is not None][:num_returns]
        if not done:
            processes.time.sleep(timeout)
        return done, [reference for reference in references if reference not in done]


@pytest.fixture
def actors(monkeypatch):
    monkeypatch.setattr(processes, "ray", FakeRay)
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(processes, "RESTART_SECONDS", 1.0)
    monkeypatch.setattr(processes, "_MORE_SECONDS", 0.05)
    monkeypatch.setattr(processes.successor, "left", lambda what, actor: actor.left[what])
    return {name: Actor(number) for number, name in enumerate(("actor 0", "actor 1", "server 0"))}


def outcome_of(error):
    """Of a run that ended with it, as `launch.process` reads it from a log."""
    lines = traceback.format_exception_only(error)[-1].splitlines()
    return Outcome(1, 1.0, (), Path("train.log"), tuple(lines))


def died():
    error = ActorDiedError()
    error.error_msg = SAYS
    return error


def test_every_process_says_where_it_is(actors):
    places = RunProcesses(actors).places
    assert places["actor 1"].ip == "10.0.0.1"
    assert str(places["server 0"]) == "node 10.0.0.2 (host2, 22222222), pid 102"


def test_what_failed_because_a_process_died_says_which(actors):
    run = RunProcesses(actors)
    actors["actor 1"].state = died()
    actors["actor 0"].state = None  # in a collective
    with pytest.raises(ProcessDied, match=r"actor 1 on node 10\.0\.0\.1 .*pid 101 died: .*SYSTEM_ERROR") as raised:  # noqa: SIM117
        with run.named_when_dead():
            raise RuntimeError("Connection closed by peer")
    assert "actor 0" not in str(raised.value)
    assert "server 0" not in str(raised.value), "nobody asked for it"
    assert "the moon" not in str(raised.value)
    assert str(raised.value.__cause__) == "Connection closed by peer"


def test_all_that_went_with_a_node_are_named(actors):
    run = RunProcesses(actors)
    actors["actor 1"].state = actors["server 0"].state = died()
    with pytest.raises(ProcessDied, match=r"actor 1 .*; server 0 "), run.named_when_dead():
        raise died()


@pytest.mark.parametrize(
    "gone", [ActorUnschedulableError("its node is gone"), ""], ids=["cannot be started again", "was started again"]
)
def test_a_server_that_may_be_started_again_is_named_until_it_serves(actors, gone):
    run = RunProcesses(actors)
    actors["server 0"].state = gone
    named = r"server 0 on node 10\.0\.0\.2 .*pid 102 died: .*(its node is gone|has no weights yet)"
    for cause in ("ReplicaAwayError: rollout server 0 died", "RuntimeError: No available servers in load balancer"):
        with pytest.raises(ProcessDied, match=named), run.named_when_dead():
            raise RuntimeError(f"1 responses failed in the agent loop; the first: {cause}")
    with pytest.raises(ProcessDied, match=named), run.named_when_dead():
        raise RuntimeError("the update failed") from ReplicaAwayError("rollout server 0 died and was started again")


@pytest.mark.parametrize("why", ["", "AcceleratorError: an illegal memory access"], ids=["killed", "engine failed"])
def test_an_error_of_the_run_itself_is_not_laid_to_a_server_for_which_others_answered(actors, why):
    run = RunProcesses(actors)
    actors["server 0"].state = why
    with pytest.raises(RuntimeError, match="rollout and trainer differ"), run.named_when_dead():
        raise RuntimeError("step 3: rollout and trainer differ")
    actors["actor 1"].state = died()
    with pytest.raises(ProcessDied, match=r"actor 1 "), run.named_when_dead():
        raise RuntimeError("Connection closed by peer")


ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"
FROM_AWAY = RuntimeError("1 responses failed; the first: ReplicaFailedError: rollout server 0 ended with its engine")


@pytest.fixture
def two_servers(actors):
    actors["server 1"] = Actor(3)
    return actors


def ended_for_its_engine(actor, *, for_good=False):
    actor.state = died() if for_good else ILLEGAL
    actor.left[ENGINE_ERROR] = ILLEGAL if for_good else ""


@pytest.mark.parametrize("for_good", [False, True], ids=["was started again", "all restarts are used up"])
def test_where_the_engines_failed_it_is_their_error_and_no_process_that_died(two_servers, for_good):
    run = RunProcesses(two_servers)
    ended_for_its_engine(two_servers["server 0"])
    ended_for_its_engine(two_servers["server 1"], for_good=for_good)
    named = rf"server 0 on node .*pid 102: {ILLEGAL}; server 1 on node .*pid 103: {ILLEGAL}"
    with pytest.raises(EnginesFailed, match=named) as raised, run.named_when_dead():
        raise FROM_AWAY
    assert raised.value.__cause__ is FROM_AWAY
    assert not is_infrastructure(outcome_of(raised.value)), "the run would meet it again"


KEY = "actor_rollout_ref.rollout.engine_kwargs.vexact.max_restarts"


@pytest.mark.parametrize(
    ("done", "limit", "told"),
    [
        (3, 3, f"server 1 had been started again 3 times, as often as {KEY}=3 allows"),
        (1, 1, f"server 1 had been started again once, as often as {KEY}=1 allows"),
        (0, 0, f"server 1 is not started again ({KEY}=0)"),
        (1, 3, f"server 1 could not be started again, and had been 1 of the 3 times of {KEY}"),
        (0, 3, f"server 1 could not be started again; it had not been before ({KEY}=3)"),
    ],
)
def test_one_server_that_does_not_come_back_is_said_to_while_another_answers(two_servers, done, limit, told):
    run = RunProcesses(two_servers)
    ended_for_its_engine(two_servers["server 1"], for_good=True)
    two_servers["server 1"].left[RESTARTS] = json.dumps({"done": done, "limit": limit, "key": KEY})
    with pytest.raises(EnginesFailed) as raised, run.named_when_dead():
        raise died()
    said = str(raised.value)
    assert "no rollout server is left" not in said
    assert said.startswith("engines failed: server 1 on node ")
    assert said.endswith(f"pid 103: {ILLEGAL}; {told}; server 0 still answered")
    assert not is_infrastructure(outcome_of(raised.value))

    two_servers["server 1"].left[ENGINE_ERROR] = ""
    with pytest.raises(ProcessDied, match=r"server 1 on node .* died: .*; server 0 still answered$") as raised:  # noqa: SIM117
        with run.named_when_dead():
            raise died()
    assert told in str(raised.value)


def test_one_that_is_never_started_again_is_not_laid_to_the_config(two_servers):
    run = RunProcesses(two_servers)
    ended_for_its_engine(two_servers["server 1"], for_good=True)
    left = {"done": 0, "limit": 0, "key": KEY, "never": "a teacher is sent no weights again"}
    two_servers["server 1"].left[RESTARTS] = json.dumps(left)
    with pytest.raises(EnginesFailed) as raised, run.named_when_dead():
        raise died()
    assert "; server 1 is not started again (a teacher is sent no weights again); server 0" in str(raised.value)


def test_servers_that_answered_are_in_their_own_order(two_servers):
    two_servers |= {"server 2": Actor(4), "server 10": Actor(5)}
    run = RunProcesses(two_servers)
    ended_for_its_engine(two_servers["server 0"], for_good=True)
    with pytest.raises(EnginesFailed, match=r"; server 1, server 2, server 10 still answered$"), run.named_when_dead():
        raise died()


def test_of_one_that_is_alone_no_restarts_are_told(actors):
    run = RunProcesses(actors)
    ended_for_its_engine(actors["server 0"], for_good=True)
    # as the replica makes it, whatever the config says
    actors["server 0"].left[RESTARTS] = json.dumps({"done": 0, "limit": 0, "key": KEY})
    with pytest.raises(EnginesFailed, match=r"^no rollout server is left.*illegal memory access was encountered$"):  # noqa: SIM117
        with run.named_when_dead():
            raise died()


def test_beside_one_that_was_killed_it_is_told_too(two_servers):
    run = RunProcesses(two_servers)
    ended_for_its_engine(two_servers["server 0"])
    two_servers["server 1"].state = ""
    named = rf"server 0 on node .*\(its engine failed: {ILLEGAL}\); server 1 on node .* died"
    with pytest.raises(ProcessDied, match=named) as raised, run.named_when_dead():
        raise FROM_AWAY
    assert is_infrastructure(outcome_of(raised.value))


@pytest.mark.parametrize("for_good", [False, True], ids=["was started again", "all restarts are used up"])
def test_servers_that_ray_is_starting_again_are_waited_for_and_trainers_are_not(two_servers, monkeypatch, for_good):
    run = RunProcesses(two_servers)
    two_servers["actor 0"].state = None  # in a collective
    ended_for_its_engine(two_servers["server 0"], for_good=for_good)
    two_servers["server 1"].state = None
    clock = [0.0]

    def waits(references, *, num_returns, timeout):
        done, rest = FakeRay.wait(references, num_returns=num_returns, timeout=0)
        if not done:
            clock[0] += min(timeout, 0.7)
            if clock[0] >= 0.7:
                references[-1].value = ILLEGAL  # the second server stands
        return done, rest

    monkeypatch.setattr(processes, "ray", SimpleNamespace(get=FakeRay.get, wait=waits))
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    with pytest.raises(EnginesFailed, match=r"server 0 .*server 1 "), run.named_when_dead():
        raise FROM_AWAY
    assert clock[0] == 0.7


def test_who_is_away_says_why():
    away = AwayEngine("rollout server 0", ILLEGAL)
    assert processes.why_away(SimpleNamespace(away=away)) == ILLEGAL
    assert processes.why_away(SimpleNamespace(away=AwayEngine("rollout server 0"))) == ""
    assert processes.why_away(SimpleNamespace(away=None)) is None
    assert processes.why_away(object()) is None


@pytest.mark.parametrize("state", [False, None], ids=["answers", "hangs"])
def test_an_error_of_the_run_itself_stays_what_it_is(actors, state):
    run = RunProcesses(actors)
    actors["actor 0"].state = state
    with pytest.raises(ValueError, match="rewards must be finite"), run.named_when_dead():
        raise ValueError("rewards must be finite")


def test_a_step_without_an_error_asks_nobody(actors):
    run = RunProcesses(actors)
    actors["actor 0"].state = died()
    with run.named_when_dead():
        pass
