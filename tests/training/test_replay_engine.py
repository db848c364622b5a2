"""Routing replay in verl's FSDP2 engine, one process: with the contract it changes no bit, with the stock trainer it
takes the rollout's experts, or its own of before."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.training.sides import RolloutSide, Row, TrainerSide, some_prompts
from verl_tim.replay import ReplayError, RouterMap
from verl_tim.rollout.routes import take_routes
from verl_tim.training.config import ConfigError
from verl_tim.training.records import take
from verl_tim.training.replay_report import REPLAY_METRIC, replay_metrics
from verl_tim.training.replay_step import _needed

MAP = RouterMap(layers=(0, 1), num_layers=2, num_experts=4, top_k=2)


def checked(rows: list[Row]) -> list[Row]:
    """As the agent loop leaves them."""
    for number, row in enumerate(rows):
        output = SimpleNamespace(
            prompt_ids=row.prompt,
            response_ids=row.response,
            response_mask=[1] * len(row.response),
            routed_experts=row.routes,
            extra_fields={},
        )
        take_routes(output, MAP, sample=str(number))
        assert not output.extra_fields, output.extra_fields
        row.routes = output.routed_experts
    return rows


def drawn(folder, trainer, name, *, count=8, **engine):
    rollout = RolloutSide(folder, name=name, routes=True, page_size=8, kv_cache_tokens=176, **engine)
    try:
        rollout.take_weights(trainer, version=0)
        return checked(rollout.draw(some_prompts(count), temperature=1.0))
    finally:
        rollout.close()


def ones(rows):
    return [1.0 if number % 2 else -1.0 for number in range(len(rows))]


def weights(trainer):
    return {name: value.full_tensor().clone() for name, value in trainer.engine.module.state_dict().items()}


def without(rows):
    return [Row(row.prompt, row.response, row.log_probs, row.version) for row in rows]


def same(a, b):
    return torch.equal(torch.tensor(a).view(torch.int32), torch.tensor(b).view(torch.int32))


GATE = [
    # packed, gradient checkpointing, tokens of a dynamic micro-batch
    (True, False, None),
    (True, True, 120),
    (False, True, None),
]


@pytest.mark.parametrize(("packed", "checkpointing", "dynamic"), GATE, ids=["packed", "dynamic", "padded"])
def test_with_the_contract_no_bit_changes(folders, process_group, packed, checkpointing, dynamic):
    """Log-probs, loss, gradients: the weights after a step of AdamW are those of a run without replay."""
    folder = folders("qwen3_moe")
    made = {"packed": packed, "checkpointing": checkpointing, "dynamic": dynamic}
    plain, replaying = TrainerSide(folder, **made), TrainerSide(folder, replay="R3", **made)
    rows = drawn(folder, replaying, "vexact", enable_prefix_cache=True)
    before, start = plain.log_probs(without(rows)), weights(plain)
    old = replaying.log_probs(rows)
    for a, b, row in zip(before, old, rows, strict=True):
        assert np.isfinite(a).all()
        assert same(a, b)
        assert same(a, row.log_probs)
    plain.train(without(rows), before, ones(rows))
    metrics = replaying.train(rows, old, ones(rows))
    moved, theirs = weights(replaying), weights(plain)
    assert all(torch.equal(moved[name].view(torch.int32), theirs[name].view(torch.int32)) for name in theirs)
    assert any(not torch.equal(moved[name], start[name]) for name in start), "nothing was trained"
    found = replay_metrics(take(metrics, REPLAY_METRIC))
    assert found["tim/replay_flip_rate_before"] == found["tim/replay_order_mismatch_before"] == 0.0
    assert found["tim/replay_flip_rate_after"] == found["tim/replay_flip_rate_policy"] == 0.0
    # 2 layers; the last token of each sequence has no route, nor has padding
    positions = sum(len(row.prompt) + len(row.response) - 1 for row in rows)
    assert found["tim/replay_pairs"] == 2 * positions
    assert found["tim/replay_live_pairs"] > 0
    assert found["tim/replay_d_abs_mean_before"] == found["tim/replay_d_abs_mean_after"] == 0.0


def test_the_gate_can_fail(folders, process_group):
    """Other routes than its own, and the contract's log-probs are others."""
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, replay="R3")
    rows = drawn(folder, trainer, "vexact")
    before = trainer.log_probs(rows)
    for row in rows:
        row.routes = np.where(row.routes < 0, row.routes, (row.routes + 1) % 4)
    for a, b in zip(before, trainer.log_probs(rows), strict=True):
        assert not same(a, b)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_r3_takes_the_rollouts_experts_in_the_stock_trainer(folders, process_group, packed):
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, packed=packed, replay="R3", checkpointing=True, dynamic=120)
    rows = drawn(folder, trainer, "stock")
    other = np.random.default_rng(0)
    for row in rows:  # routes that nobody would choose: they must be taken all the same
        for position in other.integers(0, len(row.prompt) + len(row.response) - 1, 4):
            row.routes[position] = (row.routes[position] + 1) % 4
    old = trainer.log_probs(rows)
    found = replay_metrics(take(trainer.train(rows, old, ones(rows)), REPLAY_METRIC))
    assert 0 < found["tim/replay_flip_rate_before"] < 0.5
    assert found["tim/replay_flip_rate_after"] == found["tim/replay_order_mismatch_after"] == 0.0
    assert found["tim/replay_probed_tokens"] == len(rows[0].response)
    assert found["tim/replay_k3_before"] >= 0
    assert {"tim/replay_d_abs_mean_before", "tim/replay_d_abs_mean_after", "tim/replay_k3_after"} <= found.keys()


def test_r2_records_and_keeps_its_routes(folders, process_group):
    """Weights move between mini-batches; the policy's experts stay those of the old log-probs."""
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, replay="R2", checkpointing=True, dynamic=120, lr=0.05)
    rollout = RolloutSide(folder, name="stock", page_size=8, kv_cache_tokens=176)
    try:
        for step in range(2):
            rollout.take_weights(trainer, version=step)
            assert trainer.engine.replay.host_bytes == 0, "a step is over and its record is not cleared"
            rows = rollout.draw(some_prompts(8, seed=step), seed=step, temperature=1.0)
            old = trainer.log_probs(rows)
            tokens = sum(len(row.prompt) + len(row.response) for row in rows)
            assert trainer.engine.replay.host_bytes == tokens * 2 * 2 * 2
            first = replay_metrics(take(trainer.train(rows, old, ones(rows)), REPLAY_METRIC))
            second = replay_metrics(take(trainer.train(rows, old, ones(rows)), REPLAY_METRIC))
            assert first["tim/replay_flip_rate_before"] <= 0.02  # micro-batches of another shape
            assert second["tim/replay_flip_rate_before"] > first["tim/replay_flip_rate_before"], "no route flipped"
            for found in (first, second):
                assert found["tim/replay_flip_rate_after"] == found["tim/replay_order_mismatch_after"] == 0.0
                assert found["tim/replay_pairs"] == 2 * tokens
            assert first["tim/replay_host_mb"] == tokens * 8 / 1e6
            # a new record takes the place of the old one
            trainer.log_probs(rows[:2])
            with pytest.raises(ReplayError, match=r"sample [2-7]: its routes were not recorded on this rank"):
                trainer.train(rows, old, ones(rows))
            assert trainer.engine.replay.host_bytes == 0, "an error left routes behind"
    finally:
        rollout.close()


def test_a_step_that_updates_nothing_counts_for_no_other(folders, process_group):
    """verl warms a critic up so: old log-probs, no update, weights to the rollout."""
    trainer = TrainerSide(folders("qwen3_moe"), contract=False, replay="R3")
    rows = drawn(folders("qwen3_moe"), trainer, "stock", count=4)
    for _ in range(2):
        trainer.log_probs(rows)
        trainer.engine.get_per_tensor_param()
    found = replay_metrics(take(trainer.train(rows, trainer.log_probs(rows), ones(rows)), REPLAY_METRIC))
    assert found["tim/replay_pairs"] == 2 * sum(len(row.prompt) + len(row.response) - 1 for row in rows)
    assert found["tim/replay_probed_tokens"] == len(rows[0].response)


def test_a_reference_forward_in_the_actors_parameters_is_free(folders, process_group):
    """verl scores a reference model by switching the adapter off: those routes are neither recorded nor replayed."""
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, replay="R2", micro_batch=1)
    rows = [Row([3, 4, 5], [6, 7, 8], [0.0] * 3, 0), Row([9, 4], [6, 7], [0.0] * 2, 0)]
    expected = trainer.log_probs(rows[:1])
    held = trainer.engine.replay.host_bytes
    trainer.engine.module.disable_adapter = nullcontext
    with trainer.engine.disable_adapter():
        assert same(trainer.log_probs(rows)[0], expected[0])
    assert trainer.engine.replay.host_bytes == held


def test_what_the_worker_refuses(folders, process_group):
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, replay="R3")
    rows = drawn(folder, trainer, "stock", count=4)
    good = [row.routes.copy() for row in rows]

    def refused(message, change, *args):
        for row, routes in zip(rows, good, strict=True):
            row.routes = routes.copy()
        change(*args)
        with pytest.raises(ReplayError, match=message):
            trainer.log_probs(rows)

    def put(row, at, value):
        rows[row].routes[at] = value

    def widen():
        for row in rows:
            row.routes = row.routes.astype(np.int64)
        put(3, (2, 1), [1, 2**16])

    def cut():
        rows[2].routes = rows[2].routes[:-1]

    def drop():
        for row in rows:
            row.routes = row.routes[:, :1]

    length = len(good[1])
    refused("sample 1 of the batch, layer 0, position 0: no route", put, 1, 0, -1)
    refused(f"sample 1 of the batch, layer 1, position {length - 2}: no route", put, 1, (length - 2, 1), -1)
    refused(f"sample 1 of the batch, layer 0, position {length - 1}: a route in part", put, 1, (length - 1, 1), [0, 1])
    refused(r"layer 1, position 2: expert id outside \[0, 4\)", put, 3, (2, 1), [1, 4])
    refused(r"sample 3 of the batch, layer 1, position 2: expert id outside .* \(experts \[1, 65536\]\)", widen)
    refused("sample 3 of the batch, layer 1, position 2: an expert occurs twice", put, 3, (2, 1), [1, 1])
    # what verl writes where a rollout returned nothing
    refused("sample 0 of the batch, layer 0, position 0: an expert occurs twice", put, 0, np.s_[:], 0)
    refused(r"sample 2 of the batch, all layers, position \d+: \d+ positions have routes", cut)
    refused(r"layer 0, position 0: routes are \[\d+, 1, 2\], and 2 routers choose 2", drop)
    for row, routes in zip(rows, good, strict=True):
        row.routes = routes
    with pytest.raises(ReplayError, match="the batch has no routed_experts"):
        trainer.log_probs(without(rows))
    trainer.log_probs(rows)  # and goes on


def test_the_longest_sequences_are_laid_beside_the_live_choice(folders, process_group, monkeypatch):
    """Of short ones nothing can be told."""
    from verl_tim.training import replay_step

    trainer = TrainerSide(folders("qwen3_moe"), contract=False, replay="R3")
    rows = drawn(folders("qwen3_moe"), trainer, "stock", count=4)
    seen = {}

    def laid(given_TLK, live_TLK, *, prompt, sample):
        assert live_TLK.shape == given_TLK.shape
        seen[sample] = (given_TLK.numpy().copy(), prompt)

    monkeypatch.setattr(replay_step, "refuse_misplaced", laid)
    trainer.log_probs(rows)
    longest = sorted(range(4), key=lambda number: len(rows[number].routes))[-2:]
    assert set(seen) == {f"{number} of the batch" for number in longest}
    for number in longest:
        given, prompt = seen[f"{number} of the batch"]
        assert (given == rows[number].routes).all()
        assert prompt == len(rows[number].prompt)


def test_rows_without_a_token_in_the_loss_need_no_routes(folders, process_group):
    """verl fills a batch up with rows of zeros; they are no routes, and nothing is trained on them."""
    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, replay="R3")
    rows = drawn(folder, trainer, "stock", count=4)
    data = trainer._data(rows)
    rows[3].routes[:] = 0
    padded = trainer._data(rows)
    masks = list(padded["response_mask"].unbind())
    masks[3] = torch.zeros_like(masks[3])
    padded["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    with trainer.engine.eval_mode():
        whole = trainer.engine.infer_batch(data)["model_output"]["log_probs"].unbind()
        found = trainer.engine.infer_batch(padded)["model_output"]["log_probs"].unbind()
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], found[:3], strict=True))


def test_positions_that_need_a_route():
    """Up to the one that draws the last token of the loss; none in a micro-batch whose responses are all empty."""

    def needed(*masks):
        made = [torch.tensor(mask, dtype=torch.int64) for mask in masks]
        nested = torch.nested.as_nested_tensor(made, layout=torch.jagged)
        return _needed(
            {"response_mask": nested, "responses": nested}, torch.tensor([3 + len(mask) for mask in masks])
        ).tolist()

    assert needed([1, 1, 0, 1, 0], [0, 0], [], [1]) == [6, 0, 0, 3]
    assert needed([], []) == [0, 0]


def test_dense_rows_of_the_legacy_trainer(folders, process_group):
    """The legacy trainer's masks are padded; its last turns end before the response does."""
    from verl.workers.utils.padding import left_right_2_no_padding

    folder = folders("qwen3_moe")
    trainer = TrainerSide(folder, contract=False, replay="R3")
    rows = drawn(folder, trainer, "stock", count=4)
    expected = trainer.log_probs(rows)
    prompt_width, width = max(len(r.prompt) for r in rows), max(len(r.response) for r in rows)
    total = prompt_width + width
    fields = {
        name: torch.zeros(4, size, dtype=torch.int64)
        for name, size in (
            ("prompts", prompt_width), ("responses", width), ("response_mask", width), ("input_ids", total),
            ("attention_mask", total), ("position_ids", total),
        )
    }  # fmt: skip
    fields["routed_experts"] = torch.zeros(4, total, 2, 2, dtype=torch.int16)  # as verl pads
    for place, row in enumerate(rows):
        start, end = prompt_width - len(row.prompt), prompt_width + len(row.response)
        ids = torch.tensor(row.prompt + row.response)
        fields["input_ids"][place, start:end] = ids
        fields["attention_mask"][place, start:end] = 1
        fields["position_ids"][place, start:end] = torch.arange(len(ids))
        fields["prompts"][place, start:] = ids[: len(row.prompt)]
        fields["responses"][place, : len(row.response)] = ids[len(row.prompt) :]
        fields["response_mask"][place, : len(row.response)] = 1
        fields["routed_experts"][place, start:end] = torch.from_numpy(row.routes)
    data = tu.get_tensordict(fields, {})
    data = left_right_2_no_padding(data)
    for key, value in trainer._data(rows).items():
        if not isinstance(value, torch.Tensor):
            tu.assign_non_tensor(data, **{key: tu.unwrap_non_tensor_data(value)})
    with trainer.engine.eval_mode():
        found = trainer.engine.infer_batch(data)["model_output"]["log_probs"].unbind()
    for row, one, log_probs in zip(rows, found, expected, strict=True):
        assert one[len(row.prompt) - 1 : -1].tolist() == log_probs


def test_settings_that_a_worker_cannot_replay_with(folders, process_group):
    with pytest.raises(ReplayError, match="has no router"):
        TrainerSide(folders("qwen3"), contract=False, replay="R3")
    from verl_tim.training.engine import refuse_no_replay

    engine = SimpleNamespace(strategy="fsdp", ulysses_sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="strategy=fsdp: set it to fsdp2") as refused:
        refuse_no_replay(SimpleNamespace(enable_activation_offload=True), engine)
    for word in ("actor.ulysses_sequence", "actor.fsdp_config.ulysses_sequence", "enable_activation_offload"):
        assert word in str(refused.value)
