"""Router metrics: sets and orders compared, and every way in which recorded routes can lie."""

from __future__ import annotations

import pytest
import torch

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.routes import RouteError


def compare(rollout, train, mask=None, **fields):
    """Routes as nested lists (B, T, layers, k)."""
    rollout, train = torch.tensor(rollout), torch.tensor(train)
    shape = rollout.shape[:2]
    mask = torch.ones(shape) if mask is None else torch.tensor(mask)
    zeros = torch.zeros(shape)
    return mismatch_metrics(
        old_log_probs=zeros,
        rollout_log_probs=zeros,
        response_mask=mask,
        rollout_routes=rollout,
        train_routes=train,
        **fields,
    )


def test_b19a_order_is_no_flip():
    found = compare([[[[3, 7]]]], [[[[7, 3]]]])
    assert found["tim/router_flip_rate"] == found["tim/router_expert_mismatch"] == 0.0
    assert found["tim/router_order_mismatch"] == 1.0


def test_b19b_one_of_two_experts_differs():
    found = compare([[[[3, 7]]]], [[[[3, 5]]]])
    assert found["tim/router_flip_rate"] == 1.0
    assert found["tim/router_expert_mismatch"] == 0.5
    assert found["tim/router_order_mismatch"] == 0.0


def test_b19c_a_dense_layer_keeps_its_index():
    blank = [-1, -1]
    rollout = [[[blank, [0, 1], [2, 3], [4, 5]]]]
    train = [[[blank, [0, 1], [2, 9], [5, 4]]]]
    found = compare(rollout, train)
    layers = {name for name in found if "router_flip_rate/layer" in name}
    assert layers == {f"tim/router_flip_rate/layer_{i}" for i in (1, 2, 3)}
    assert [found[f"tim/router_flip_rate/layer_{i}"] for i in (1, 2, 3)] == [0.0, 1.0, 0.0]
    assert found["tim/router_order_mismatch/layer_3"] == 1.0
    assert found["tim/router_flip_rate"] == pytest.approx(1 / 3)
    assert found["tim/router_expert_mismatch"] == pytest.approx(1 / 6)
    assert found["tim/router_compared"] == 3.0
    assert found["tim/router_unrecorded"] == 1.0


def test_b19d_a_router_without_a_recorded_route_is_an_error():
    with pytest.raises(
        RouteError, match="rollout_routes: layer routed in the trainer only at sample 1, layer 2, position 1"
    ):
        compare(
            [[[[0, 1]] * 3, [[0, 1]] * 3], [[[0, 1]] * 3, [[0, 1], [0, 1], [-1, -1]]]],
            [[[[0, 1]] * 3, [[0, 1]] * 3], [[[0, 1]] * 3, [[0, 1]] * 3]],
        )
    with pytest.raises(
        RouteError, match="train_routes: layer routed in the rollout only at sample 0, layer 0, position 0"
    ):
        compare([[[[0, 1]]]], [[[[-1, -1]]]])


def test_sequences_outside_the_sample_are_left_out_and_counted():
    recorded, blank = [[1, 2], [3, 4]], [[-1, -1], [-1, -1]]
    found = compare([[recorded, recorded], [blank, blank]], [[recorded, recorded], [blank, blank]])
    assert found["tim/router_compared"] == 4.0
    assert found["tim/router_unrecorded"] == 4.0
    assert found["tim/router_flip_rate"] == 0.0


def test_nothing_recorded_has_no_rate():
    found = compare([[[[-1, -1]]]], [[[[-1, -1]]]])
    assert found["tim/router_compared"] == 0.0
    assert not any(name.startswith("tim/router_flip_rate") for name in found)


def test_masked_and_missing_positions_are_not_read():
    found = compare(
        [[[[0, 1]], [[5, 5]]]],
        [[[[0, 1]], [[-1, -1]]]],
        mask=[[1, 0]],
    )
    assert found["tim/router_flip_rate"] == 0.0


@pytest.mark.parametrize(
    ("rollout", "train", "message"),
    [
        (
            [[[[4, 4]]]],
            [[[[4, 5]]]],
            "rollout_routes: an expert id occurs twice in one token at sample 0, layer 0, position 0",
        ),
        ([[[[4, 5]]]], [[[[4, -2]]]], "train_routes: expert id out of range"),
        ([[[[4, 5]]]], [[[[4, 8]]]], "num_experts is 8"),
        ([[[[4, -1]]]], [[[[4, 5]]]], "some of the k experts are -1"),
        ([[[[0, 0]]]], [[[[0, 1]]]], "all-zero layer"),
        # A padded layer in both: zero flips would be reported for routes nobody recorded.
        ([[[[0, 0]]]], [[[[0, 0]]]], "all-zero layer"),
        # Layer 1 routes in sample 0 and is blank in sample 1, whose layer 0 was recorded.
        (
            [[[[0, 1], [2, 3]]], [[[0, 1], [-1, -1]]]],
            [[[[0, 1], [2, 3]]], [[[0, 1], [-1, -1]]]],
            "all -1 in a layer that the model routes at sample 1, layer 1, position 0",
        ),
        # k = 1: zeros all along a row on one side only.
        ([[[[0]], [[0]], [[0]]]], [[[[2]], [[0]], [[5]]]], "rollout_routes: all-zero layer"),
    ],
)
def test_routes_that_lie_are_refused_with_their_place(rollout, train, message):
    with pytest.raises(RouteError, match=message):
        compare(rollout, train, num_experts=8)


def test_single_expert_routing():
    found = compare([[[[0]], [[2]]]], [[[[0]], [[3]]]])
    assert found["tim/router_flip_rate"] == found["tim/router_expert_mismatch"] == 0.5


@pytest.mark.parametrize(
    ("rollout", "train", "message"),
    [
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), "must be an integer tensor"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 2, 3, dtype=torch.int64), "has shape"),
        (
            torch.zeros(1, 2, 4, 2, dtype=torch.int64),
            torch.zeros(1, 2, 3, 2, dtype=torch.int64),
            "differ in layers or k",
        ),
        (torch.zeros(1, 3, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 3, 2, dtype=torch.int64), "has shape"),
    ],
)
def test_shapes(rollout, train, message):
    zeros = torch.zeros(1, 2)
    with pytest.raises(RouteError, match=message):
        mismatch_metrics(
            old_log_probs=zeros,
            rollout_log_probs=zeros,
            response_mask=torch.ones(1, 2),
            rollout_routes=rollout,
            train_routes=train,
        )


def test_int16_routes_as_verl_ships_them():
    routes = torch.tensor([[[[3, 7]]]], dtype=torch.int16)
    zeros = torch.zeros(1, 1)
    found = mismatch_metrics(
        old_log_probs=zeros,
        rollout_log_probs=zeros,
        response_mask=torch.ones(1, 1),
        rollout_routes=routes,
        train_routes=routes.to(torch.uint8),
    )
    assert found["tim/router_flip_rate"] == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_equals_plain_sets(k, dtype):
    generator = torch.Generator().manual_seed(k)
    tokens, layers, experts = 40, 3, 11
    rollout = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens * layers)])
    train = rollout.clone()
    train[::3] = train[::3].flip(-1)  # another order
    train[1::5, -1] = experts  # another expert
    rollout, train = (x.reshape(2, tokens // 2, layers, k).to(dtype) for x in (rollout, train))
    found = compare(rollout.tolist(), train.tolist())
    typed = mismatch_metrics(
        old_log_probs=torch.zeros(2, tokens // 2),
        rollout_log_probs=torch.zeros(2, tokens // 2),
        response_mask=torch.ones(2, tokens // 2),
        rollout_routes=rollout,
        train_routes=train,
    )
    assert typed == found
    for layer in (None, *range(layers)):
        where = slice(None) if layer is None else layer
        pairs = list(
            zip(rollout[:, :, where].reshape(-1, k).tolist(), train[:, :, where].reshape(-1, k).tolist(), strict=True)
        )
        suffix = "" if layer is None else f"/layer_{layer}"
        flips = sum(set(a) != set(b) for a, b in pairs)
        order = sum(a != b and set(a) == set(b) for a, b in pairs)
        missing = sum(len(set(b) - set(a)) / k for a, b in pairs)
        assert found[f"tim/router_flip_rate{suffix}"] == pytest.approx(flips / len(pairs), rel=1e-12)
        assert found[f"tim/router_order_mismatch{suffix}"] == pytest.approx(order / len(pairs), rel=1e-12)
        assert found[f"tim/router_expert_mismatch{suffix}"] == pytest.approx(missing / len(pairs), rel=1e-12)
