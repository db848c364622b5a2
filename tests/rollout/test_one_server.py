"""Where there is one server the balancer is asked once; where there are more, or a router of the user's, every time."""

from types import SimpleNamespace

import pytest
from verl.workers.rollout.llm_server import LLMServerClient

from verl_tim.rollout.failover import FailoverClient
from verl_tim.rollout.one_server import OneServerClient, client_of


class Remote:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    async def _answer(self):
        return self.answer

    def remote(self, **given):
        self.calls.append(given)
        return self._answer()


def balancer():
    return SimpleNamespace(
        require_acquire_fields=Remote([]),
        require_release_fields=Remote([]),
        acquire_server=Remote(("here", "handle")),
        release_server=Remote(None),
    )


def manager(addresses, router=None, name="vexact"):
    rollout = SimpleNamespace(router_config_path=router, name=name)
    made = SimpleNamespace(rollout_config=rollout, get_addresses=lambda: addresses)
    made.get_client = lambda client_cls=LLMServerClient: client_cls(config=None, load_balancer_handle=balancer())
    return made


@pytest.mark.asyncio
async def test_one_server_is_asked_for_once():
    client = client_of(manager(["here"]))
    assert type(client) is OneServerClient
    for request in "abc":
        assert await client._acquire_server(request, prompt_ids=[1]) == ("here", "handle")
        client._release_server("here", request_id=request)
    assert len(client._load_balancer.acquire_server.calls) == 1
    assert client._load_balancer.release_server.calls == []


def test_of_several_of_ours_another_answers_for_one_that_died():
    for router in (None, "mine.yaml"):
        assert type(client_of(manager(["here", "there"], router=router))) is FailoverClient


def test_where_there_is_a_choice_it_is_verls():
    assert type(client_of(manager(["here", "there"], name="vllm"))) is LLMServerClient
    assert type(client_of(manager(["here"], router="mine.yaml"))) is LLMServerClient
