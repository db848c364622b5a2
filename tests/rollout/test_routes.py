"""Routes become part of a sample checked, at full length, or the run ends with the reason."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.replay import tiny
from verl_tim.replay import ReplayError, RouterMap
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD, CheckedRoutes, raise_route_errors, take_routes

MAP = RouterMap(layers=(0, 1, 2), num_layers=3, num_experts=tiny.EXPERTS, top_k=tiny.TOP_K)


def output(mask, *, prompt=4, routes=None, **more):
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=list(range(prompt)),
        response_ids=list(range(len(mask))),
        response_mask=list(mask),
        routed_experts=routes,
        metrics=AgentLoopMetrics(),
        extra_fields={},
        **more,
    )


def test_verl_keeps_what_was_checked():
    """verl pads routes with expert 0 to the sequence's length; there is nothing left to pad."""
    raw = tiny.routes(8, 3)
    one = output([1] * 5, routes=raw)
    take_routes(one, MAP, sample="u")
    assert one.extra_fields == {}
    field = one.as_dict()["routed_experts"]
    assert (field.dtype, tuple(field.shape)) == (torch.int16, (9, 3, 2))
    assert (field[:8].numpy() == raw).all()
    assert (field[8] == -1).all()


def test_a_conversation():
    # drawn, drawn, tool, drawn, tool, tool: the last drawn token is the fourth
    mask = [1, 1, 0, 1, 0, 0]
    one = output(mask, routes=tiny.routes(4 + 3, 3))
    take_routes(one, MAP, sample="u")
    assert not one.extra_fields
    assert (one.routed_experts[:7] >= 0).all()
    assert (one.routed_experts[7:] == -1).all()
    longer = output(mask, routes=tiny.routes(4 + 6, 3))  # cut by verl to the response's length
    take_routes(longer, MAP, sample="u")
    assert not longer.extra_fields
    shorter = output(mask, routes=tiny.routes(4 + 2, 3))
    take_routes(shorter, MAP, sample="u")
    assert "off by one" in shorter.extra_fields[ROUTE_ERROR_FIELD]


def test_a_response_without_a_token_has_no_routes_to_check():
    one = output([], routes=None)
    take_routes(one, MAP, sample="u")
    assert not one.extra_fields
    assert (one.routed_experts == -1).all()


def test_an_error_travels_with_the_sample_and_ends_the_run():
    raw = tiny.routes(8, 3)
    raw[2, 1] = 0
    bad = output([1] * 5, routes=raw)
    take_routes(bad, MAP, sample="uid7_1_0")
    message = bad.extra_fields[ROUTE_ERROR_FIELD]
    assert "sample uid7_1_0, layer 1, position 2: all experts are 0" in message
    assert (bad.routed_experts == -1).all(), "routes that were refused must not be there"
    raise_route_errors([None, None])
    with pytest.raises(ReplayError, match=r"sample uid7_1_0, layer 1, position 2.*and 1 more of this step's samples"):
        raise_route_errors([None, message, message])


class _Verls:
    def __init__(self, folder, replay):
        rollout = {"enable_rollout_routing_replay": replay}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {"path": folder}}})

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        return output


class _Worker(CheckedRoutes, _Verls):
    pass


def test_a_model_without_routers_ends_the_run_before_a_response_is_lost(tmp_path):
    """verl's V1 trainer goes on without a response whose agent loop raised."""
    tiny.config(num_experts=0, mlp_only_layers=[0, 1, 2]).save_pretrained(tmp_path)
    _Worker(str(tmp_path), False)
    with pytest.raises(ReplayError, match="has no router"):
        _Worker(str(tmp_path), True)


@pytest.mark.parametrize("replay", [True, False])
def test_the_worker(tmp_path, replay):
    tiny.config().save_pretrained(tmp_path)
    worker = _Worker(str(tmp_path), replay)

    def run(validate, **kwargs):
        one = output([1] * 5, routes=tiny.routes(8, 3))
        return asyncio.run(worker._agent_loop_postprocess([one], validate, **kwargs))[0]

    found = run(False, uid="u", session_id=3)
    assert len(found.routed_experts) == (9 if replay else 8)
    assert (run(True).routed_experts is None) == replay
    assert isinstance(run(False).routed_experts, np.ndarray)


def test_partial_rollouts_keep_the_routes_of_each_part():
    """verl appends the routes of the tokens that a later attempt drew; what comes out has one route per position."""
    from verl.workers.rollout import llm_server

    first, second = tiny.routes(4 + 3 - 1, 3, seed=1), tiny.routes(4 + 5 - 1, 3, seed=2)
    parts = iter(
        [
            SimpleNamespace(token_ids=[1, 2, 3], routed_experts=first, stop_reason="aborted"),
            SimpleNamespace(token_ids=[4, 5], routed_experts=second, stop_reason="completed"),
        ]
    )
    for part_fields in ({"log_probs": None, "num_preempted": 0, "extra_fields": {"global_steps": 1}},):
        made = [SimpleNamespace(**part.__dict__, **part_fields) for part in parts]
    attempts = iter(made)

    class Attempts(llm_server.LLMServerClient):
        def __init__(self):
            self.config = SimpleNamespace()

        async def generate(self, *args, **kwargs):
            return next(attempts)

    class Client(llm_server.FullyAsyncLLMServerClient, Attempts):
        __init__ = Attempts.__init__

        def _configured_response_length(self):
            return 16

    async def generate():
        return await Client().generate(request_id="r", prompt_ids=[7] * 4, sampling_params={})

    whole = asyncio.run(generate())
    one = output([1] * 5, routes=whole.routed_experts)
    take_routes(one, MAP, sample="u")
    assert not one.extra_fields
    assert (one.routed_experts[:6] == first).all()
    assert (one.routed_experts[6:8] == second[-2:]).all()
