"""The reward function as verl calls it: right keys, right numbers, and errors where the data or the settings are
wrong."""

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math import reward
from verl_tim.tasks.math.plain import MAX_ANSWER_CHARS
from verl_tim.tasks.math.reward import compute_score

KEYS = {"score", "acc", "pred", "answer_missing", "answer_unreadable", "truth_unreadable", "timed_out", "worker_lost"}
REASONS = KEYS - {"score", "acc", "pred"}


def score(response, truth="12", extra_info=None, **settings):
    result = compute_score("math", response, truth, extra_info, **settings)
    assert set(result) == KEYS, "verl takes the keys of the first response for those of all"
    assert all(isinstance(result[name], float) and math.isfinite(result[name]) for name in KEYS - {"pred"})
    return result


def reasons(result):
    return {name for name in REASONS if result[name]}


def test_right_and_wrong():
    right, wrong = score(r"so \boxed{12}"), score(r"so \boxed{13}")
    assert (right["score"], right["acc"], right["pred"], reasons(right)) == (1.0, 1.0, "12", set())
    assert (wrong["score"], wrong["acc"], wrong["pred"], reasons(wrong)) == (0.0, 0.0, "13", set())


def test_why_nothing_matched():
    assert reasons(score("no answer at all")) == {"answer_missing"}
    assert reasons(score(None)) == {"answer_missing"}
    assert reasons(score(r"\boxed{\foo{}")) == {"answer_missing"}
    assert reasons(score(r"\boxed{\frac{1}}")) == {"answer_unreadable"}
    assert reasons(score(rf"\boxed{{{'1' * (MAX_ANSWER_CHARS + 1)}}}")) == {"answer_unreadable"}
    assert reasons(score(r"\boxed{\frac12}", truth=r"0.\overline{3}")) == {"truth_unreadable"}
    assert reasons(score(r"\boxed{9^{9^{9^{9}}}}", timeout=0.5)) == {"timed_out"}


def test_a_lost_worker_is_counted(monkeypatch):
    class Pool:
        def ask(self, truth, answer, seconds):
            return "lost"

    monkeypatch.setattr(reward, "shared_pool", lambda *settings: Pool())
    result = score(r"\boxed{\frac{24}{2}}")
    assert (result["score"], reasons(result)) == (0.0, {"worker_lost"})


@pytest.mark.parametrize("answer", ["12", "12.0", "012", r"\text{even}", r"\frac{1}{2}"])
def test_most_answers_need_no_worker(monkeypatch, answer):
    monkeypatch.setattr(reward, "shared_pool", lambda *settings: pytest.fail("asked a worker"))
    assert score(rf"\boxed{{{answer}}}", truth=answer.replace(".0", ""))["acc"] == 1.0
    assert score(r"\boxed{15}", truth="12")["acc"] == 0.0


def test_the_row_says_where_the_answer_stands():
    response = "#### 1\nAnswer: 2\n\\boxed{3}"
    for answer_format, answer in (("hash", "1"), ("answer_line", "2"), ("boxed", "3"), (None, "3")):
        extra_info = {"index": 0, "num_turns": None, "answer_format": answer_format}
        assert score(response, truth=answer, extra_info=extra_info)["acc"] == 1.0
    assert score(response, truth="1", extra_info={"answer_format": "boxed"}, answer_format="hash")["acc"] == 1.0


def test_settings():
    assert score(r"\boxed{13}", wrong_score=-1.0)["score"] == -1.0
    assert score("nothing", wrong_score=-1.0)["score"] == -1.0
    assert score(r"\boxed{12}", wrong_score=-1.0)["score"] == 1.0
    assert reasons(score(r"\boxed{12}", require_think_end=True)) == {"answer_missing"}
    assert score(r"hm</think>\boxed{12}", require_think_end=True)["acc"] == 1.0
    assert len(score(rf"\boxed{{{'1' * 500}}}")["pred"]) == 256


@pytest.mark.parametrize(
    "truth", [["11", "12"], np.array(["11", "12"], dtype=object), ("12",), 12, 12.0, np.int64(12), r"\boxed{12}"]
)
def test_ground_truths(truth):
    assert score(r"\boxed{12}", truth=truth)["acc"] == 1.0
    assert score(r"\boxed{13}", truth=truth)["acc"] == 0.0


@pytest.mark.parametrize("truth", [None, "", " ", [], ["12", None]])
def test_a_row_without_a_truth_is_an_error_of_the_data(truth):
    with pytest.raises(InputError, match=r"reward_model\.ground_truth: .*verl-tim data"):
        score(r"\boxed{12}", truth=truth)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"workers": 0}, "workers"),
        ({"workers": 1.5}, "workers"),
        ({"memory_mb": 16}, "memory_mb"),
        ({"answer_format": "xml"}, "answer_format"),
    ],
)
def test_settings_that_cannot_be(settings, key):
    with pytest.raises(InputError, match=rf"reward\.custom_reward_function\.reward_kwargs\.{key}: "):
        score(r"\boxed{12}", **settings)


def test_in_a_thread():
    # math-verify's own timeout is signal.alarm, which raises in any thread but the main one
    results = []
    thread = threading.Thread(target=lambda: results.append(score(r"\boxed{\frac{24}{2}}")))
    thread.start()
    thread.join()
    assert results[0]["acc"] == 1.0


@pytest.mark.parametrize(
    "response", ["9" * 1_000_000, r"\boxed{" * 100_000, "Answer:" * 100_000, "\x00" * 100, "#" * 10**6]
)
def test_long_nonsense_costs_next_to_nothing(response):
    start = time.perf_counter()
    for answer_format in ("boxed", "answer_line", "hash"):
        assert score(response, answer_format=answer_format)["acc"] == 0.0
    assert time.perf_counter() - start < 5.0


def reward_config(**settings):
    function = {"path": "pkg://verl_tim.tasks.math.reward", "name": "compute_score", "reward_kwargs": settings}
    return OmegaConf.create({"reward": {"custom_reward_function": function, "reward_kwargs": {}}})


def test_verl_loads_it_and_hands_it_the_settings():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = get_custom_reward_fn(reward_config(timeout=5, wrong_score=-1.0))
    result = function(data_source="m", solution_str=r"\boxed{1}", ground_truth="2", extra_info={"index": 3})
    assert result["score"] == -1.0


def test_without_math_verify_a_run_does_not_start(monkeypatch):
    import importlib

    from verl_tim.launch.checks import reward as check
    from verl_tim.tasks.math import pool

    monkeypatch.setattr(pool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'math-verify"):
        importlib.reload(reward)
    monkeypatch.undo()
    importlib.reload(reward)
    assert list(check.check(reward_config(timeout=5))) == []


@pytest.mark.slow
def test_verls_reward_manager_in_a_ray_actor():
    """The real manager of verl 0.9.1, which decodes and scores in threads of an actor; one response of three hangs."""
    import ray

    @ray.remote(num_cpus=0)
    class RewardWorker:
        async def score(self, responses):
            import asyncio

            import torch
            from verl import DataProto
            from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
            from verl.trainer.ppo.reward import get_custom_reward_fn

            class Tokenizer:
                def decode(self, ids, skip_special_tokens):
                    return "".join(map(chr, ids.tolist()))

            config = reward_config(timeout=1.0, workers=2)
            manager = NaiveRewardManager(config, Tokenizer(), get_custom_reward_fn(config))

            def proto(response):
                ids = torch.tensor([[ord(character) for character in response]])
                row = {
                    "data_source": np.array(["aime24"], dtype=object),
                    "reward_model": np.array([{"ground_truth": "12", "style": "rule"}], dtype=object),
                    "extra_info": np.array([{"index": 0, "answer_format": "boxed"}], dtype=object),
                }
                return DataProto.from_dict(
                    tensors={"responses": ids, "attention_mask": torch.ones_like(ids)}, non_tensors=row
                )

            return await asyncio.gather(*(manager.run_single(proto(response)) for response in responses))

    # the actor's class refers to this module
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        responses = [r"\boxed{\frac{24}{2}}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2\sqrt{36}}", r"\boxed{13}"]
        results = ray.get(RewardWorker.remote().score.remote(responses * 3), timeout=300)
    finally:
        ray.shutdown()
    assert [result["reward_score"] for result in results] == [1.0, 0.0, 1.0, 0.0] * 3
    assert [result["reward_extra_info"]["timed_out"] for result in results] == [0.0, 1.0, 0.0, 0.0] * 3
    assert {frozenset(result["reward_extra_info"]) for result in results} == {frozenset(KEYS)}


def test_verls_validation_takes_the_extra_keys():
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    responses = [r"\boxed{12}", "none", r"\boxed{12}", r"\boxed{13}"]
    rows = [score(response) for response in responses]
    infos = {"reward": [row["score"] for row in rows], **{key: [row[key] for row in rows] for key in KEYS}}
    metrics = process_validation_metrics(["aime24"] * 4, ["a", "a", "b", "b"], infos)["aime24"]
    assert metrics["acc"]["mean@2"] == 0.5
    assert metrics["answer_missing"]["mean@2"] == 0.25
    assert "maj@2/mean" in metrics["acc"], "pred is what verl votes by"
