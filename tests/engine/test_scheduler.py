"""The scheduler's choices: budget, order, preemption, watermark, and a cost that does not see the queue."""

from __future__ import annotations

import time

import pytest

from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import check_output, fake_engine, random_prompts, run_all
from verl_tim.engine import SamplingParams

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("budget", [1, 3, 8, 20])
def test_no_step_exceeds_the_token_budget(budget):
    model = FakeModel()
    engine = fake_engine(model, max_num_batched_tokens=budget, max_num_seqs=12, kv_cache_tokens=1024)
    for index, prompt in enumerate(random_prompts(12, 1, 30, VOCAB)):
        engine.add(str(index), prompt, SamplingParams(max_tokens=6))
    run_all(engine)
    assert max(model.rows_seen) == budget


def test_decodes_go_on_beside_a_long_prefill():
    """A long prompt is cut to what the decodes leave, and stalls none of them."""
    model = FakeModel()
    engine = fake_engine(model, max_num_batched_tokens=16, kv_cache_tokens=1024)
    for name in "abc":
        engine.add(name, [2, 3], LONG)
    engine.step()
    engine.add("long", [4] * 100, LONG)
    before = engine.stats().drawn_tokens
    for _ in range(7):  # 13 rows of the prompt a step
        engine.step()
    assert engine.stats().drawn_tokens - before == 7 * 3
    assert engine.stats().chunk_cuts == 7
    engine.step()
    assert engine.stats().drawn_tokens - before == 8 * 3 + 1
    assert set(model.rows_seen[1:8]) == {16}


def test_max_prefill_chunk_bounds_each_sequence():
    model = FakeModel()
    engine = fake_engine(model, max_prefill_chunk=5, kv_cache_tokens=1024)
    for name in "ab":
        engine.add(name, [2] * 12, SamplingParams(max_tokens=2, ignore_eos=True))
    run_all(engine)
    assert model.rows_seen == [10, 10, 4, 2]


def test_first_come_first_served_and_nobody_overtakes():
    engine = fake_engine(max_num_seqs=2)
    ended = []
    for name in "abcdef":
        engine.add(name, [2], SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work():
        ended += [output.request_id for output in engine.step()]
    assert ended == list("abcdef")


def test_the_youngest_is_preempted_and_returns_first():
    """Pool of 12 pages; three sequences grow until it is short. The oldest is never preempted."""
    engine = fake_engine(kv_cache_tokens=48, watermark=0.0, max_num_seqs=8)
    prompts = {name: [2 + ord(name) % 50] * 4 for name in "abcdef"}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add(name, prompt, params)
    outputs = run_all(engine)
    assert outputs["a"].num_preempted == 0
    assert sum(output.num_preempted for output in outputs.values()) == engine.stats().preemptions > 0
    for name, output in outputs.items():
        assert len(output.token_ids) == 20
        check_output(output, prompts[name], params)


def test_recorded_log_probs_survive_preemption_untouched():
    """A preempted token is recomputed as KV, never drawn or scored again."""
    model = FakeModel()
    engine = fake_engine(model, kv_cache_tokens=48, watermark=0.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in "abcdef":
        engine.add(name, [2 + ord(name) % 50] * 4, params)
    run_all(engine)
    stats = engine.stats()
    assert stats.drawn_tokens == 6 * 20
    # Every row run is a prompt token, a drawn token but the last, or the recomputation of a preempted one.
    assert sum(model.rows_seen) == 6 * 4 + 6 * 19 + stats.preempted_tokens
    assert stats.preempted_tokens > 0


def thrash(watermark: float) -> tuple[float, float]:
    """Rows run per row needed, and steps, where the pool holds a third of what is asked for at once."""
    engine = fake_engine(
        kv_cache_tokens=2048, watermark=watermark, max_num_seqs=64, max_num_batched_tokens=512, page_size=16
    )
    prompts = random_prompts(64, 8, 24, VOCAB)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(max_tokens=60 + index % 40, ignore_eos=True))
    run_all(engine, audit=False)
    stats = engine.stats()
    return stats.preempted_tokens / (stats.drawn_tokens + sum(map(len, prompts))), stats.steps


def test_preemption_does_not_thrash():
    wasted, _ = thrash(0.02)
    assert wasted < 0.3, "more than three rows in ten were run twice"


def test_a_sequence_alone_may_use_the_whole_pool():
    engine = fake_engine(kv_cache_tokens=64, watermark=0.5)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    for name in "ab":
        engine.add(name, [2] * 40, params)
    outputs = run_all(engine)
    assert all(len(output.token_ids) == 25 for output in outputs.values())
    assert engine.stats().preemptions == 0, "the watermark kept the second one out"


def test_the_watermark_leaves_room_to_grow():
    engine = fake_engine(kv_cache_tokens=160, watermark=0.25, max_num_seqs=32)
    for index in range(32):
        engine.add(str(index), [2] * 8, LONG)
    engine.step()
    stats = engine.stats()
    assert stats.free_pages >= 10
    assert stats.num_running < 32


def schedule_seconds(waiting: int) -> float:
    engine = fake_engine(max_num_seqs=4, kv_cache_tokens=2048)
    for index in range(waiting):
        engine.add(str(index), [2, 3, 4, 5], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.step()
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(40):
            plan = engine._scheduler.schedule()
            assert plan is not None
        best = min(best, time.thread_time() - began)
    return best


def test_the_cost_of_a_step_does_not_grow_with_the_queue():
    assert schedule_seconds(20_000) < 3 * schedule_seconds(8)


def test_aborting_from_a_long_queue_is_cheap():
    def seconds(waiting: int) -> float:
        engine = fake_engine(max_num_seqs=1)
        for index in range(waiting):
            engine.add(str(index), [2], SamplingParams(max_tokens=4))
        began = time.thread_time()
        for index in range(waiting // 2, waiting // 2 + 500):
            assert len(engine.abort(str(index))) == 1
        return time.thread_time() - began

    assert seconds(20_000) < 5 * seconds(1_000)
