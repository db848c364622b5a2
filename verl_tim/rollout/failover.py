"""verl's client of several replicas of ours, for which the end of one is not the end of the run.

Ray starts a replica that died again, without weights (`server_actor`). Its requests go to the others: which replica
answers decides no bit, since a request's seed is of the step and the row. It leaves verl's balancer, and comes back
when it serves again. verl 0.9.1's client (llm_server.py:150) hands the error on, and the response is lost.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError
from verl.workers.rollout.llm_server import LLMServerClient

from verl_tim.rollout.away import ReplicaAwayError
from verl_tim.training.config import ROLLOUTS

logger = logging.getLogger(__name__)

# The replica has died, and Ray starts it again. One that stays dead is an ActorDiedError, which ends the run.
_RETURNS = (ActorUnavailableError, ReplicaAwayError)
_POLL_SECONDS = 1.0

# Server that the request under way was sent to; every request runs in a task, and so in a context, of its own turn.
_asked: ContextVar[tuple[str, Any] | None] = ContextVar("verl_tim_asked", default=None)


class FailoverClient(LLMServerClient):
    """`LLMServerClient` that asks another replica where one has died.

    Raises:
        Of each request what the last replica's end raised, when none is left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._absent: dict[str, asyncio.Future] = {}  # server -> its removal from the balancer
        self._returns: set[asyncio.Task] = set()

    async def generate(self, request_id: str, **request: Any) -> Any:
        lost: Exception | None = None
        met = set[str]()
        while True:
            _asked.set(None)
            try:
                return await super().generate(request_id, **request)
            except _RETURNS as error:
                asked = _asked.get()
                if asked is None or self.config.actor_rollout_ref.rollout.name not in ROLLOUTS:
                    raise  # the balancer's own end, or of a server that nobody starts again
                lost = error
                again = asked[0] in met
                await self._leave_out(*asked, error, again=again)
                if again:  # a router of the user's that goes on naming it
                    await asyncio.sleep(_POLL_SECONDS)
                met.add(asked[0])
            except RuntimeError as error:
                if lost is not None and "No available servers" in str(error):  # verl's balancer, router.py:191
                    raise lost from error
                raise

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        found = await super()._acquire_server(request_id, **extra)
        _asked.set(found)
        return found

    async def _leave_out(self, server_id: str, server: Any, error: Exception, *, again: bool) -> None:
        """Remove a server from the balancer until it is ready.

        Args:
            again: the request met it before, so somebody else has put it back since: another process's client, for
                which it came back and died once more, or a trainer that adds its own.
        """
        known = server_id in self._absent
        if not known:
            logger.warning("rollout server %s died; others answer its requests: %s", server_id, error)
        if again or not known:
            # a task, for all requests that met its end wait for the same
            self._absent[server_id] = asyncio.ensure_future(
                self._load_balancer.remove_servers.remote(server_ids=[server_id])
            )
        if not known:
            self._returns.add(returns := asyncio.create_task(self._bring_back(server_id, server)))
            returns.add_done_callback(self._returns.discard)
        await self._removal(server_id)

    async def _removal(self, server_id: str) -> None:
        # shielded: a request that is cancelled here would cancel it for all others
        await asyncio.shield(self._absent[server_id])

    async def _bring_back(self, server_id: str, server: Any) -> None:
        try:
            await self._removal(server_id)
            await _until_ready(server)
            await self._load_balancer.add_servers.remote(servers={server_id: server})
            logger.warning("rollout server %s answers requests again", server_id)
        except (RayActorError, ActorUnschedulableError) as error:
            logger.warning("rollout server %s does not come back: %s", server_id, error)
        finally:
            del self._absent[server_id]


async def _until_ready(server: Any) -> None:
    while True:
        try:
            return await server.until_ready.remote()
        except ActorUnavailableError:  # died once more
            await asyncio.sleep(_POLL_SECONDS)
