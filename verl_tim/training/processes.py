"""The processes of a run: where each of them is, and, when a step fails, which of them died.

A dead process shows in many ways: Ray's own error, a collective of another rank that lost its peer, a request without
an answer. What helps its owner is the process, its node and its number.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from verl_tim.diagnosis.manifest import Place

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""How long processes that do not answer are waited for, to find those that are dead."""
_MORE_SECONDS = 1.0
_NO_MORE = (RayActorError, ActorUnschedulableError)
"""Ray's errors for an actor that is dead, or cannot be started again because its node is."""
_AWAY = "it was started again, and has no weights yet"
# Words of errors that a server without weights makes: its own, those of a request or call that met its end, and that of
# verl's balancer when all are away. They come as text, too (`RolloutError`, Ray's errors of other processes).
_FROM_AWAY = ("ReplicaAwayError", "ActorUnavailableError", "ActorDiedError", "No available servers in load balancer")


class ProcessDied(RuntimeError):
    """A process of the run ended: killed, out of memory, or with its node. Names it and where it was."""


def trainer_name(rank: int) -> str:
    return f"actor {rank}"


def server_name(number: int) -> str:
    return f"server {number}"


def servers_of(managers: Sequence[Any]) -> list[Any]:
    """Actor handles of all rollout servers of verl's LLMServerManagers."""
    replicas = [replica for manager in managers for replica in manager.get_replicas()]
    return [server for replica in replicas for server in replica.servers]


def place_of_this_process(*_: Any) -> Place:
    """Runs in an actor of the run."""
    return Place(
        node=ray.get_runtime_context().get_node_id(),
        ip=ray.util.get_node_ip_address(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def is_away(actor: Any) -> bool:
    """Runs in an actor of the run: whether it is a rollout server in the place of one that died, without weights."""
    return getattr(actor, "away", False)


def worker_groups_of(trainer: Any) -> dict[str, Any]:
    """Role -> RayWorkerGroup of verl's trainers, V1 and legacy, which give them the same names; a run may do without a
    reference model and a critic."""
    others = {
        role: group
        for role, name in (("ref", "ref_policy_wg"), ("critic", "critic_wg"))
        if (group := getattr(trainer, name, None)) is not None
    }
    return {"actor": trainer.actor_rollout_wg, **others}


@dataclass(frozen=True)
class RunRoles:
    """Who does what in a running trainer, as verl holds them.

    Attributes:
        worker_groups: verl's RayWorkerGroups of the actor, the reference model and the critic, by role.
        server_managers: verl's LLMServerManagers.
        agent_loop_manager, reward_loop_manager: verl's, or a user's own in their place.
    """

    worker_groups: Mapping[str, Any]
    server_managers: Sequence[Any]
    agent_loop_manager: Any
    reward_loop_manager: Any

    @property
    def actor(self) -> Any:
        return self.worker_groups["actor"]

    @property
    def agent_loops(self) -> Sequence[Any]:
        """Ray handles of the workers that run agent loops."""
        return self.agent_loop_manager.agent_loop_workers

    @property
    def rewards(self) -> Sequence[Any]:
        """Ray handles of the workers that compute rewards."""
        return self.reward_loop_manager.reward_loop_workers

    @classmethod
    def of(cls, trainer: Any, server_managers: Sequence[Any], agent_loop_manager: Any) -> RunRoles:
        """Of verl's trainers, V1 and legacy, which give them the same names."""
        return cls(worker_groups_of(trainer), server_managers, agent_loop_manager, trainer.reward_loop_manager)


class RunProcesses:
    """Actors of a run, by name.

    Args:
        actors: handles by the name that a message gives them.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = dict(actors)
        found = ray.get([actor.__ray_call__.remote(place_of_this_process) for actor in self._actors.values()])
        self.places: dict[str, Place] = dict(zip(self._actors, found, strict=True))

    @classmethod
    def of(cls, worker_group: Any, server_managers: Sequence[Any]) -> RunProcesses:
        """Trainer workers and rollout servers, under their names in the manifest."""
        workers = {trainer_name(rank): worker for rank, worker in enumerate(worker_group.workers)}
        servers = {server_name(number): server for number, server in enumerate(servers_of(server_managers))}
        return cls({**workers, **servers})

    def dead(self, seconds: float | None = None) -> dict[str, str]:
        """Name -> what Ray says, of processes that are no more, or whose successors are of no use yet.

        Args:
            seconds: for those that do not answer at once (None: `ANSWER_SECONDS`); one that is alive may be in a
                collective without its peer.
        """
        waiting = {actor.__ray_call__.remote(is_away): name for name, actor in self._actors.items()}
        dead: dict[str, str] = {}
        deadline = time.monotonic() + (ANSWER_SECONDS if seconds is None else seconds)
        while waiting and (left := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            for reference in done:
                name = waiting.pop(reference)
                try:
                    said = _AWAY if ray.get(reference) else None
                except _NO_MORE as error:
                    said = str(error)
                if said is not None:
                    dead[name] = said
                    # a node takes several processes with it
                    deadline = min(deadline, time.monotonic() + _MORE_SECONDS)
        return dead

    @contextmanager
    def named_when_dead(self) -> Iterator[None]:
        """What fails inside because a process died becomes that.

        A server that died, and for which others answered until the next weights, is no cause of an error of the run's
        own, such as the gate's.

        Raises:
            ProcessDied: from the error that showed it; names every process that is dead.
        """
        try:
            yield
        except Exception as error:
            dead = self.dead()
            if set(dead.values()) == {_AWAY} and not _is_of_a_server_away(error):
                raise
            if not dead:
                raise
            who = "; ".join(f"{name} on {self.places[name]}" for name in dead)
            raise ProcessDied(f"{who} died: {_reason(next(iter(dead.values())))}") from error


def _is_of_a_server_away(error: BaseException | None) -> bool:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if any(word in f"{type(error).__name__}: {error}" for word in _FROM_AWAY):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _reason(said: str) -> str:
    """The line of Ray's message that says how a process ended, without its list of guesses."""
    lines = [line.strip() for line in said.strip().splitlines()]
    line = next((line for line in lines if "exit" in line.lower()), lines[-1])
    return line.partition(" Some common causes")[0]
