"""Sampling parameters are strict; a request's states follow its state machine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verl_tim.engine import Request, RequestError, RequestOutput, SamplingParams
from verl_tim.engine.core import MAX_SEED, Drawn, RequestState, as_token_ids, default_seed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": 1e-6}, "use temperature=0 for greedy"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": 1e39}, "temperature=1e\\+39: .*float32"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 2.0}, "top_k=2.0: expected an integer"),
        ({"top_k": True}, "top_k=True"),
        ({"top_k": 2**31}, "top_k=2147483648: .*-1"),
        ({"top_k": 2**63}, "top_k=9223372036854775808"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": 1e-46}, "top_p=1e-46: .*float32"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"seed": 0.5}, "seed=0.5"),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5'"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids='a'"),
        ({"stop_token_ids": [-1]}, "not negative"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: only 1.0"),
        ({"n": 2}, "n=2"),
        ({"logprobs": 5}, "logprobs=5"),
        ({"max_tokens": 4, "max_new_tokens": 4}, "two names of one parameter"),
        ({"max_new_tokens": 0}, "max_tokens=0"),
        ({"presence_penalty": 0.0}, "unknown sampling parameter 'presence_penalty'; known: .*top_p"),
        ({"stop": ["\n"], "best_of": 1}, "'best_of', 'stop'"),
    ],
    ids=str,
)
def test_bad_parameters_are_named(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams.from_mapping(values)


def test_what_verl_sends_is_accepted():
    params = SamplingParams.from_mapping(
        {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "n": 1}
    )
    assert params == SamplingParams()
    greedy = SamplingParams.from_mapping(
        {"temperature": 0, "top_k": 0, "logprobs": None, "max_new_tokens": np.int64(7)}
    )
    assert (greedy.temperature, greedy.top_k, greedy.max_tokens) == (0.0, -1, 7)
    assert SamplingParams.from_mapping({"logprobs": 0, "stop_token_ids": None, "seed": None}) == SamplingParams()
    assert SamplingParams(stop_token_ids=[3, np.int32(4)]).stop_token_ids == (3, 4)


def test_the_callers_mapping_is_left_alone():
    values = {"logprobs": True, "n": 1, "max_new_tokens": 4}
    SamplingParams.from_mapping(values)
    assert values == {"logprobs": True, "n": 1, "max_new_tokens": 4}


def test_default_seed_is_a_fixed_hash():
    assert default_seed(0, "request-0") == 2140333481221715470
    seeds = {default_seed(engine_seed, f"r{i}") for engine_seed in range(3) for i in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert default_seed(1, "1/a") != default_seed(11, "/a")


def test_token_ids_are_copied_and_checked():
    source = np.array([1, 2])
    assert as_token_ids("prompt_ids", source, 5) is not source
    with pytest.raises(RequestError, match=r"prompt_ids\[1\]=5"):
        as_token_ids("prompt_ids", [4, 5], 5)
    with pytest.raises(RequestError, match="got bool"):
        as_token_ids("prompt_ids", [True, False], 5)


def request(**changes) -> Request:
    values = {
        "request_id": "a",
        "prompt_P": np.array([1, 2, 3]),
        "params": SamplingParams(),
        "seed": 1,
        "max_total": 5,
        "stop_ids": (9,),
        "arrival": 0,
    }
    return Request(**{**values, **changes})


def drawn(*tokens) -> Drawn:
    count = len(tokens)
    ones = np.ones(count, np.float32)
    ints = np.array(tokens, np.int32)
    return Drawn(ints, -ones, ones, ints, np.zeros(count, np.int64))


def test_states_follow_the_machine():
    W, R, P, F = RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED, RequestState.FINISHED
    allowed = {(W, R), (W, F), (R, P), (R, F), (P, R), (P, F)}
    for before in RequestState:
        for after in RequestState:
            subject = request(state=before)
            if (before, after) in allowed:
                subject.to(after)
                assert subject.state is after
            else:
                with pytest.raises(AssertionError, match=f"{before.value} -> {after.value}"):
                    subject.to(after)


def test_a_finish_must_agree_with_the_record():
    for tokens, reason in (((4, 5), "length"), ((4, 9), "stop"), ((9,), "stop"), ((4,), "abort"), ((), "abort")):
        subject = request(drawn=drawn(*tokens))
        subject.finish(reason)
        output = subject.output()
        assert (output.token_ids, output.finish_reason) == (list(tokens), reason)
    for tokens, reason in (((4,), "length"), ((4, 5), "stop"), ((4, 5, 6), "length")):
        with pytest.raises(AssertionError):
            request(drawn=drawn(*tokens)).finish(reason)


def test_requests_and_outputs_assert_their_shape():
    with pytest.raises(AssertionError):
        request(max_total=3)
    with pytest.raises(AssertionError):
        request(prompt_P=np.empty(0, np.int64))
    with pytest.raises(AssertionError, match="unequal lengths"):
        RequestOutput("a", [1], [], [1.0], [1], [0], "stop", 0, 3)
