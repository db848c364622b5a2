"""verl's client of a run: with one server the balancer is asked for it once, not for every response; with several of
ours another answers where one has died."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

from verl_tim.rollout.failover import FailoverClient
from verl_tim.training.config import ROLLOUTS


def client_of(manager: Any) -> LLMServerClient:
    """The client of a manager's servers.

    Args:
        manager: verl's LLMServerManager, whose servers stay those that they are.
    """
    if len(manager.get_addresses()) > 1 and manager.rollout_config.name in ROLLOUTS:
        return manager.get_client(client_cls=FailoverClient)
    chooses = len(manager.get_addresses()) > 1 or manager.rollout_config.router_config_path is not None
    return manager.get_client() if chooses else manager.get_client(client_cls=OneServerClient)


class OneServerClient(LLMServerClient):
    """`LLMServerClient` where there is nothing to choose and nothing to count: two calls of another process less for
    each response."""

    _server: tuple[str, Any] | None = None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        if self._server is None:
            self._server = await super()._acquire_server(request_id, **extra)
        return self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass
