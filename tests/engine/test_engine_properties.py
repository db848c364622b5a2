"""Any order of add, step, abort, preemption, weight update and sleep keeps the engine's promises.

The promises, checked after every verb or at each request's end: the accounting is exact, no page is leaked or owned
twice, no request overtakes an older one, every request ends exactly once, and every token is what the tokens before it
and the weights of its version demand, whatever happened in between.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB
from tests.engine.support import check_output, fake_engine
from verl_tim.engine import SamplingParams


class EngineMachine(RuleBasedStateMachine):
    ahead = False  # whether the engine launches a step while the one before runs

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        pool_tokens=st.sampled_from([32, 48, 96]),
        budget=st.sampled_from([1, 5, 16, 64, 64]),
        chunk=st.sampled_from([None, None, 3]),
        seqs=st.sampled_from([1, 4, 16, 16]),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        caching=st.booleans(),
        early=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def start(self, page_size, pool_tokens, budget, chunk, seqs, watermark, caching, early):
        self.engine = fake_engine(
            device=DeferredDevice(early=early) if self.ahead else None,
            page_size=page_size,
            kv_cache_tokens=pool_tokens,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk,
            max_num_seqs=seqs,
            watermark=watermark,
            enable_prefix_cache=caching,
        )
        self.pool_tokens = pool_tokens // page_size * page_size
        self.pending: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: set[str] = set()
        self.version = 0

    def collect(self, outputs, *, reason=None):
        for output in outputs:
            assert output.request_id not in self.ended, "ended twice"
            prompt, params = self.pending.pop(output.request_id)
            self.ended.add(output.request_id)
            assert reason is None or output.finish_reason == reason
            check_output(output, prompt, params)

    @rule(
        family=st.integers(0, 1),
        length=st.sampled_from([1, 2, 5, 8, 12, 16, 20, 24]),
        tails=st.lists(st.lists(st.integers(2, VOCAB - 1), max_size=2), min_size=1, max_size=5),
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
    )
    def add(self, family, length, tails, max_tokens, temperature):
        # Prompts of one family share their beginning, so that prefixes are found again.
        start = [(family * 17 + i * 5) % (VOCAB - 2) + 2 for i in range(length)]
        for tail in tails:
            prompt = start + tail
            room = self.pool_tokens + 1 - len(prompt)
            params = SamplingParams(
                temperature=temperature, max_tokens=min(max_tokens, room), ignore_eos=length % 2 == 0
            )
            request_id = f"r{len(self.pending) + len(self.ended)}"
            self.engine.add(request_id, prompt, params)
            self.pending[request_id] = (prompt, params)

    @rule(steps=st.integers(1, 25))
    def step(self, steps):
        for _ in range(steps):
            before = self.engine.stats().steps
            had_work = self.engine.has_work()
            self.collect(self.engine.step())
            stats = self.engine.stats()
            if not self.ahead:
                assert (stats.steps > before) == had_work, "a step with work must run"
            self.engine.audit()

    def settle(self):
        """What is in flight ends before another verb acts: then nobody ends unseen in it."""
        self.collect(self.engine.drain())

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), count=st.integers(1, 3))
    def abort_some(self, data, count):
        self.settle()
        if not self.pending:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.pending)), unique=True, max_size=count))
        outputs = self.engine.abort([*chosen, "never seen"])
        assert {output.request_id for output in outputs} == set(chosen)
        self.collect(outputs, reason="abort")

    @rule(kind=st.sampled_from(["update", "update and abort", "update and finish", "sleep", "clear", "abort all"]))
    def disrupt(self, kind):
        if "abort" in kind:
            self.settle()
        if kind.startswith("update"):
            self.version += 1
            in_flight = kind.rpartition(" ")[2] if " " in kind else "keep"
            weights = [("salt", torch.tensor(self.version))]
            outputs = self.engine.update_weights(weights, self.version, in_flight=in_flight)
            self.collect(outputs, reason="abort" if in_flight == "abort" else None)
            assert in_flight == "keep" or not self.pending
        elif kind == "sleep":
            self.engine.release_kv_cache()
            self.engine.audit()
            self.engine.resume_kv_cache()
        elif kind == "clear":
            self.engine.clear_kv_cache()
        else:
            count = len(self.pending)
            outputs = self.engine.abort()
            assert len(outputs) == count
            self.collect(outputs, reason="abort")

    @invariant()
    def accounted(self):
        if not hasattr(self, "engine"):
            return
        self.engine.audit()
        unseen = {output.request_id for output in self.engine._ready}
        assert set(self.engine.request_ids()) | unseen == set(self.pending)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_work():
                break
            self.collect(self.engine.step())
        assert not self.pending, "a request never ended"
        stats = self.engine.stats()
        assert stats.free_pages == stats.total_pages, "pages leaked"
        assert sum(stats.finished.values()) == len(self.ended)
        assert np.all(self.engine._rows.page_SM == 0)


class AheadMachine(EngineMachine):
    """The same promises where a step is launched while the one before it runs."""

    ahead = True


TestEngineMachine = EngineMachine.TestCase
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(max_examples=25, stateful_step_count=20)
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=20)


@pytest.mark.parametrize("kind", [EngineMachine, AheadMachine])
@pytest.mark.parametrize("seed", range(8))
def test_heavy_traffic_in_a_small_pool(seed, kind):
    """The same promises where the pool is always short: arrivals, aborts and weight updates amid many preemptions."""
    rng = np.random.default_rng(seed)
    machine = kind()
    machine.start(
        page_size=int(rng.choice([1, 3, 4])),
        pool_tokens=48,
        budget=int(rng.choice([4, 16, 64])),
        chunk=[None, 3][seed % 2],
        seqs=16,
        watermark=0.0,
        caching=seed % 3 > 0,
        early=seed / 7,
    )
    for _ in range(25):
        tails = [rng.integers(2, VOCAB, rng.integers(0, 3)).tolist() for _ in range(2)]
        machine.add(int(rng.integers(2)), int(rng.integers(1, 20)), tails, int(rng.integers(4, 25)), 1.0)
        machine.step(int(rng.integers(1, 8)))
        machine.settle()
        if rng.random() < 0.2 and machine.pending:
            machine.collect(machine.engine.abort([rng.choice(sorted(machine.pending))]), reason="abort")
        if rng.random() < 0.05:
            machine.disrupt("update")
    machine.teardown()
    stats = machine.engine.stats()
    assert stats.preemptions >= 10
    assert (stats.chunk_cuts > 0) >= seed % 2
    assert (stats.prefix_hit_tokens > 0) == (seed % 3 > 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EngineMachine, AheadMachine])
def test_many_more_orders(kind):
    run_state_machine_as_test(kind, settings=settings(max_examples=150, stateful_step_count=30))
