"""A server's process that dies under Ray: it is started again, and serves from the next weights on."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.rollout.test_server import BOTH, SAMPLED, options_of
from verl_tim.rollout import failover
from verl_tim.rollout.failover import FailoverClient
from verl_tim.rollout.server_actor import ServerActor
from verl_tim.rollout.weights import send

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

PROMPTS = [[5 + n, 6, 7 + n] for n in range(8)]


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def servers(cluster, folder):
    made = ray.remote(ServerActor)
    servers = [
        made.options(max_concurrency=100, max_restarts=1, max_task_retries=-1).remote(
            options_of(folder, load_format="dummy", ignore_eos=True, response_length=100),
            name="vexact", replica_rank=number, shared_memory=BOTH,
        )
        for number in range(2)
    ]  # fmt: skip
    yield servers
    for server in servers:
        ray.kill(server)


@pytest.fixture
def client(servers, monkeypatch):
    monkeypatch.setattr(failover, "_POLL_SECONDS", 0.05)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({f"s{n}": server for n, server in enumerate(servers)})
    rollout = {"name": "vexact", "full_determinism": False}
    return FailoverClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)


async def step_begins(servers, weights, version):
    """What verl's trainer does before it generates."""
    for server in servers:
        await server.wake_up.remote(tags=["weights"])
        await server.begin_weights.remote(version)
        await send(
            iter(weights.items()), bucket_bytes=1 << 20, dtype=torch.bfloat16, deliver=server.receive_weights.remote
        )
        assert await server.finish_weights.remote() == version
        await server.wake_up.remote(tags=["kv_cache"])


async def drawn(client):
    outputs = await asyncio.gather(
        *[
            client.generate(f"r{n}", prompt_ids=prompt, sampling_params={**SAMPLED, "seed": n})
            for n, prompt in enumerate(PROMPTS)
        ]
    )
    return [(output.token_ids, output.log_probs, output.extra_fields["global_steps"]) for output in outputs]


def kill(_server):
    os.kill(os.getpid(), signal.SIGKILL)


def break_engine(server):
    def broken(*args, **kwargs):
        raise RuntimeError("a kernel failed")

    server.engine._engine._runner.execute = broken


@pytest.mark.parametrize("end", [kill, break_engine])
async def test_its_requests_are_answered_and_it_rejoins_with_the_next_weights(servers, client, folder, end):
    weights = load_file(f"{folder}/model.safetensors")
    await step_begins(servers, weights, 1)
    whole = await drawn(client)
    assert {version for *_, version in whole} == {1}
    first = await servers[1].report.remote()
    assert first["counters"]["restarts"] == 0

    under_way = asyncio.ensure_future(drawn(client))
    while (await servers[1].stats.remote())["num_running"] == 0 and not under_way.done():
        await asyncio.sleep(0.001)
    ending = servers[1].__ray_call__.options(max_task_retries=0).remote(end)
    assert await asyncio.wait_for(under_way, 60) == whole, "which replica answers decides no bit"
    await asyncio.wait([asyncio.ensure_future(ending)], timeout=60)
    assert await asyncio.wait_for(drawn(client), 60) == whole

    # what the trainer asks of every server between two steps
    assert await servers[1].is_ready.remote() is False
    report = await servers[1].report.remote()
    assert (report["counters"]["restarts"], report["num_failures"], report["marks"]["max_running"]) == (1, 0, 0)
    for server in servers:
        await server.sleep.remote()
    await step_begins(servers, weights, 2)
    again = await drawn(client)
    assert [answer[:2] for answer in again] == [answer[:2] for answer in whole]
    assert {version for *_, version in again} == {2}
    while client._absent:
        await asyncio.sleep(0.01)
    assert sorted(await client._load_balancer.get_all_servers.remote()) == ["s0", "s1"]
    before = (await servers[1].stats.remote())["drawn_tokens"]
    await client._load_balancer.clear_sticky_cache.remote()
    assert [answer[:2] for answer in await drawn(client)] == [answer[:2] for answer in whole]
    assert (await servers[1].stats.remote())["drawn_tokens"] > before
    assert (await servers[1].report.remote())["counters"]["restarts"] == 0
