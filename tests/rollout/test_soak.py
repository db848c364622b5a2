"""Days of a rollout server in minutes: nothing hangs, nothing is lost, nothing is left over.

A cycle is what a training step makes a server do, with everything that may go wrong on a client's side at once:
requests of all kinds, clients that go away, bad requests, an abort storm, a weight update in the middle, sleep, waking.
After some cycles the process must hold what it held after the first ones.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.rollout.test_server import make, update
from verl_tim.engine import AsyncEngine, RequestError, SamplingParams

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(1800)]

ON_GPU = torch.cuda.is_available()
SETTLED = 3  # cycles after which nothing more is made once and kept


async def one_cycle(server, weights, version: int, requests: int, rng: random.Random) -> int:
    """The tokens that came back."""
    in_the_middle = asyncio.Event()

    async def client(number: int) -> int:
        name = f"{version}/{number}"
        prompt = [rng.randrange(2, 60) for _ in range(rng.randint(1, 12))]
        params = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 1.0, 0.9]),
            "max_tokens": rng.randint(1, 20),
            "logprobs": True,
        }
        kind = rng.random()
        if kind < 0.1:
            with pytest.raises(RequestError, match="temprature"):
                await server.generate(prompt, {**params, "temprature": 1}, name)
            return 0
        task = asyncio.ensure_future(server.generate(prompt, params, name))
        if kind < 0.25:  # gone before its answer
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
            (answer,) = await asyncio.gather(task, return_exceptions=True)
            return 0 if isinstance(answer, asyncio.CancelledError) else len(answer.token_ids)
        if kind < 0.35:
            await asyncio.sleep(rng.random() * 0.02)
            await server.abort_request(name)
        answer = await task
        if number > requests // 4:
            in_the_middle.set()
        assert len(answer.token_ids) == len(answer.log_probs) <= params["max_tokens"]
        if answer.stop_reason == "aborted":  # sent again, as verl's client does
            rest = {**params, "max_tokens": params["max_tokens"] - len(answer.token_ids)}
            again = await server.generate([*prompt, *answer.token_ids], rest, f"{name}/again")
            return len(answer.token_ids) + len(again.token_ids)
        return len(answer.token_ids)

    clients = [asyncio.ensure_future(client(number)) for number in range(requests)]
    await in_the_middle.wait()
    await server.abort_all_requests()
    await update(server, weights, 2 * version)
    await server.resume_generation()
    drawn = sum(await asyncio.gather(*clients))
    await server.sleep()
    await server.wake_up(["weights"])
    await update(server, weights, 2 * version + 1)
    await server.wake_up(["kv_cache"])
    return drawn


def held() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    found = {"threads": threading.active_count(), "files": process.num_fds(), "children": len(process.children())}
    if ON_GPU:
        torch.cuda.synchronize()
        found["device bytes"] = torch.cuda.memory_allocated()
    return found


async def soak(server, weights, cycles: int, requests: int) -> None:
    rng, process = random.Random(0), psutil.Process()
    first, resident, tokens = {}, 0, 0
    for cycle in range(cycles):
        tokens += await asyncio.wait_for(one_cycle(server, weights, cycle + 1, requests, rng), 300)
        report = await server.report()
        assert all("temprature" in failure for failure in report["failures"]), report["failures"]
        stats = await server.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.free_pages == stats.total_pages
        assert len(asyncio.all_tasks()) == 1
        if cycle == SETTLED - 1:
            first, resident = held(), process.memory_info().rss
    assert tokens > cycles * requests
    assert held() == first
    grown = (process.memory_info().rss - resident) / 2**20
    assert grown < 32 + cycles * requests * 1e-3, f"{grown:.0f} MiB more after {cycles} cycles of {requests} requests"


@pytest.mark.parametrize("in_flight", ["abort", "keep", "finish"])
@pytest.mark.parametrize(
    ("cycles", "requests"), [(6, 40), pytest.param(150, 200, marks=pytest.mark.exhaustive)], ids=["short", "long"]
)
async def test_a_server_after_many_steps(folder, in_flight, cycles, requests):
    options = {"in_flight": in_flight, "page_size": 4, "kv_cache_tokens": 96, "enable_prefix_cache": True}
    server = make(folder, max_num_seqs=8, engine_kwargs={"vexact": options})
    try:
        await soak(server, load_file(f"{folder}/model.safetensors"), cycles, requests)
        assert (await server.engine.stats()).preemptions > 0
    finally:
        server.engine.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight", ["abort", "keep", "finish"])
async def test_a_server_on_a_gpu_after_many_steps(folder, in_flight):
    options = {"in_flight": in_flight, "page_size": 16, "kv_cache_tokens": 640, "enable_prefix_cache": True}
    memory = {"gpu_memory_utilization": 0.1, "free_cache_engine": True, "enforce_eager": False}
    server = make(folder, device="cuda:0", max_num_seqs=64, engine_kwargs={"vexact": options}, **memory)
    try:
        await soak(server, load_file(f"{folder}/model.safetensors"), 25, 200)
    finally:
        server.engine.shutdown()


async def test_ten_thousand_requests_wait_without_harm():
    from tests.engine.support import fake_engine

    inner = fake_engine(max_num_seqs=64, kv_cache_tokens=8192)
    engine = AsyncEngine(inner.config, engine=inner)
    try:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        await engine.pause()
        tasks = [asyncio.ensure_future(engine.generate(str(n), [2 + n % 40], params)) for n in range(10_000)]
        await asyncio.sleep(0)
        assert (await engine.stats()).num_waiting == 10_000
        for task in tasks[::3]:  # a storm of clients that go away
            task.cancel()
        await engine.resume()
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
        gone = [answer for answer in answers if isinstance(answer, asyncio.CancelledError)]
        served = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert (len(gone), len(served)) == (3334, 6666)
        assert [answer.request_id for answer in served] == [str(n) for n in range(10_000) if n % 3]
        assert all(len(answer.token_ids) == 3 for answer in served)
        stats = await engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.max_waiting <= 10_000
    finally:
        engine.shutdown()
