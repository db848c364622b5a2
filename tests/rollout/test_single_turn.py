"""verl's single-turn loop is made once, of what the worker gives, without Hydra; a user's own stays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import hydra
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
    monkeypatch.setattr(agent_loop, "hydra", hydra)
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
async def test_one_is_made_as_verls_worker_asks_for_it(registry, given, monkeypatch):
    by_hydra = hydra.utils.instantiate(config=registry[NAME], **given)
    single_turn.share()
    monkeypatch.setattr(hydra.utils, "instantiate", lambda *args, **kwargs: pytest.fail("Hydra was asked"))
    first, second = (agent_loop.hydra.utils.instantiate(config=registry[NAME], **given) for _ in range(2))
    assert isinstance(first, SingleTurnAgentLoop)
    assert first is second
    assert first.response_length == 4
    own = vars(first)
    assert own.pop("_prompts") == {}
    assert own == {**vars(by_hydra), "continuous_token_builder": own["continuous_token_builder"]}


def test_all_else_is_hydras(registry):
    single_turn.share()
    entry = {"_target_": "builtins.dict", "a": 1}
    assert agent_loop.hydra.utils.instantiate(config=entry) == {"a": 1}
    assert agent_loop.hydra.utils.get_class is hydra.utils.get_class
    assert agent_loop.hydra.compose is hydra.compose


class Builder:
    """Counts what is encoded; a prompt's tokens are its letters."""

    def __init__(self):
        self.built = []

    def build_initial_tokens(self, messages, **kwargs):
        self.built.append(messages[0]["content"])
        if not messages[0]["content"]:
            raise ValueError("an empty prompt")
        return list(map(ord, messages[0]["content"]))


@pytest.mark.asyncio
async def test_responses_of_one_prompt_share_its_tokens_and_none_can_change_anothers(registry, given):
    loop = single_turn.shared(**given)
    loop.continuous_token_builder = builder = Builder()
    abc, other = [{"role": "user", "content": "abc"}], [{"role": "user", "content": "abc"}]
    asked = [loop.ct_build_initial_tokens(list(messages), images=None) for messages in (abc, abc, other, abc)]
    tokens = await asyncio.gather(*asked)
    assert tokens == [[97, 98, 99]] * 4
    assert builder.built == ["abc", "abc"], "once for each prompt, also where two prompts have the same text"
    tokens[0].append(1)
    assert await loop.ct_build_initial_tokens(list(abc)) == [97, 98, 99]
    assert await loop.ct_build_initial_tokens([{"role": "user", "content": "abcdefghijkl"}]) == [*b"efghijkl"], (
        "verl's cut"
    )


@pytest.mark.asyncio
async def test_few_prompts_are_kept(registry, given, monkeypatch):
    monkeypatch.setattr(single_turn, "_KEPT_PROMPTS", 2)
    loop = single_turn.shared(**given)
    loop.continuous_token_builder = builder = Builder()
    prompts = [[{"role": "user", "content": letter}] for letter in "abc"]
    for prompt in (*prompts, prompts[2], prompts[1], prompts[0]):
        await loop.ct_build_initial_tokens(prompt)
    assert builder.built == ["a", "b", "c", "a"]
    assert len(loop._prompts) == 2


@pytest.mark.asyncio
async def test_a_prompt_that_cannot_be_encoded_fails_all_its_responses_and_no_other(registry, given):
    loop = single_turn.shared(**given)
    loop.continuous_token_builder = Builder()
    bad, good = [{"role": "user", "content": ""}], [{"role": "user", "content": "a"}]
    asked = [loop.ct_build_initial_tokens(messages) for messages in (bad, bad, good)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(result) for result in results[:2]] == ["an empty prompt"] * 2
    assert results[2] == [97]


@pytest.mark.asyncio
async def test_a_cancelled_response_takes_no_tokens_from_the_others(registry, given):
    loop = single_turn.shared(**given)
    loop.continuous_token_builder = Builder()
    prompt = [{"role": "user", "content": "ab"}]
    first, second = (asyncio.ensure_future(loop.ct_build_initial_tokens(prompt)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [97, 98]


@pytest.mark.asyncio
async def test_prompts_with_tools_or_images_are_verls_affair(registry, given):
    loop = single_turn.shared(**given)
    loop.continuous_token_builder = builder = Builder()
    loop.rollout_config = SimpleNamespace(prompt_length=8)
    prompt = [{"role": "user", "content": "ab"}]
    for more in ({"tools": [{}]}, {"images": [object()]}):
        for _ in range(2):
            await loop.ct_build_initial_tokens(prompt, **more)
    assert len(builder.built) == 4


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
