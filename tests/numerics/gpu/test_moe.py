from __future__ import annotations

import pytest
import torch

from verl_tim.numerics import collection
from verl_tim.numerics import moe as reference
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import grouped_gemm, moe

from ..bits import same_bits
from .devices import DEVICE, close, mostly_equal, on_gpu, values
from .test_dispatch import LOADS, routes

EXPERTS, HIDDEN, INNER, TOP_K = 6, 48, 32, 2


def _weights(scale: float = 0.3):
    return (
        values(EXPERTS, 2 * INNER, HIDDEN, seed=2, scale=scale),
        values(EXPERTS, HIDDEN, INNER, seed=3, scale=scale),
    )


def _mixture(x, expert_TK, weight_TK, gate_up, down):
    """Differentiable, in the dtype of its operands, expert by expert."""
    out = torch.zeros_like(x)
    inner = down.shape[2]
    for expert in expert_TK.unique().tolist():
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        gate_up_R = x[token] @ gate_up[expert].t()
        h = torch.nn.functional.silu(gate_up_R[:, :inner]) * gate_up_R[:, inner:]
        out = out.index_add(0, token, (h @ down[expert].t()) * weight_TK[token, slot][:, None])
    return out


@pytest.mark.parametrize("name", list(grouped_gemm.schedules()))
@pytest.mark.parametrize("rows", [1, 20])
def test_rounds_like_the_reference(rows, name):
    x, router = values(rows, HIDDEN), values(EXPERTS, HIDDEN, seed=1)
    gate_up, down = _weights()
    expert_TK, weight_TK = moe.router(x, router, TOP_K, True)
    got = moe.experts(x, expert_TK, weight_TK, gate_up, down, schedule=name)
    want = reference.moe_reference(*(t.cpu() for t in (x, router, gate_up, down)), TOP_K, True)
    mostly_equal(got.cpu(), want)
    alone = moe.experts(x[:1], expert_TK[:1], weight_TK[:1], gate_up, down, schedule=name)
    assert same_bits(alone, got[:1])


@pytest.mark.parametrize("load", LOADS)
def test_gradients(load):
    x, grad, (gate_up, down) = values(9, HIDDEN), values(9, HIDDEN, seed=9), _weights()
    expert_TK = routes(9, EXPERTS, TOP_K, load)
    weight_TK = torch.softmax(values(9, TOP_K, seed=5, dtype=torch.float32), -1)
    got = moe.experts_backward(grad, x, expert_TK, weight_TK, gate_up, down)
    leaves = [t.double().requires_grad_() for t in (x, weight_TK, gate_up, down)]
    _mixture(leaves[0], expert_TK, *leaves[1:]).backward(grad.double())
    for tensor, leaf in zip(got, leaves, strict=True):
        close(tensor, leaf.grad, 2e-2)
    untouched = [e for e in range(EXPERTS) if not (expert_TK == e).any()]
    assert not got[2][untouched].any()
    assert not got[3][untouched].any()


def test_no_rows():
    gate_up, down = _weights()
    x = values(0, HIDDEN)
    expert_TK = torch.zeros(0, TOP_K, dtype=torch.int32, device=DEVICE)
    weight_TK = torch.zeros(0, TOP_K, device=DEVICE)
    assert moe.experts(x, expert_TK, weight_TK, gate_up, down).shape == (0, HIDDEN)
    grads = moe.experts_backward(x, x, expert_TK, weight_TK, gate_up, down)
    assert [tuple(g.shape) for g in grads] == [(0, HIDDEN), (0, TOP_K), tuple(gate_up.shape), tuple(down.shape)]
    assert not grads[2].any()


def test_refuses_bad_input():
    gate_up, down = _weights()
    expert_TK, weight_TK = routes(2, EXPERTS, TOP_K), torch.ones(2, TOP_K, device=DEVICE)
    with pytest.raises(ContractError, match="gate_up is"):
        moe.experts(values(2, HIDDEN), expert_TK, weight_TK, gate_up[:, 1:], down)
    with pytest.raises(ContractError, match="weight_TK is"):
        moe.experts(values(2, HIDDEN), expert_TK, weight_TK.bfloat16(), gate_up, down)
    with pytest.raises(ContractError, match="moe_intermediate_size=20"):
        moe.experts(values(2, HIDDEN), expert_TK, weight_TK, values(EXPERTS, 40, HIDDEN), values(EXPERTS, HIDDEN, 20))
    with pytest.raises(ContractError, match="unknown or forbidden"):
        moe.experts(values(2, HIDDEN), expert_TK, weight_TK, gate_up, down, schedule="fastest")


@on_gpu
@pytest.mark.parametrize("load", LOADS)
def test_all_schedules_and_batches_agree_at_the_size_of_the_30b(load):
    experts, hidden, inner, top_k = 128, 2048, 768, 8
    gate_up = torch.randn(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16) * 0.05
    down = torch.randn(experts, hidden, inner, device=DEVICE, dtype=torch.bfloat16) * 0.05
    x, expert_TK = values(600, hidden), routes(600, experts, top_k, load)
    weight_TK = torch.softmax(values(600, top_k, seed=5, dtype=torch.float32), -1)
    want = moe.experts(x, expert_TK, weight_TK, gate_up, down, schedule="torch")
    for name in grouped_gemm.schedules():
        assert same_bits(moe.experts(x, expert_TK, weight_TK, gate_up, down, schedule=name), want), name
    for rows in (1, 2, 33, 257):
        assert same_bits(moe.experts(x[:rows], expert_TK[:rows], weight_TK[:rows], gate_up, down), want[:rows]), rows
    grad = values(600, hidden, seed=9)
    first, again = (moe.experts_backward(grad, x, expert_TK, weight_TK, gate_up, down) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    leaves = [t.float().requires_grad_() for t in (x, weight_TK, gate_up, down)]
    _mixture(leaves[0], expert_TK, *leaves[1:]).backward(grad.float())
    for tensor, leaf in zip(first, leaves, strict=True):
        close(tensor, leaf.grad, 2e-2)


@on_gpu
def test_a_decode_step_in_a_graph():
    experts, hidden, inner, top_k = 128, 512, 256, 8
    gate_up = torch.randn(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16) * 0.05
    down = torch.randn(experts, hidden, inner, device=DEVICE, dtype=torch.bfloat16) * 0.05
    router, x = values(experts, hidden, seed=1), values(16, hidden)

    def step():
        return moe.experts(x, *moe.router(x, router, top_k, True), gate_up, down)

    step()
    graph = torch.cuda.CUDAGraph()
    with collection.paused(), torch.cuda.graph(graph):
        static = step()
    for seed in range(3):
        x.copy_(values(16, hidden, seed=seed))
        graph.replay()
        assert same_bits(static, step())
