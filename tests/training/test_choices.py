"""Top-1 tokens and routes of sampled sequences: recorded by a real engine and a real FSDP2 trainer, and laid side by
side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.sides import RolloutSide, TrainerSide, some_prompts
from verl_tim.diagnosis.routes import RouteError
from verl_tim.rollout.recorded import RECORD_PARAM, Recorded
from verl_tim.training.choices import Choices
from verl_tim.training.forward_records import FORWARD_METRIC, ForwardRecord
from verl_tim.training.records import take


def valid(rows):
    width = max(len(row.response) for row in rows)
    return torch.arange(width).unsqueeze(0) < torch.tensor([[len(row.response)] for row in rows])


def ones(rows):
    return [1.0 if number % 2 else -1.0 for number in range(len(rows))]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("rollout_name", ["vexact", "stock"])
def test_both_sides_of_a_moe(folders, process_group, rollout_name, packed):
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, packed=packed)
    rollout = RolloutSide(folder, name=rollout_name, page_size=8, kv_cache_tokens=176)
    try:
        rollout.take_weights(trainer, version=0)
        rows = rollout.draw(some_prompts(8), temperature=1.0, **{RECORD_PARAM: True})
        for row in rows:
            assert row.recorded.layers == (0, 1)
            assert row.recorded.routes_NLK.shape == (len(row.response), 2, 2)
        rows[3].recorded = None
        old = trainer.log_probs(rows)
        metrics = trainer.train(rows, old, ones(rows))
        forwards = take(metrics, FORWARD_METRIC)
        # recorded once, by the forward of the old log-probs
        assert sorted(record.row for record in forwards) == [0, 1, 2, 4, 5, 6, 7]
        assert take(trainer.train(rows, old, ones(rows)), FORWARD_METRIC) == []
        found = Choices.of([row.recorded for row in rows], forwards).metrics(valid(rows))
        tokens = sum(len(row.response) for row in rows) - len(rows[3].response)
        assert found["tim/top1_tokens"] == tokens
        assert found["tim/router_compared"] == 2 * tokens
        if rollout_name == "vexact":
            assert found["tim/top1_flip_rate"] == 0.0
            assert found["tim/router_flip_rate"] == found["tim/router_order_mismatch"] == 0.0
            assert {"tim/router_flip_rate/layer_0", "tim/router_flip_rate/layer_1"} <= found.keys()
        else:
            assert found["tim/router_flip_rate"] < 0.5, "not the same tokens"
            assert found["tim/top1_flip_rate"] < 0.5
    finally:
        rollout.close()


def test_under_bypass_the_first_mini_batch_records(folders, process_group):
    trainer, rollout = TrainerSide(folders("qwen3")), RolloutSide(folders("qwen3"))
    try:
        for version in range(2):
            rollout.take_weights(trainer, version=version)
            rows = rollout.draw(some_prompts(8, seed=version), temperature=1.0, **{RECORD_PARAM: True})
            log_probs = [row.log_probs for row in rows]
            forwards = take(trainer.train(rows, log_probs, ones(rows)), FORWARD_METRIC)
            assert len(forwards) == 8
            assert all(record.routes_RLK is None for record in forwards)
            found = Choices.of([row.recorded for row in rows], forwards).metrics(valid(rows))
            assert found["tim/top1_flip_rate"] == 0.0
            assert "tim/router_compared" not in found
            assert take(trainer.train(rows, log_probs, ones(rows)), FORWARD_METRIC) == [], "these weights have moved"
    finally:
        rollout.close()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_plain_transformers_give_top1(folders, process_group, packed):
    trainer, rollout = TrainerSide(folders("qwen3"), contract=False, packed=packed), RolloutSide(folders("qwen3"))
    try:
        rollout.take_weights(trainer, version=0)
        greedy = rollout.draw(some_prompts(8), temperature=0.0, **{RECORD_PARAM: True})
        assert all(row.recorded.top1_N.tolist() == row.response for row in greedy)
        old = trainer.log_probs(greedy)
        forwards = take(trainer.train(greedy, old, ones(greedy)), FORWARD_METRIC)
        agreed = np.concatenate([record.top1_R == greedy[record.row].response for record in forwards])
        assert agreed.mean() > 0.9, "greedy tokens are the likeliest ones on the other side, too, but for near ties"
    finally:
        rollout.close()


def test_no_mark_no_record(folders, process_group):
    trainer, rollout = TrainerSide(folders("qwen3")), RolloutSide(folders("qwen3"))
    try:
        rollout.take_weights(trainer, version=0)
        rows = rollout.draw(some_prompts(4), temperature=1.0)
        assert all(row.recorded is None for row in rows)
        assert take(trainer.train(rows, trainer.log_probs(rows), ones(rows)), FORWARD_METRIC) == []
    finally:
        rollout.close()


# ------------------------------------------------------------------------------------------------- without a model


def record(row, top1, routes=None, layers=()):
    routes = None if routes is None else np.array(routes, np.int16)
    return ForwardRecord(row, np.array(top1, np.int32), routes, layers)


def rolled(top1, routes=None, layers=()):
    routes = None if routes is None else np.array(routes, np.int16)
    return Recorded(np.array(top1, np.int32), routes, layers)


def test_known_flips_in_known_layers():
    # layers 1 and 3 of a model whose others are dense; three tokens, top 2 of 8
    theirs = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    ours = [[[0, 1], [2, 4]], [[1, 0], [2, 3]], [[6, 7], [2, 3]]]
    choices = Choices.of([None, rolled([5, 6, 7], theirs, (1, 3))], [record(1, [5, 6, 8], ours, (1, 3))])
    found = choices.metrics(torch.ones(2, 3, dtype=torch.bool))
    assert found["tim/top1_flip_rate"] == pytest.approx(1 / 3)
    assert found["tim/router_compared"] == 6
    assert found["tim/router_flip_rate"] == pytest.approx(2 / 6)
    assert found["tim/router_expert_mismatch"] == pytest.approx((0.5 + 1) / 6)
    assert found["tim/router_order_mismatch"] == pytest.approx(1 / 6)
    assert found["tim/router_flip_rate/layer_1"] == found["tim/router_flip_rate/layer_3"] == pytest.approx(1 / 3)
    assert "tim/router_flip_rate/layer_0" not in found


def test_only_what_both_sides_recorded_counts():
    # the rollout's record ends with the first turn; token 1 is no token of the model
    choices = Choices.of([rolled([1, 2, 3]), rolled([1])], [record(0, [1, 9, 4, 9, 9])])
    found = choices.metrics(torch.tensor([[True, False, True, True, True], [True] * 5]))
    assert found["tim/top1_tokens"] == 2
    assert found["tim/top1_flip_rate"] == 0.5
    assert Choices.of(None, []).metrics(torch.ones(1, 1, dtype=torch.bool)) == {}
    assert Choices.of([rolled([])], [record(0, [])]).metrics(torch.ones(1, 3, dtype=torch.bool)) == {}


def test_other_layers_are_refused():
    choices = Choices.of([rolled([1], [[[0, 1]]], (0,))], [record(0, [1], [[[0, 1]]], (1,))])
    with pytest.raises(RouteError, match=r"\(0,\), \(1,\)"):
        choices.metrics(torch.ones(1, 1, dtype=torch.bool))
