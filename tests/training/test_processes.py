"""Dead processes are named, with their node, whatever error showed it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError

from verl_tim.diagnosis.manifest import Place
from verl_tim.rollout.away import ReplicaAwayError
from verl_tim.training import processes
from verl_tim.training.processes import ProcessDied, RunProcesses

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
        self.state = False  # whether it is away, as it says itself
        place = Place(node=f"{number}" * 8, ip=f"10.0.0.{number}", host=f"host{number}", pid=100 + number)
        self.__ray_call__ = SimpleNamespace(
            remote=lambda function, *args: Reference(self.state if function is processes.is_away else place)
        )


class FakeRay:
    @staticmethod
    def get(references):
        if isinstance(references, list):
            return [FakeRay.get(reference) for reference in references]
        if isinstance(references.value, Exception):
            raise references.value
        return references.value

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
    monkeypatch.setattr(processes, "_MORE_SECONDS", 0.05)
    return {name: Actor(number) for number, name in enumerate(("actor 0", "actor 1", "server 0"))}


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
    assert "the moon" not in str(raised.value)
    assert str(raised.value.__cause__) == "Connection closed by peer"


def test_all_that_went_with_a_node_are_named(actors):
    run = RunProcesses(actors)
    actors["actor 1"].state = actors["server 0"].state = died()
    with pytest.raises(ProcessDied, match=r"actor 1 .*; server 0 "), run.named_when_dead():
        raise died()


@pytest.mark.parametrize(
    "gone", [ActorUnschedulableError("its node is gone"), True], ids=["cannot be started again", "was started again"]
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


def test_an_error_of_the_run_itself_is_not_laid_to_a_server_for_which_others_answered(actors):
    run = RunProcesses(actors)
    actors["server 0"].state = True
    with pytest.raises(RuntimeError, match="rollout and trainer differ"), run.named_when_dead():
        raise RuntimeError("step 3: rollout and trainer differ")
    actors["actor 1"].state = died()
    with pytest.raises(ProcessDied, match=r"actor 1 "), run.named_when_dead():
        raise RuntimeError("Connection closed by peer")


def test_who_is_away_says_so_itself():
    assert processes.is_away(SimpleNamespace(away=True))
    assert not processes.is_away(SimpleNamespace(away=False))
    assert not processes.is_away(object())


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
