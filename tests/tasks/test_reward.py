"""The reward function: the verifier's score, and nothing a model says that could stop or bend it."""

import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from reasoning_gym import create_dataset

import verl_tim.tasks.reward as reward
import verl_tim.tasks.verifier as verifier
from verl_tim.tasks.catalog import TASKS
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.reward import compute_score
from verl_tim.tasks.verifier import MAX_ANSWER_CHARS, extract_answer

SOURCES = sorted(task.data_source for task in TASKS.values())


def score(response, truth="12", source="reasoning_gym/chain_sum"):
    return compute_score(source, response, truth, {"metadata": "{}"})


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("12<|im_end|>\n<|im_start|>user", "12"),
        ("12<|endoftext|>13", "12"),
        ("<think>maybe 13</think>\n\n12", "12"),
        ("<think>a</think><think>b</think>12", "12"),
        ("so <answer>12</answer>.", "12"),
        ("<answer>11</answer> no, <answer> 12 </answer>", "12"),
        ("<answer>11<answer>12</answer>", "12"),
        ("<answer>12", "<answer>12"),
        ("12</answer>", "12</answer>"),
        ("3\n7\n12", "12"),
        ("3\n 12 \n\n", "12"),
        ("3\r\n12\r\n", "12"),
        ("<answer>\n1\n2\n</answer>", "1\n2"),
        ("<think><answer>11</answer></think>12", "12"),
        ("", ""),
    ],
)
def test_where_the_answer_stands(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize("answer", ["12", "012", "+12", "12.0", "13", "-12", "12 apples", "1", "2", "112", "twelve"])
def test_score_is_the_verifiers_own(answer):
    verifier = create_dataset("chain_sum", seed=0, size=1)
    assert score(answer) == verifier.score_answer(answer, {"answer": "12", "metadata": {}})


@pytest.mark.parametrize("source", SOURCES)
@given(response=st.text(max_size=80) | st.text(alphabet="0123456789-+.,eE /*()<>answer", max_size=40))
@settings(max_examples=150)
def test_any_text_scores_within_bounds(source, response):
    assert 0.0 <= score(response, source=source) <= 1.0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "response",
    [
        None,
        12,
        b"12",
        "",
        "9" * 1_000_000,
        "12" * 500_000,
        "<answer>" * 200_000,
        "</answer>" * 200_000,
        "<think>" * 200_000,
        "1." * 500_000,
        "1e999999999",
        "-1E-999999999",
        "NaN",
        "sNaN",
        "Infinity",
        "\x00" * 100,
        "1" * MAX_ANSWER_CHARS,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_nonsense_costs_time_and_reward_next_to_nothing(source, response):
    score("warm", source=source)
    start = time.perf_counter()
    assert score(response, truth="7", source=source) <= 0.01
    assert time.perf_counter() - start < 1.0


def test_a_long_answer_scores_zero_and_a_long_way_to_it_does_not():
    assert score("1" + "2" * MAX_ANSWER_CHARS, truth="1") == 0.0
    assert score("step by step, " * 10_000 + "<answer>12</answer>") == 1.0


def test_a_verifier_that_cannot_be_loaded_is_no_answers_fault(monkeypatch):
    """reasoning-gym that does not import would score every answer of the run 0, and end it with exit code 0."""

    def broken(name):
        raise ModuleNotFoundError("No module named 'six.moves'")

    monkeypatch.setattr(verifier, "_scorer", broken)
    with pytest.raises(ModuleNotFoundError, match=r"six\.moves"):
        score("12")


def test_a_failing_verifier_costs_a_zero_and_is_logged(monkeypatch, caplog):
    def fail(*args):
        raise RecursionError("too deep")

    monkeypatch.setattr(reward, "verify", fail)
    with caplog.at_level(logging.ERROR):
        assert score("12") == 0.0
    assert "verifier of chain_sum failed on answer '12'" in caplog.text


@pytest.mark.parametrize("source", ["openai/gsm8k", "chain_sum", "reasoning_gym/sudoku2", None])
def test_rows_of_other_data_are_an_error_of_the_data(source):
    with pytest.raises(InputError, match=r"custom_reward_function\.path"):
        compute_score(source, "12", "12")


@pytest.mark.parametrize("path", ["pkg://verl_tim.tasks.reward", reward.__file__])
def test_verl_loads_it(path):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": path, "name": "compute_score"}}})
    function = get_custom_reward_fn(config)
    extra_info = {"metadata": "{}", "index": 3, "num_turns": None, "rollout_reward_scores": {}}
    assert function(data_source=SOURCES[0], solution_str="12", ground_truth="12", extra_info=extra_info) == 1.0
