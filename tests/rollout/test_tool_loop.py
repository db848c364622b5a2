"""verl's tool agent loop with our parser and tool: drawn tokens stay as they were drawn, and the tool's are masked."""

import asyncio
import json
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.tool_registry import load_all_tools
from verl.workers.rollout.replica import TokenOutput

from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.prepare import absolute_paths
from verl_tim.launch.recipes import find_recipe
from verl_tim.replay import RouterMap
from verl_tim.rollout.compare_sum import total_of, verdict
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD, take_routes
from verl_tim.rollout.tool_parser import LastLineParser
from verl_tim.tasks.catalog import TASKS, resolve_difficulty
from verl_tim.tasks.problems import stream_problems
from verl_tim.tasks.reward import compute_conversation_score, last_reply
from verl_tim.tasks.tokenizer import build_tokenizer

QUESTION = "State the final answer to the following arithmetic problem: 6 - 9 + 14 ="


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(model_max_length=1024)


@pytest.fixture(scope="module")
def config():
    recipe = find_recipe("cpu_tool_grpo")
    with hydra_for(recipe):
        made = compose_config(recipe, [])
    absolute_paths(made)
    return made


@pytest.fixture(scope="module")
def tools(config):
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return load_all_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)


class Replies:
    """A rollout that gives the token ids it is told, whatever the prompt; it keeps the prompts.

    Its routes say the position and the turn: expert 1 + position % 6, and expert 7 in odd turns, 0 in even ones.
    """

    def __init__(self, replies):
        self.replies, self.prompts = list(replies), []

    def _routes(self, positions):
        place = np.arange(positions)
        return np.stack([1 + place % 6, np.full(positions, 7 * (len(self.prompts) % 2))], -1)[:, None].astype(np.uint8)

    async def generate(self, *, request_id, prompt_ids, sampling_params, **kwargs):
        self.prompts.append(list(prompt_ids))
        ids = self.replies[len(self.prompts) - 1]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-(len(self.prompts) + n / 100) for n in range(len(ids))],
            routed_experts=self._routes(len(prompt_ids) + len(ids) - 1),
        )


def converse(config, tokenizer, tools, replies):
    server = Replies(replies)

    async def run():
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap(tools),
        )
        return await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": QUESTION}])

    return server, asyncio.run(run())


def odd(tokenizer, text):
    """Token ids of a text that its own encoding would not give: one token per byte."""
    ids = [one for character in text for one in tokenizer.encode(character)]
    assert tokenizer.decode(ids) == text
    return ids


def test_drawn_tokens_are_kept_and_the_tools_are_masked(config, tokenizer, tools):
    end = tokenizer.eos_token_id
    replies = [[*odd(tokenizer, "answer 5\n12"), end], [*odd(tokenizer, "problem\n11"), end], [end]]
    assert replies[0][:-1] != tokenizer.encode("answer 5\n12"), "the case must be one that encoding again would change"
    server, output = converse(config, tokenizer, tools, replies)
    ids, mask, log_probs = output.response_ids, output.response_mask, output.response_logprobs
    assert len(ids) == len(mask) == len(log_probs)
    drawn = [one for one, kept in zip(ids, mask, strict=True) if kept]
    assert drawn == [one for reply in replies for one in reply]
    given = [-(turn + n / 100) for turn, reply in enumerate(replies, 1) for n in range(len(reply))]
    assert [value for value, kept in zip(log_probs, mask, strict=True) if kept] == given
    between = tokenizer.decode([one for one, kept in zip(ids, mask, strict=True) if not kept])
    said = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert between == said.format("too high") + said.format("right")
    # each turn's prompt is everything before it, to the token
    for turn, prompt in enumerate(server.prompts):
        whole = output.prompt_ids + ids
        assert prompt == whole[: len(prompt)]
        assert whole[len(prompt) : len(prompt) + len(replies[turn])] == replies[turn]


def test_routes_cover_a_conversation_up_to_its_last_drawn_token(config, tokenizer, tools):
    """Each request runs over everything before it, so the last one's routes are whole, tool's tokens included."""
    end = tokenizer.eos_token_id
    replies = [[*tokenizer.encode("12"), end], [*tokenizer.encode("11"), end], [end]]
    server, output = converse(config, tokenizer, tools, replies)
    whole = len(output.prompt_ids) + len(output.response_ids)
    routers = RouterMap(layers=(0,), num_layers=1, num_experts=8, top_k=2)
    take_routes(output, routers, sample="u")
    assert output.extra_fields.get(ROUTE_ERROR_FIELD) is None
    routes = output.routed_experts[:, 0]
    assert (routes[:-1, 0] == 1 + np.arange(whole - 1) % 6).all()
    assert (routes[:-1, 1] == 7 * (len(server.prompts) % 2)).all()
    assert (routes[-1] == -1).all()


def test_a_silent_reply_and_the_last_turn_end_a_conversation(config, tokenizer, tools):
    end = tokenizer.eos_token_id
    server, output = converse(config, tokenizer, tools, [[end], None])
    assert (len(server.prompts), output.response_ids, output.response_mask) == (1, [end], [1])
    server, _ = converse(config, tokenizer, tools, [[*tokenizer.encode("5"), end]] * 9)
    assert len(server.prompts) == config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 3


def test_the_parser_is_verls_by_its_name(tokenizer, tools):
    parser = ToolParser.get_tool_parser("last_line", tokenizer)
    assert isinstance(parser, LastLineParser)
    schemas = [tool.tool_schema for tool in tools]
    for text, line in {"1\n-3\n": "-3", " 7 <|im_end|>": "7", "a b<|endoftext|>c": "a b"}.items():
        _, (call,) = asyncio.run(parser.extract_tool_calls(tokenizer.encode(text), schemas))
        assert (call.name, json.loads(call.arguments)) == ("compare_sum", {"answer": line})
    with pytest.raises(ValueError, match="needs one tool with one argument"):
        asyncio.run(parser.extract_tool_calls(tokenizer.encode("1"), [*schemas, *schemas]))
    with pytest.raises(ValueError, match="set format=hermes"):
        asyncio.run(parser.extract_tool_calls(tokenizer.encode("1"), []))


def test_the_tool_knows_every_sum_of_the_task(tools):
    stream = stream_problems(TASKS["chain_sum"], resolve_difficulty(TASKS["chain_sum"], None), 3)
    problems = [problem for problem, _ in zip(stream, range(200), strict=False) if problem]
    assert len(problems) > 150
    for problem in problems:
        total = total_of(problem.question)
        assert total == int(problem.answer)
        assert [verdict(total, str(total + far)) for far in (0, -1, 1)] == ["right", "too low", "too high"]
    assert verdict(3, "three") == "no number"
    with pytest.raises(ValueError, match=r"not for 'What is 3\?'"):
        total_of("What is 3?")


def test_a_tool_that_cannot_tell_says_so_and_ends_nothing(config, tokenizer, tools):
    agent_data = SimpleNamespace(messages=[{"role": "user", "content": "What is 3?"}])
    with pytest.raises(ValueError, match="chain_sum"):
        asyncio.run(tools[0].execute("id", {"answer": "3"}, agent_data=agent_data))


@pytest.mark.parametrize(
    ("conversation", "reply"),
    [
        ("1\n6", "1\n6"),
        ("1\n6\ntool\ntoo high\nassistant\n5\n4", "5\n4"),
        ("1\n6\ntool\nright\nassistant\n", "1\n6"),
        ("1\ntool\nno number\nassistant\n2\ntool\nright\nassistant\n", "2"),
        ("\ntool\nno number\nassistant\n", ""),
        ("", ""),
    ],
)
def test_the_last_reply_that_says_something_is_scored(conversation, reply):
    assert last_reply(conversation) == reply
    score = compute_conversation_score("reasoning_gym/chain_sum", conversation, "6", {"metadata": "{}"})
    assert (score == 1.0) is reply.endswith("6")


def test_the_list_of_tools_is_found_in_its_package(config):
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == str(
        resources.files("verl_tim.recipes.cpu_tool_grpo").joinpath("tools.yaml")
    )
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    recipe = find_recipe("cpu_tool_grpo")
    for wrong in ("pkg://verl_tim.recipes.cpu_tool_grpo/none.yaml", "pkg://verl_tim.nowhere/tools.yaml"):
        with hydra_for(recipe):
            changed = compose_config(recipe, [f"{key}={wrong}"])
        with pytest.raises(LaunchError, match="tool_config_path"):
            absolute_paths(changed)
