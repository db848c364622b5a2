"""A server's process that dies under Ray: it is started again, and serves from the next weights on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
import threading
import urllib.request

import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl.plugin.platform import get_platform
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.rollout.test_server import BOTH, SAMPLED, options_of
from verl_tim.models.weights import checkpoint_weights
from verl_tim.rollout import failover
from verl_tim.rollout.away import ReplicaFailedError
from verl_tim.rollout.failover import FailoverClient
from verl_tim.rollout.server_actor import ServerActor
from verl_tim.rollout.shared_buckets import device_identity, pack_shared
from verl_tim.rollout.weights import pack, send
from verl_tim.training.processes import EnginesFailed, ProcessDied, RunProcesses, server_name

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

HANG_TIMEOUT = 20.0  # a new engine's first step on a GPU compiles kernels
PROMPTS = [[5 + n, 6, 7 + n] for n in range(8)]


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def model(device, folder, tmp_path_factory):
    """(folder, the trainer's weights)."""
    if device != "cpu":
        from verl_tim.tasks.random_model import save_random_model

        folder = str(save_random_model("qwen3-0.6b", tmp_path_factory.mktemp("random"), layers=2, device=device))
    return folder, {name: tensor.to(device) for name, tensor in checkpoint_weights(folder)}


@pytest.fixture
def start(cluster, device, model):
    """Starts a server that is started again `max_restarts` times."""
    made, started = ray.remote(ServerActor), []
    own = {
        "engine_kwargs": {"vexact": {"kv_cache_tokens": 2048}},
        "gpu_memory_utilization": 0.1,
        "enforce_eager": False,
    }
    options = options_of(
        model[0], load_format="dummy", device=device, ignore_eos=True, response_length=100,
        **(own if device != "cpu" else {}),
    )  # fmt: skip
    environment = dict.fromkeys(get_platform().ray_noset_envvars(), "1") if device != "cpu" else {}

    def one(number, max_restarts):
        server = made.options(
            max_concurrency=100,
            max_restarts=max_restarts,
            max_task_retries=-1 if max_restarts else 0,
            runtime_env={"env_vars": environment},
        ).remote(
            dataclasses.replace(options, max_restarts=max_restarts, hang_timeout=HANG_TIMEOUT),
            name="vexact", replica_rank=number, shared_memory=BOTH,
        )  # fmt: skip
        started.append(server)
        return server

    yield one
    for server in started:
        ray.kill(server)


@pytest.fixture
def servers(start):
    return [start(number, max_restarts=1) for number in range(2)]


@pytest.fixture
def client(servers, monkeypatch):
    monkeypatch.setattr(failover, "_POLL_SECONDS", 0.05)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({f"s{n}": server for n, server in enumerate(servers)})
    rollout = {"name": "vexact", "full_determinism": False}
    return FailoverClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)


async def step_begins(servers, weights, version, device):
    """What verl's trainer does before it generates."""
    own = torch.device(device)
    for server in servers:
        await server.wake_up.remote(tags=["weights"])
        shares = await server.begin_weights.remote(version, 0, device_identity(own))
        assert shares == (device != "cpu"), "on one GPU weights come out of the trainer's memory"
        await send(
            iter(weights.items()), bucket_bytes=8 << 20, dtype=torch.bfloat16, deliver=server.receive_weights.remote,
            packing=functools.partial(pack_shared, device=own) if shares else pack,
        )  # fmt: skip
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


def scraped_version(host):
    """The weights' version, as a Prometheus reads it of server 1."""
    with urllib.request.urlopen(f"http://{host}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("verl_tim_weight_version{")]
    assert 'model_name="a-model",replica="1"' in line
    return float(line.split()[-1])


def kill(_server):
    os.kill(os.getpid(), signal.SIGKILL)


def break_engine(server):
    def broken(*args, **kwargs):
        raise RuntimeError("a kernel failed")

    server.engine._engine.step = broken


def stop(_server):
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(server):
    server.engine._engine.step = threading.Event().wait


def break_sleep(server):
    def broken(*args, **kwargs):
        raise RuntimeError("a kernel failed before")

    server.engine._engine.release_kv_cache = broken


@pytest.mark.parametrize("end", [kill, break_engine, stop, hang])
async def test_its_requests_are_answered_and_it_rejoins_with_the_next_weights(servers, client, model, device, end):
    _, weights = model
    await step_begins(servers, weights, 1, device)
    whole = await drawn(client)
    assert {version for *_, version in whole} == {1}
    first = await servers[1].report.remote()
    assert first["counters"]["restarts"] == 0
    metrics = await servers[1].serve_metrics.remote("127.0.0.1", "a-model")
    assert await asyncio.to_thread(scraped_version, metrics) == 1

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
    await step_begins(servers, weights, 2, device)
    again = await drawn(client)
    assert [answer[:2] for answer in again] == [answer[:2] for answer in whole]
    assert {version for *_, version in again} == {2}
    assert await asyncio.to_thread(scraped_version, metrics) == 2, "at the same address"
    while client._absent:
        await asyncio.sleep(0.01)
    assert sorted(await client._load_balancer.get_all_servers.remote()) == ["s0", "s1"]
    before = (await servers[1].stats.remote())["drawn_tokens"]
    await client._load_balancer.clear_sticky_cache.remote()
    assert [answer[:2] for answer in await drawn(client)] == [answer[:2] for answer in whole]
    assert (await servers[1].stats.remote())["drawn_tokens"] > before
    assert (await servers[1].report.remote())["counters"]["restarts"] == 0


async def test_an_engine_that_fails_in_a_call_of_the_trainers_is_started_again_too(servers, client, model, device):
    _, weights = model
    await step_begins(servers, weights, 1, device)
    whole = await drawn(client)
    await servers[1].__ray_call__.remote(break_sleep)
    for server in servers:
        await asyncio.wait_for(server.sleep.remote(), 60)
    assert await servers[1].is_ready.remote() is False
    assert (await servers[1].report.remote())["counters"]["restarts"] == 1
    await step_begins(servers, weights, 2, device)
    assert [answer[:2] for answer in await drawn(client)] == [answer[:2] for answer in whole]


async def test_where_every_engine_fails_their_error_is_told_and_none_is_forgotten(servers, client, model, device):
    _, weights = model
    await step_begins(servers, weights, 1, device)
    for server in servers:
        await server.__ray_call__.remote(break_engine)
    run = RunProcesses({server_name(number): server for number, server in enumerate(servers)})

    def a_step():
        with run.named_when_dead():
            asyncio.run_coroutine_threadsafe(drawn(client), loop).result(60)

    loop = asyncio.get_running_loop()
    told = r"no rollout server is left.*server 0 on .*: RuntimeError: a kernel failed; server 1 on .*: RuntimeError: a"
    with pytest.raises(EnginesFailed, match=told):
        await asyncio.to_thread(a_step)
    with pytest.raises(ReplicaFailedError, match="RuntimeError: a kernel failed"):
        await servers[0].generate.remote(PROMPTS[0], dict(SAMPLED), "late")

    # started again once is all that `max_restarts` allows here
    await step_begins(servers, weights, 2, device)
    for server in servers:
        await server.__ray_call__.remote(break_engine)
    with pytest.raises(EnginesFailed, match=told):
        await asyncio.to_thread(a_step)


@pytest.mark.parametrize(
    ("end", "raised", "told"),
    [
        (break_engine, EnginesFailed, r"^engines failed: server 1 on .*: RuntimeError: a kernel failed"),
        (kill, ProcessDied, r"^server 1 on .* died: "),
    ],
)
async def test_one_whose_restarts_are_used_up_is_named_with_their_key_and_with_who_still_answered(
    servers, client, model, device, end, raised, told
):
    _, weights = model
    run = RunProcesses({server_name(number): server for number, server in enumerate(servers)})

    def a_step():
        with run.named_when_dead():
            asyncio.run_coroutine_threadsafe(drawn(client), loop).result(60)

    loop = asyncio.get_running_loop()
    # started again once is all that `max_restarts` allows here
    for version in (1, 2):
        await step_begins(servers, weights, version, device)
        while client._absent:
            await asyncio.sleep(0.01)
        await client._load_balancer.clear_sticky_cache.remote()
        ending = servers[1].__ray_call__.options(max_task_retries=0).remote(end)
        await asyncio.wait([asyncio.ensure_future(ending)], timeout=60)
        if version == 1:
            await asyncio.to_thread(a_step)
    used_up = r"; server 1 had been started again once, as often as .*\.engine_kwargs\.vexact\.max_restarts=1 allows"
    with pytest.raises(raised, match=told + ".*" + used_up + "; server 0 still answered$"):
        await asyncio.to_thread(a_step)


async def test_the_only_server_that_hangs_ends_the_run_and_is_named(start, model, device):
    _, weights = model
    server = start(0, max_restarts=0)
    await step_begins([server], weights, 1, device)
    await server.__ray_call__.remote(hang)
    run = RunProcesses({server_name(0): server})

    def a_step():
        with run.named_when_dead():
            ray.get(server.generate.remote(PROMPTS[0], dict(SAMPLED), "r0"), timeout=60)

    told = r"server 0 on .*: EngineHangs: one step or call of the engine went on for 20 s .*vexact\.hang_timeout"
    with pytest.raises(EnginesFailed, match=told):
        await asyncio.to_thread(a_step)
