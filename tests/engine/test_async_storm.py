"""Two event loops send one engine every verb in any order, and go away in the middle: each call ends all the same."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB
from tests.engine.support import fake_engine
from verl_tim.engine import AsyncEngine, EngineStateError, RequestError, SamplingParams

EXPECTED = (asyncio.CancelledError, EngineStateError, RequestError, KeyError)
VERBS = ("finish", "pause", "abort_all", "resume", "resume", "resume", "sleep", "wake", "update", "stats", "clear")


class Storm:
    """One event loop's calls.

    Args:
        name: begins the ids of its requests.
        versions: gives the next version of the weights, to both.
    """

    def __init__(self, engine: AsyncEngine, name: str, seed: int, versions) -> None:
        self.engine, self.name, self.rng, self.versions = engine, name, random.Random(seed), versions
        self.calls: list[asyncio.Future] = []
        self.sent = 0

    def request(self) -> None:
        name = f"{self.name}{max(0, self.sent - (self.rng.random() < 0.1))}"  # sometimes one that is in flight
        self.sent += 1
        prompt = [self.rng.randrange(2, VOCAB) for _ in range(self.rng.randint(1, 10))]
        params = SamplingParams(max_tokens=self.rng.randint(1, 30), ignore_eos=True)
        self.calls.append(asyncio.ensure_future(self.engine.generate(name, prompt, params)))

    async def verb(self) -> None:
        engine, rng, verb = self.engine, self.rng, self.rng.choice(VERBS)
        if verb == "abort_all":
            await engine.abort_all(reject_new=rng.random() < 0.3)
        elif verb == "sleep":
            await engine.sleep(rng.choice([["kv_cache"], ["weights"], ["weights", "kv_cache"]]))
        elif verb == "update":
            name, in_flight = rng.choice(["salt", "salt", "pepper"]), rng.choice(["keep", "abort", "finish"])
            await engine.update_weights([(name, torch.tensor(1))], next(self.versions), in_flight=in_flight)
        elif verb == "clear":
            await engine.clear_kv_cache()
        else:
            await getattr(engine, verb)()

    async def blow(self, count: int) -> None:
        for _ in range(count):
            chance = self.rng.random()
            if chance < 0.5:
                self.request()
            elif chance < 0.58:
                self.rng.choice(self.calls).cancel() if self.calls else None
            elif chance < 0.64 and self.sent:
                await self.engine.abort(f"{self.name}{self.rng.randrange(self.sent)}")
            else:
                call = asyncio.ensure_future(self.verb())
                self.calls.append(call)
                if self.rng.random() < 0.5:
                    await asyncio.wait([call], timeout=10)
                    assert call.done(), "a verb does not end"
            if self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.random() * 0.004)

    async def main(self, both: threading.Barrier) -> None:
        await self.blow(60)
        await asyncio.to_thread(both.wait, 30)
        if self.name == "a":
            await self.engine.update_weights([("salt", torch.tensor(1))], next(self.versions))
            await self.engine.wake()
        await asyncio.to_thread(both.wait, 30)
        while not all(call.done() for call in self.calls):  # a late verb may close the gate again
            await self.engine.resume()
            await asyncio.wait(self.calls, timeout=0.05)
        for call in self.calls:
            if not call.cancelled() and call.exception() is not None:
                assert isinstance(call.exception(), EXPECTED), call.exception()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 150), marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_every_call_ends(ahead, seeds):
    for seed in seeds:
        device = DeferredDevice(early=0.5) if ahead else None
        inner = fake_engine(device=device, kv_cache_tokens=64, max_num_seqs=4, enable_prefix_cache=seed % 2 == 0)
        engine = AsyncEngine(inner.config, engine=inner)
        both, versions, failures = threading.Barrier(2), iter(range(1, 10_000)), []

        def run(storm: Storm, both=both, failures=failures) -> None:
            try:
                asyncio.run(asyncio.wait_for(storm.main(both), 60))
            except BaseException as error:
                failures.append(error)
                both.abort()

        try:
            storms = [Storm(engine, name, 2 * seed + at, versions) for at, name in enumerate("ab")]
            threads = [threading.Thread(target=run, args=(storm,)) for storm in storms]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == [], f"seed {seed}"
            stats = asyncio.run(engine.stats())
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.free_pages == stats.total_pages
        finally:
            engine.shutdown()
