"""The event-by-event sum against a scheduler that goes token by token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.conftest import DENSE, Run
from verl_tim.planning.decode import Decode
from verl_tim.planning.rates import Speeds
from verl_tim.planning.rollout_time import simulate


@pytest.fixture(scope="module")
def decode():
    run = Run(DENSE, "qwen3-1.7b", "H200")
    return Decode(run.shape, run.memory.settings, Speeds(run.gpu))


def limited(decode, sequences):
    return dataclasses.replace(decode, settings=dataclasses.replace(decode.settings, max_sequences=sequences))


def token_by_token(decode, prompt, answers, pool):
    """(seconds without prefill, most at once, preemptions) of the same rules, one token at a time."""
    waiting, running, drawn = list(range(len(answers)))[::-1], [], [0] * len(answers)
    seconds, at_once, preempted = 0.0, 0, 0
    while waiting or running:
        context = sum(prompt + drawn[index] for index in running)
        while waiting and len(running) < decode.settings.max_sequences:
            if context + prompt + drawn[waiting[-1]] + 1 > pool * (0.98 if running else 1.0):
                break
            index = waiting.pop()
            running.append(index)
            context += prompt + drawn[index]
        while context + len(running) > pool and len(running) > 1:
            victim = running.pop()
            waiting.append(victim)
            context -= prompt + drawn[victim]
            preempted += 1
        at_once = max(at_once, len(running))
        seconds += decode.seconds(len(running), context + len(running) / 2)
        for index in running:
            drawn[index] += 1
        running = [index for index in running if drawn[index] < answers[index]]
    return seconds, at_once, preempted


@settings(max_examples=30)
@given(
    answers=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    prompt=st.integers(1, 40),
    most=st.integers(1, 12),
    room=st.integers(0, 600),
)
def test_time_is_that_of_single_tokens(decode, answers, prompt, most, room):
    pool = prompt + max(answers) + room
    one = limited(decode, most)
    slow, at_once, preempted = token_by_token(one, prompt, answers, pool)
    fast = simulate(one, prompt, np.array(answers, dtype=float), pool_tokens=pool)
    # with preemptions the order of events may differ by a token
    tolerance = 0.01 if preempted == 0 and fast.preemptions == 0 else 0.2
    assert fast.seconds - fast.prefill == pytest.approx(slow, rel=tolerance)
    assert fast.tokens == sum(answers)
    assert fast.at_once <= min(most, len(answers))
    if not preempted and not fast.preemptions:
        assert fast.at_once == at_once
    assert fast.most_context <= pool * (1 + 1e-9)
    assert fast.seconds > fast.floor_seconds


def test_a_pool_that_is_too_small_preempts_and_costs_time(decode):
    answers = np.full(64, 400.0)
    large = simulate(decode, 100, answers, pool_tokens=100_000)
    small = simulate(decode, 100, answers, pool_tokens=10_000)
    assert large.preemptions == 0
    assert large.waited == 0
    assert small.preemptions > 0
    assert small.recomputed_tokens > 100 * small.preemptions
    assert small.seconds > large.seconds


def test_the_tail_is_the_time_of_the_last_few(decode):
    answers = np.array([100.0] * 63 + [1000.0])
    time = simulate(decode, 100, answers, pool_tokens=100_000)
    alone = simulate(decode, 100, np.array([900.0]), pool_tokens=100_000)
    assert time.tail == pytest.approx(alone.seconds, rel=0.05)
    assert simulate(decode, 100, np.full(64, 100.0), pool_tokens=100_000).tail == 0


def test_a_shared_prefix_is_computed_once(decode):
    answers = np.full(32, 10.0)
    each = simulate(decode, 1000, answers, pool_tokens=100_000)
    shared = simulate(decode, 1000, answers, pool_tokens=100_000, samples=8)
    assert shared.prefill == pytest.approx(each.prefill / 8)


def test_an_impossible_pool_is_an_error(decode):
    with pytest.raises(AssertionError, match="never ends"):
        simulate(decode, 100, np.array([50.0]), pool_tokens=149)


@settings(max_examples=50)
@given(
    sequences=st.integers(1, 2000), more=st.integers(0, 500), context=st.floats(1, 1e7), further=st.floats(0, 1e6),
)  # fmt: skip
def test_a_step_never_gets_cheaper_with_more_to_do(decode, sequences, more, context, further):
    assert decode.seconds(sequences + more, context + further) >= decode.seconds(sequences, context)
    assert decode.floor_seconds(sequences, context) < decode.seconds(sequences, context)


def test_tensor_and_pipeline_ranks_read_less(decode):
    def split(**degrees):
        return dataclasses.replace(decode, settings=dataclasses.replace(decode.settings, **degrees))

    one = decode.floor_seconds(64, 64_000)
    assert split(tensor_parallel=4).floor_seconds(64, 64_000) == pytest.approx(one / 4)
    staged = split(pipeline_parallel=4).floor_seconds(64, 64_000)
    weights = decode.floor_seconds(64, 0)
    assert staged == pytest.approx(weights + (one - weights) / 4)
    assert split(tensor_parallel=4).excess_seconds(64) > decode.excess_seconds(64)  # gathers


def test_experts_that_nobody_chose_are_not_read():
    run = Run(DENSE, "qwen3-30b-a3b", "H200")
    decode = Decode(run.shape, run.memory.settings, Speeds(run.gpu))
    few, many = decode.floor_seconds(1, 0), decode.floor_seconds(256, 0)
    assert few < many / 8
    assert 2 * 0.9 * run.shape.parameters < many * 4.3e12 < 2 * run.shape.parameters
