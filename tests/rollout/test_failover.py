"""Several replicas, of which one dies: its requests go to the others, and it is asked again when it serves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_tim.engine import RequestError
from verl_tim.rollout import failover
from verl_tim.rollout.away import ReplicaAwayError
from verl_tim.rollout.failover import FailoverClient
from verl_tim.rollout.partial_client import PartialRolloutClient

pytestmark = pytest.mark.asyncio


class Actor:
    """A Ray handle of something in this process."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            async def call():
                answer = getattr(self._target, name)(*args, **kwargs)
                return await answer if asyncio.iscoroutine(answer) else answer

            return asyncio.ensure_future(call())

        return SimpleNamespace(remote=remote)


class Server:
    """Answers with its number; `state` is what a request meets."""

    def __init__(self, number):
        self.number, self.state, self.asked = number, None, []
        self.ready = True

    async def generate(self, request_id, **request):
        self.asked.append(request_id)
        if isinstance(self.state, Exception):
            raise self.state
        return TokenOutput(
            token_ids=[self.number], log_probs=[-1.0], stop_reason="completed", extra_fields={"global_steps": 1}
        )

    async def until_ready(self):
        while self.ready is not True:
            if isinstance(self.ready, Exception):
                raise self.ready
            await asyncio.sleep(0.005)


def unavailable():
    return ActorUnavailableError("it is restarting", b"\x01" * 16)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(failover, "_POLL_SECONDS", 0.01)


@pytest.fixture
def servers():
    return [Server(number) for number in range(3)]


def config(name="vexact"):
    rollout = {"name": name, "response_length": 4, "full_determinism": True}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})


@pytest.fixture
def balancer(servers):
    return GlobalRequestLoadBalancer({f"s{server.number}": Actor(server) for server in servers})


@pytest.fixture(params=[FailoverClient, PartialRolloutClient])
def client(request, balancer):
    return request.param(config(), Actor(balancer))


async def ask(client, number=0):
    return await asyncio.wait_for(client.generate(f"r{number}", prompt_ids=[1], sampling_params={}), 5)


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("died", [unavailable(), ReplicaAwayError("it was started again")], ids=["dies", "is away"])
async def test_others_answer_and_it_comes_back(client, balancer, servers, died, caplog):
    servers[1].state, servers[1].ready = died, False
    outputs = await asyncio.gather(*[ask(client, number) for number in range(30)])
    assert {output.token_ids[0] for output in outputs} == {0, 2}
    assert servers[1].asked
    assert sorted(balancer.get_all_servers()) == ["s0", "s2"]
    assert len([r for r in caplog.records if "others answer its requests" in r.getMessage()]) == 1
    before = len(servers[1].asked)
    await asyncio.gather(*[ask(client, number) for number in range(30)])
    assert len(servers[1].asked) == before, "it has left the balancer"

    servers[1].ready = unavailable()  # it dies once more before it is ready
    await asyncio.sleep(0.05)
    servers[1].state, servers[1].ready = None, True
    await until(lambda: "s1" in balancer.get_all_servers())
    assert balancer.get_status()["total_inflight"] == 0
    outputs = await asyncio.gather(*[ask(client, 100 + number) for number in range(30)])
    assert {output.token_ids[0] for output in outputs} == {0, 1, 2}
    assert not client._absent


async def test_where_none_is_left_it_is_the_last_ones_end(client, servers):
    for server in servers:
        server.state, server.ready = ReplicaAwayError(f"server {server.number} was started again"), False
    with pytest.raises(ReplicaAwayError, match="was started again"):
        await ask(client)
    assert [len(server.asked) for server in servers] == [1, 1, 1]


@pytest.mark.parametrize("error", [ActorDiedError(), RequestError("temprature")], ids=["dead for good", "its own"])
async def test_what_no_other_mends_is_raised_at_once(client, balancer, servers, error):
    for server in servers:
        server.state = error
    with pytest.raises(type(error)):
        await ask(client)
    assert sum(len(server.asked) for server in servers) == 1
    assert len(balancer.get_all_servers()) == 3


async def test_a_router_that_goes_on_naming_it_is_asked_now_and_then(client, balancer, servers, monkeypatch):
    monkeypatch.setattr(balancer, "remove_servers", lambda server_ids: None)
    for server in servers:
        server.state, server.ready = ReplicaAwayError("it was started again"), False
    asked = asyncio.ensure_future(ask(client))
    await asyncio.sleep(0.2)
    assert 1 < sum(len(server.asked) for server in servers) < 40
    servers[0].state = servers[1].state = servers[2].state = None
    assert (await asked).stop_reason == "completed"


async def test_a_request_that_is_cancelled_meanwhile_takes_no_other_with_it(balancer, servers, monkeypatch):
    asked = asyncio.Event()

    async def remove(server_ids):
        asked.set()
        await asyncio.sleep(0.1)
        GlobalRequestLoadBalancer.remove_servers(balancer, server_ids)

    monkeypatch.setattr(balancer, "remove_servers", remove)
    client = FailoverClient(config(), Actor(balancer))
    servers[1].state, servers[1].ready = unavailable(), False
    requests = [asyncio.create_task(ask(client, number)) for number in range(30)]
    await asked.wait()
    await asyncio.sleep(0.05)
    waiting = [request for request in requests if not request.done()]
    assert len(waiting) > 1
    waiting[0].cancel()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError] + [TokenOutput] * (len(waiting) - 1)
    servers[1].state, servers[1].ready = None, True
    await until(lambda: "s1" in balancer.get_all_servers())


async def test_one_that_dies_again_before_all_workers_saw_it_back_is_left_out_again(balancer, servers, monkeypatch):
    first, second = (FailoverClient(config(), Actor(balancer)) for _ in range(2))
    looks, until_ready = asyncio.Event(), failover._until_ready

    async def later(server):
        await until_ready(server)
        if asyncio.current_task() in second._returns:
            await looks.wait()
            await until_ready(server)

    monkeypatch.setattr(failover, "_until_ready", later)

    servers[1].state, servers[1].ready = unavailable(), False
    await asyncio.gather(*[ask(client, f"{client}{number}") for client in (first, second) for number in range(10)])
    assert "s1" in first._absent
    assert "s1" in second._absent
    await asyncio.sleep(0.05)
    servers[1].state, servers[1].ready = None, True
    await until(lambda: "s1" in balancer.get_all_servers())
    servers[1].state, servers[1].ready = unavailable(), False
    looks.set()
    await asyncio.sleep(0.05)
    # the balancer has it, and the second worker's client still takes it for absent
    outputs = await asyncio.gather(*[ask(second, 100 + number) for number in range(10)])
    assert {output.token_ids[0] for output in outputs} == {0, 2}
    assert sorted(balancer.get_all_servers()) == ["s0", "s2"]


async def test_one_that_stays_dead_is_waited_for_no_more(client, balancer, servers, caplog):
    servers[1].state, servers[1].ready = unavailable(), ActorDiedError()
    await asyncio.gather(*[ask(client, number) for number in range(30)])
    await until(lambda: not client._absent)
    assert sorted(balancer.get_all_servers()) == ["s0", "s2"]
    assert "does not come back" in caplog.text


async def test_of_rollouts_that_nobody_starts_again_the_end_is_told(balancer, servers):
    client = PartialRolloutClient(config("vllm"), Actor(balancer))
    for server in servers:
        server.state = unavailable()
    with pytest.raises(ActorUnavailableError):
        await ask(client)
    assert len(balancer.get_all_servers()) == 3


async def test_a_balancer_that_died_is_no_replica_that_died(servers):
    class Dead:
        def require_acquire_fields(self):
            return []

        require_release_fields = require_acquire_fields

        def acquire_server(self, request_id):
            raise unavailable()

    with pytest.raises(ActorUnavailableError):
        await ask(FailoverClient(config(), Actor(Dead())))
