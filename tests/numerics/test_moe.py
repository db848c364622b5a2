from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.numerics import grouped_linear
from verl_tim.numerics.contract import COLUMN_FLOOR, ROW_FLOOR, ContractError, pad_dim0
from verl_tim.numerics.grouped_linear import dispatch, grouped_linear_reference, grouped_matmul
from verl_tim.numerics.moe import Routes, _pad_columns, experts, moe_inference, moe_reference, route_logits, router

from .bits import DTYPES, close_to_double, randn, same_bits

EXPERTS, HIDDEN, INNER, TOP_K = 6, 48, 20, 2
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _weights(dtype: torch.dtype):
    return (
        randn(EXPERTS, HIDDEN, dtype=dtype, seed=1),
        randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, seed=2, scale=0.3),
        randn(EXPERTS, HIDDEN, INNER, dtype=dtype, seed=3, scale=0.3),
    )


def _block(x, gate, gate_up, down, normalise=True):
    return experts(x, router(x, gate, TOP_K, normalise), gate_up, down)


@both_dtypes
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_equals_its_reference(rows, normalise, dtype):
    x = randn(rows, HIDDEN, dtype=dtype)
    weights = _weights(dtype)
    got = _block(x, *weights, normalise)
    assert same_bits(got, moe_reference(x, *weights, TOP_K, normalise))
    prepared = pad_dim0(weights[0].float(), COLUMN_FLOOR)
    lean = moe_inference(
        x, prepared, EXPERTS, _pad_columns(weights[1]), _pad_columns(weights[2]), INNER, TOP_K, normalise
    )
    assert same_bits(lean, got)


def _double(x, gate, gate_up, down, expert_TK):
    """Dense float64 mixture with the given choice of experts."""
    p = torch.softmax(x @ gate.t(), -1).gather(1, expert_TK)
    p = p / p.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for slot in range(TOP_K):
        e = expert_TK[:, slot]
        g, u = torch.einsum("td,tjd->tj", x, gate_up[e]).chunk(2, -1)
        y = torch.einsum("ti,tdi->td", torch.nn.functional.silu(g) * u, down[e])
        out = out + p[:, slot, None] * y
    return out


@both_dtypes
def test_values_and_gradients_against_double(dtype):
    x, weights, g = randn(33, HIDDEN, dtype=dtype), _weights(dtype), randn(33, HIDDEN, dtype=dtype, seed=9)
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    doubles = [t.double().requires_grad_() for t in (x, *weights)]
    got = _block(*leaves)
    got.backward(g)
    want = _double(*doubles, router(x, weights[0], TOP_K, True).expert_TK)
    want.backward(g.double())
    close_to_double(got, want, dtype)
    for leaf, double in zip(leaves, doubles, strict=True):
        close_to_double(leaf.grad, double.grad, dtype)


def test_an_expert_without_tokens_has_zero_gradient():
    x, (_, gate_up, down) = randn(5, HIDDEN), _weights(torch.float32)
    gate_up.requires_grad_()
    routes = Routes(torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5))
    experts(x, routes, gate_up, down).sum().backward()
    assert gate_up.grad[:2].abs().sum() > 0
    assert not gate_up.grad[2:].any()


@both_dtypes
def test_no_rows_give_no_rows_and_no_gradient(dtype):
    leaves = [t.requires_grad_() for t in (randn(0, HIDDEN, dtype=dtype), *_weights(dtype))]
    out = _block(*leaves)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any() for leaf in leaves)


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(3, 8)
    logits[1, 5] = logits[1, 3] = 2.0
    routes = route_logits(logits, 3, True)
    assert routes.expert_TK.tolist() == [[0, 1, 2], [3, 5, 0], [0, 1, 2]]
    assert torch.allclose(routes.weight_TK.sum(-1), torch.ones(3))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=80)
def test_dispatch_gives_every_pair_its_own_row(tokens, num_experts, top_k, skewed, seed):
    generator = torch.Generator().manual_seed(seed)
    expert = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    if skewed:
        expert.fill_(num_experts - 1)
    plan = dispatch(expert, num_experts)
    rows = plan.row_TK.flatten()
    assert rows.unique().numel() == rows.numel()
    assert all(start % ROW_FLOOR == 0 for start in plan.starts)
    assert len(plan.starts) == num_experts + 1
    segment = torch.bucketize(rows, torch.tensor(plan.starts[1:]), right=True)
    assert torch.equal(segment, expert.flatten())
    assert plan.num_rows <= 2 * (rows.numel() + ROW_FLOOR * num_experts)
    x = torch.randn(tokens, 5, generator=generator)
    assert torch.equal(plan.slots(plan.gather(x)), x[:, None].expand(-1, top_k, -1))


@both_dtypes
def test_even_and_skewed_loads_are_schedules(dtype, monkeypatch):
    """The same tokens in a batch that is dispatched evenly, and in one that is not."""
    x, weights = randn(64, HIDDEN, dtype=dtype), _weights(dtype)
    want = _block(x, *weights)
    crowd = torch.cat([x, x[:1].expand(300, -1)])  # one expert gets almost everything
    plan = dispatch(router(crowd, weights[0], TOP_K, True).expert_TK, EXPERTS)
    assert plan.capacity is None, "this load must take the other schedule"
    assert dispatch(router(x, weights[0], TOP_K, True).expert_TK, EXPERTS).capacity is not None
    assert same_bits(_block(crowd, *weights)[:64], want)
    for leaf in (crowd, *weights):
        leaf.requires_grad_()
    _block(crowd, *weights).sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in (crowd, *weights))


@both_dtypes
def test_grouped_linear_equals_its_reference(dtype):
    x, weight = randn(20, HIDDEN, dtype=dtype), _weights(dtype)[1]
    expert = torch.randint(0, EXPERTS, (20, TOP_K), generator=torch.Generator().manual_seed(3))
    plan = dispatch(expert, EXPERTS)
    y = grouped_matmul(plan.gather(x.float()), _pad_columns(weight), plan)[:, : 2 * INNER].to(dtype)
    assert same_bits(plan.slots(y), grouped_linear_reference(x, expert, weight))


def test_batched_equals_one_expert_at_a_time():
    x, weight = randn(EXPERTS * 16, HIDDEN), _pad_columns(_weights(torch.float32)[1])
    starts = [16 * e for e in range(EXPERTS + 1)]
    pairs = torch.arange(EXPERTS * 16).view(-1, 1)
    batched = grouped_linear.Dispatch(pairs, starts, 16, EXPERTS * 16)
    single = grouped_linear.Dispatch(pairs, starts, None, EXPERTS * 16)
    assert same_bits(grouped_matmul(x, weight, batched), grouped_matmul(x, weight, single))


def test_refuses_mixed_dtypes():
    x, (gate, gate_up, down) = randn(5, HIDDEN), _weights(torch.float32)
    with pytest.raises(ContractError, match="moe: x is"):
        experts(x, router(x, gate, TOP_K, True), gate_up.bfloat16(), down)
