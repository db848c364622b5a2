"""The processes of a run: where each of them is, and, when a step fails, which of them died.

A dead process shows in many ways: Ray's own error, a collective of another rank that lost its peer, a request without
an answer. What helps its owner is the process, its node and its number.
"""

from __future__ import annotations

import logging
import math
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
from verl_tim.rollout import successor
from verl_tim.rollout.restarts import Restarts

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""How long processes that do not answer are waited for, to find those that are dead."""
RESTART_SECONDS = 60.0
"""How long servers are waited for that Ray is starting again, to hear what ended them."""
_MORE_SECONDS = 1.0
_SERVER = "server "
_NO_MORE = (RayActorError, ActorUnschedulableError)
"""Ray's errors for an actor that is dead, or cannot be started again because its node is."""
_AWAY = "it was started again, and has no weights yet"
# Words of errors that a server without weights makes: its own, those of a request or call that met its end, and that of
# verl's balancer when all are away. They come as text, too (`RolloutError`, Ray's errors of other processes).
_FROM_AWAY = (
    "ReplicaAwayError",
    "ReplicaFailedError",
    "ActorUnavailableError",
    "ActorDiedError",
    "No available servers in load balancer",
)


class ProcessDied(RuntimeError):
    """A process of the run ended: killed, out of memory, or with its node. Names it and where it was."""


class EnginesFailed(RuntimeError):
    """Engines of rollout servers failed, and none is left that would answer, or one has no restarts left. Names each
    with its error, which the run would meet again: it is no failure of the infrastructure."""


@dataclass(frozen=True)
class _End:
    """How a process ended.

    Attributes:
        said: by Ray, or by its successor.
        engine_error: of the engine for whose failure it ended; empty where it was killed or lost.
        away: its successor is of no use yet.
        restarts: of a server, how often Ray has started it again.
    """

    said: str
    engine_error: str = ""
    away: bool = False
    restarts: Restarts | None = None


def trainer_name(rank: int) -> str:
    return f"actor {rank}"


def server_name(number: int) -> str:
    return f"{_SERVER}{number}"


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


def why_away(actor: Any) -> str | None:
    """Runs in an actor of the run: of a rollout server in the place of one that died, without weights, its
    predecessor's engine error (empty: it was killed or lost); None of every other."""
    away = getattr(actor, "away", None)
    return None if away is None else away.engine_error


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

    def _ended(self, *, servers_too: bool) -> tuple[dict[str, _End], list[str]]:
        """By name, processes that are no more, or whose successors are of no use yet; and the servers that answer.

        Args:
            servers_too: wait for servers that Ray may be starting again; of other processes one that is alive may never
                answer, being in a collective without its peer.
        """
        waiting = {actor.__ray_call__.remote(why_away): name for name, actor in self._actors.items()}
        ended: dict[str, _End] = {}
        answer: list[str] = []
        began, end_by = time.monotonic(), math.inf
        while waiting:
            starting = servers_too and any(name.startswith(_SERVER) for name in waiting.values())
            # on a busy node the servers that fail together are not lost together
            until = began + RESTART_SECONDS if starting else min(began + ANSWER_SECONDS, end_by)
            left = until - time.monotonic()
            if left <= 0:
                break
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            for reference in done:
                name = waiting.pop(reference)
                try:
                    engine_error = ray.get(reference)
                    end = None if engine_error is None else _End(_AWAY, engine_error, away=True)
                except _NO_MORE as error:
                    server = self._actors[name]
                    end = _End(str(error), successor.left(successor.ENGINE_ERROR, server), restarts=Restarts.of(server))
                if end is None:
                    answer += [name] if name.startswith(_SERVER) else []
                else:
                    ended[name] = end
                    if not end.away:  # a node takes several processes with it
                        end_by = min(end_by, time.monotonic() + _MORE_SECONDS)
        return {name: ended[name] for name in self._actors if name in ended}, [
            name for name in self._actors if name in answer
        ]

    @contextmanager
    def named_when_dead(self) -> Iterator[None]:
        """What fails inside because a process died becomes that.

        A server that died, and for which others answered until the next weights, is no cause of an error of the run's
        own, such as the gate's.

        Raises:
            EnginesFailed: from the error that showed it; those that ended did so for their engines' errors.
            ProcessDied: likewise; names every process that is dead.
        """
        try:
            yield
        except Exception as error:
            of_away = _is_of_a_server_away(error)
            ended, answer = self._ended(servers_too=of_away)
            if not ended or (not of_away and all(end.away for end in ended.values())):
                raise
            if all(end.engine_error for end in ended.values()):
                said = "; ".join(f"{name} on {self.places[name]}: {end.engine_error}" for name, end in ended.items())
                what = "engines failed" if answer else "no rollout server is left that would answer; engines failed"
                raise EnginesFailed(f"{what}: {said}{_restarts(ended, answer)}") from error
            who = "; ".join(f"{name} on {self.places[name]}{_with_engine(end)}" for name, end in ended.items())
            reason = _reason(next(iter(ended.values())).said)
            raise ProcessDied(f"{who} died: {reason}{_restarts(ended, answer)}") from error


def _with_engine(end: _End) -> str:
    return f" (its engine failed: {end.engine_error})" if end.engine_error else ""


def _restarts(ended: Mapping[str, _End], answer: Sequence[str]) -> str:
    """Why servers that died do not come back, and which still answered; empty where no server ended."""
    if not any(name.startswith(_SERVER) for name in ended):
        return ""
    # one that is alone is not started again, whatever the config says
    known = [(name, end.restarts) for name, end in ended.items() if end.restarts and (end.restarts.limit or answer)]
    told = [f"{name} {restarts}" for name, restarts in known]
    told += [f"{', '.join(answer)} still answered"] if answer else []
    return "".join(f"; {one}" for one in told)


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
