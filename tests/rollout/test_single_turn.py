"""verl's single-turn loop is made once, of what the worker gives; a user's own stays."""

from __future__ import annotations

import pytest
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_tim.rollout import single_turn

NAME = "single_turn_agent"


class Config(dict):
    def __getattr__(self, name):
        return self[name]


@pytest.fixture
def registry(monkeypatch):
    found = dict(agent_loop._agent_loop_registry)
    monkeypatch.setattr(agent_loop, "_agent_loop_registry", found)
    monkeypatch.setattr(single_turn, "_made", None)
    return found


@pytest.fixture
def given(monkeypatch):
    monkeypatch.setattr(agent_loop, "create_continuous_token_builder", lambda *args, **kwargs: object())
    rollout = Config(prompt_length=8, response_length=4)
    config = Config(actor_rollout_ref=Config(rollout=rollout))
    return {
        "trainer_config": agent_loop.DictConfigWrap(config),
        "server_manager": object(),
        "tokenizer": object(),
        "processor": None,
        "hf_model_type": "qwen3",
        "dataset_cls": object,
        "data_config": agent_loop.DictConfigWrap(Config()),
        "tools": agent_loop.ToolListWrap([]),
    }


@pytest.mark.asyncio
async def test_hydra_makes_one_as_verls_worker_asks_for_it(registry, given):
    import hydra

    single_turn.share()
    first, second = (hydra.utils.instantiate(config=registry[NAME], **given) for _ in range(2))
    assert type(first) is SingleTurnAgentLoop
    assert first is second
    assert first.tokenizer is given["tokenizer"]
    assert first.response_length == 4


@pytest.mark.asyncio
async def test_another_server_or_tokenizer_makes_another(registry, given):
    first = single_turn.shared(**given)
    for name in ("server_manager", "tokenizer", "processor"):
        other = single_turn.shared(**{**given, name: object()})
        assert other is not first
    wrap = agent_loop.DictConfigWrap
    other = single_turn.shared(**{**given, "trainer_config": wrap(Config(given["trainer_config"].config))})
    assert other is not first


def test_a_users_own_loop_of_that_name_stays(registry):
    registry[NAME] = {"_target_": "mine.Loop"}
    single_turn.share()
    assert registry[NAME] == {"_target_": "mine.Loop"}


def test_sharing_twice_is_sharing_once(registry):
    single_turn.share()
    single_turn.share()
    assert registry[NAME] == {"_target_": "verl_tim.rollout.single_turn.shared"}
