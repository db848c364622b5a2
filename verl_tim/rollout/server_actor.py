"""The Ray actor of a rollout server: how it ends with its engine, and how it begins again."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import ray

from verl_tim.engine import EngineDeadError
from verl_tim.rollout.options import RolloutOptions
from verl_tim.rollout.server import EngineServer

logger = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a server that ends with its engine."""


class ServerActor(EngineServer):
    """`EngineServer` in a process that Ray may start again (`RolloutOptions.max_restarts`).

    Calls on memory, gate and weights that the old process did not answer are made again on the new one. Requests are
    not: it has no weights, and their client knows other replicas (`failover`).
    """

    def __init__(
        self, options: RolloutOptions, *, name: str, replica_rank: int, shared_memory: tuple[str, ...]
    ) -> None:
        again = _was_started_again()
        super().__init__(options, name=name, replica_rank=replica_rank, shared_memory=shared_memory, away=again)
        if again:
            logger.warning(
                "rollout server %d died and was started again (pid %d); others answer its requests until the trainer's "
                "next weights",
                replica_rank,
                os.getpid(),
            )

    @ray.method(max_task_retries=0)
    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`EngineServer.generate`. Where Ray starts servers again, one whose engine has failed ends: no process that
        had an error of its device can use it again."""
        try:
            return await super().generate(*args, **kwargs)
        except EngineDeadError as error:
            if not self.options.max_restarts:
                raise
            cause = error.__cause__ or error
            logger.error(
                "rollout server %d (pid %d) ends with its engine: %s: %s",
                self.replica_rank,
                os.getpid(),
                type(cause).__name__,
                cause,
                exc_info=cause,
            )
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(EXIT_CODE)


def _was_started_again() -> bool:
    """Runs in an actor."""
    with warnings.catch_warnings():
        # Ray asks itself by a name that it has deprecated (runtime_context.py:468, Ray 2.60)
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
