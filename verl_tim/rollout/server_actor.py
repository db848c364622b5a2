"""The Ray actor of a rollout server: how it ends with its engine, and how it begins again."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import ray

from verl_tim.engine import AsyncEngine, EngineDeadError
from verl_tim.rollout import successor
from verl_tim.rollout.away import AwayEngine
from verl_tim.rollout.end import end_process
from verl_tim.rollout.liveness import Liveness
from verl_tim.rollout.options import RolloutOptions, options_key
from verl_tim.rollout.prometheus import MetricsAddress
from verl_tim.rollout.restarts import Restarts
from verl_tim.rollout.server import EngineServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHARACTERS = 2000
"""Of an engine's error, so many are left."""


class ServerActor(EngineServer):
    """`EngineServer` in a process that Ray may start again (`RolloutOptions.max_restarts`).

    Where it may, a server whose engine has failed ends, whatever is asked of it next: no process that had an error of
    its device can use it again. Calls on memory, gate and weights that the old process did not answer are made again on
    the new one. Requests are not: it has no weights, and their client knows other replicas (`failover`).

    One that hangs ends, too, started again or not (`RolloutOptions.hang_timeout`).
    """

    def __init__(
        self,
        options: RolloutOptions,
        *,
        name: str,
        replica_rank: int,
        shared_memory: tuple[str, ...],
        never_again: str = "",
    ) -> None:
        """`never_again`: why `max_restarts` is 0 whatever the config says, for the message that tells of its end."""
        away, metrics = None, None
        again = _was_started_again()
        Restarts.count(options.max_restarts, f"{options_key(name)}.max_restarts", never=never_again, again=again)
        if again:
            away = AwayEngine(f"rollout server {replica_rank}", successor.left(successor.ENGINE_ERROR))
            successor.forget(successor.ENGINE_ERROR)
            if address := successor.left(successor.METRICS):
                metrics = MetricsAddress(**json.loads(address))
        super().__init__(
            options, name=name, replica_rank=replica_rank, shared_memory=shared_memory, away=away, metrics=metrics
        )
        if away is not None:
            logger.warning(
                "rollout server %d died and was started again (pid %d); others answer its requests until the trainer's "
                "next weights",
                replica_rank,
                os.getpid(),
            )
        if options.hang_timeout is not None:
            key = f"{options_key(name)}.hang_timeout"
            who = f"rollout server {replica_rank}"
            Liveness(who, options.hang_timeout, key, lambda: self.engine.turns, self._end_of_a_hang)

    @ray.method(max_task_retries=0)
    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`EngineServer.generate`. Defined here, for Ray reads a method's options from the innermost function."""
        return await self._or_end(super().generate(*args, **kwargs))

    async def serve_metrics(self, address: str, model_name: str | None) -> str:
        """`EngineServer.serve_metrics`, and where: one that is started again serves them there."""
        host = await super().serve_metrics(address, model_name)
        assert self.metrics is not None
        successor.leave(successor.METRICS, json.dumps(dataclasses.asdict(self.metrics)))
        return host

    async def _or_end(self, call: Awaitable[T]) -> T:
        """The answer to a call; where the engine has failed and Ray starts servers again, the end of this process."""
        try:
            return await call
        except EngineDeadError as error:
            if not self.options.max_restarts:
                raise
            cause = error.__cause__ or error
            self._end_with_the_engine(f"{type(cause).__name__}: {cause}", cause)

    def _end_of_a_hang(self, said: str) -> None:
        """Runs in a thread of its own. What hangs can be seen in the tracebacks of all threads."""
        faulthandler.dump_traceback(sys.stderr)
        assert isinstance(self.engine, AsyncEngine), "none other has turns"
        self.engine.end_ranks()  # one that is stopped would not see the end of this process, and would keep its memory
        self._end_with_the_engine(f"EngineHangs: {said}", None)

    def _end_with_the_engine(self, why: str, cause: BaseException | None) -> NoReturn:
        logger.error(
            "rollout server %d (pid %d) ends with its engine: %s", self.replica_rank, os.getpid(), why, exc_info=cause
        )
        words = " ".join(why.split())  # in one line
        try:
            successor.leave(successor.ENGINE_ERROR, words[:_CHARACTERS])
        except Exception:  # the end comes all the same; the error is above
            logger.exception("rollout server %d cannot leave its engine's error", self.replica_rank)
        end_process()


def _ending(method: Any) -> Any:
    @functools.wraps(method)
    async def asked(self: ServerActor, *args: Any, **kwargs: Any) -> Any:
        return await self._or_end(method(self, *args, **kwargs))

    return asked


for _name, _method in inspect.getmembers(EngineServer, inspect.iscoroutinefunction):
    if not _name.startswith("_") and _name not in vars(ServerActor):
        setattr(ServerActor, _name, _ending(_method))


def _was_started_again() -> bool:
    """Runs in an actor."""
    with warnings.catch_warnings():
        # Ray asks itself by a name that it has deprecated (runtime_context.py:468, Ray 2.60)
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
