"""Marks of the sequences that are recorded, and vLLM's likeliest tokens and routes through verl's server class."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.replay import tiny
from verl_tim.replay import RouterMap
from verl_tim.rollout import vllm_recorded
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD, Recorded, mark
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD
from verl_tim.rollout.vllm_recorded import record_choices, top1_ids


def test_a_seeded_choice():
    chosen = mark(100, 8, seed=1, step=5)
    assert chosen.sum() == 8
    assert (chosen == mark(100, 8, seed=1, step=5)).all()
    assert (chosen != mark(100, 8, seed=1, step=6)).any()
    assert (chosen != mark(100, 8, seed=2, step=5)).any()
    assert mark(3, 8, seed=1, step=1).all()
    assert not mark(3, 0, seed=1, step=1).any()
    assert len(mark(0, 8, seed=1, step=1)) == 0


def test_the_wire_gives_back_what_was_recorded():
    sent = Recorded(np.array([3, 1], np.int32), np.array([[[0, 1]], [[5, 2]]], np.int16), (4,))
    # TransferQueue may hand arrays back as lists
    for routes in (sent.routes_NLK, sent.routes_NLK.tolist()):
        back = Recorded.of_wire({**sent.wire(), "routes": routes})
        assert (back.top1_N.tolist(), back.routes_NLK.tolist(), back.layers) == ([3, 1], [[[0, 1]], [[5, 2]]], (4,))
        assert (back.top1_N.dtype, back.routes_NLK.dtype) == (np.int32, np.int16)
    assert Recorded.of_wire(None) is None


# ------------------------------------------------------------------------------------------------------------- vLLM


@dataclass
class SamplingParams:
    max_tokens: int
    logprobs: int | None = None
    temperature: float = 1.0
    prompt_logprobs: int | None = None


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None
    extra_fields: dict[str, Any] = field(default_factory=dict)


def logprob(value):
    return SimpleNamespace(logprob=value)


class FakeEngine:
    """As vLLM's: yields growing outputs; lists the drawn token, and with logprobs=1 the likeliest one beside it."""

    drawn, likeliest = [7, 8, 9], [7, 3, 9]

    def __init__(self, routes=None):
        self.asked = []
        self.routes = routes  # of a finished request, prompt + response - 1 positions

    async def list_loras(self):
        return ["lora"]

    async def generate(self, *, prompt, sampling_params, request_id):
        self.asked.append(sampling_params)
        for count in range(1, 4):
            await asyncio.sleep(0)
            listed = None
            if sampling_params.logprobs is not None:
                listed = [{token: logprob(-2.0 if token == 8 else -0.5)} for token in self.drawn[:count]]
                if sampling_params.logprobs:
                    for entry, token in zip(listed, self.likeliest, strict=False):
                        entry.setdefault(token, logprob(-0.25))
            last = SimpleNamespace(
                token_ids=self.drawn[:count], logprobs=listed, routed_experts=self.routes if count == 3 else None
            )
            yield SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, outputs=[last])


def fake_module(engine=None):
    """What of verl's vllm_async_server the patch touches: its names, and `generate` in verl's order of work."""
    module = SimpleNamespace(SamplingParams=SamplingParams)

    class vLLMHttpServer:
        def __init__(self):
            self.engine = engine or FakeEngine()
            self.model_config = SimpleNamespace(local_path="folder", trust_remote_code=False)

        async def generate(self, prompt_ids, sampling_params, request_id, priority=0):
            sampling_params["logprobs"] = 0 if sampling_params.pop("logprobs", False) else None
            params = module.SamplingParams(max_tokens=4, **sampling_params)
            assert "lora" in await self.engine.list_loras()
            final = None
            async for output in self.engine.generate(prompt=prompt_ids, sampling_params=params, request_id=request_id):
                final = output
            drawn = final.outputs[0]
            log_probs = None
            if params.logprobs is not None:
                log_probs = [entry[drawn.token_ids[i]].logprob for i, entry in enumerate(drawn.logprobs)]
            return TokenOutput(drawn.token_ids, log_probs, {"global_steps": 1})

    module.vLLMHttpServer = vLLMHttpServer
    return module


@pytest.fixture
def server():
    module = fake_module()
    record_choices(module)
    return module.vLLMHttpServer()


def ask(server, **params):
    return server.generate([1, 2], {"temperature": 1.0, **params}, "request")


def test_a_marked_request_returns_the_likeliest_tokens(server):
    output = asyncio.run(ask(server, logprobs=True, **{RECORD_PARAM: True}))
    recorded = Recorded.of_wire(output.extra_fields[RECORDED_FIELD])
    assert recorded.top1_N.tolist() == [7, 3, 9]
    assert recorded.routes_NLK is None
    assert output.log_probs == [-0.5, -2.0, -0.5], "of the drawn tokens, as before"
    assert output.extra_fields["global_steps"] == 1
    assert server.engine.asked[0].logprobs == 1


def test_other_requests_are_left_alone(server):
    output = asyncio.run(ask(server, logprobs=True))
    assert output.extra_fields == {"global_steps": 1, RECORDED_FIELD: None}
    assert server.engine.asked[0].logprobs == 0
    assert isinstance(server.engine, FakeEngine)


def test_without_log_probs_there_is_nothing_to_record(server):
    output = asyncio.run(ask(server, logprobs=False, **{RECORD_PARAM: True}))
    assert output.extra_fields[RECORDED_FIELD] is None
    assert server.engine.asked[0].logprobs is None


def test_requests_in_flight_together_do_not_mix(server):
    async def all_at_once():
        return await asyncio.gather(
            *[ask(server, logprobs=True, **({RECORD_PARAM: True} if number % 2 else {})) for number in range(6)]
        )

    outputs = asyncio.run(all_at_once())
    assert [output.extra_fields[RECORDED_FIELD] is not None for output in outputs] == [False, True] * 3
    assert [params.logprobs for params in server.engine.asked] == [0, 1] * 3


def test_a_failure_reaches_the_caller(server):
    async def broken(**_):
        raise RuntimeError("engine dead")
        yield

    server.engine.generate = broken
    with pytest.raises(RuntimeError, match="engine dead"):
        asyncio.run(ask(server, logprobs=True, **{RECORD_PARAM: True}))


def test_ties_go_to_the_lower_id():
    assert top1_ids([{9: logprob(-1.0), 4: logprob(-1.0)}, {2: logprob(-3.0), 5: logprob(-0.1)}]).tolist() == [4, 5]
    assert top1_ids([]).dtype == np.int32


MAP = RouterMap(layers=(0, 2), num_layers=3, num_experts=tiny.EXPERTS, top_k=tiny.TOP_K)


@pytest.fixture
def routed(monkeypatch):
    """A server whose engine returns these routes, of a model whose second layer is dense."""

    def make(routes):
        module = fake_module(FakeEngine(routes))
        record_choices(module)
        asked = []
        monkeypatch.setattr(vllm_recorded, "_routers", lambda *model: asked.append(model) or MAP)
        server = module.vLLMHttpServer()
        server.asked_for = asked
        return server

    return make


def as_vllm(routes):
    """uint8, all layers of the model, dense ones blank."""
    whole = np.zeros((len(routes), 3, tiny.TOP_K), np.uint8)
    whole[:, [0, 2]] = routes
    return whole


def test_routes_of_the_drawn_tokens(routed):
    """Two prompt tokens and three drawn ones: the first is predicted at position 1, the last at 3, none at 4."""
    routes = tiny.routes(4, 2)
    server = routed(as_vllm(routes))
    output = asyncio.run(ask(server, logprobs=True, **{RECORD_PARAM: True}))
    recorded = Recorded.of_wire(output.extra_fields[RECORDED_FIELD])
    assert recorded.routes_NLK.dtype == np.int16
    assert (recorded.routes_NLK == routes[1:]).all()
    assert recorded.layers == (0, 2)
    assert recorded.top1_N.tolist() == [7, 3, 9]
    assert ROUTE_ERROR_FIELD not in output.extra_fields
    assert server.asked_for == [("folder", False)]


def test_routes_of_other_requests_are_left_alone(routed):
    server = routed(as_vllm(tiny.routes(4, 2)))
    output = asyncio.run(ask(server, logprobs=True))
    assert output.extra_fields == {"global_steps": 1, RECORDED_FIELD: None}
    assert server.asked_for == []


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda routes: routes[1:], "off by one"),
        (lambda routes: np.concatenate([routes, routes[:1]]), "off by one"),
        (lambda routes: routes * 0, "padding, not routes"),
        (lambda routes: routes + tiny.EXPERTS, "outside"),
    ],
)
def test_routes_that_are_none_travel_as_the_error_that_ends_the_run(routed, broken, says):
    output = asyncio.run(ask(routed(as_vllm(broken(tiny.routes(4, 2)))), logprobs=True, **{RECORD_PARAM: True}))
    assert output.extra_fields[RECORDED_FIELD] is None
    message = output.extra_fields[ROUTE_ERROR_FIELD]
    assert "of vLLM's request request" in message
    assert says in message


def test_the_routers_are_those_of_the_folder(tmp_path):
    tiny.config().save_pretrained(tmp_path)
    found = vllm_recorded._routers(str(tmp_path), False)
    assert (found.num_experts, found.top_k, found.layers) == (tiny.EXPERTS, tiny.TOP_K, (0, 1, 2))
