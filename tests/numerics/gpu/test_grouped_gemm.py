from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import grouped_gemm
from verl_tim.numerics.gpu.activation import swiglu
from verl_tim.numerics.gpu.dispatch import dispatch
from verl_tim.numerics.linear import linear

from ..bits import same_bits
from .devices import DEVICE, mostly_equal, on_gpu, values
from .test_dispatch import LOADS, routes


def per_expert(x_RK, weight_ENK, plan):
    """Each expert's rows alone, in a GEMM of at least 128 rows, so that no library walks K in pieces."""
    out, start = [], 0
    for expert, end in enumerate(plan.end_E.tolist()):
        if end > start:
            rows = torch.nn.functional.pad(x_RK[start:end], (0, 0, 0, max(0, 128 - end + start)))
            product = linear(rows, weight_ENK[expert]) if DEVICE == "cpu" else rows @ weight_ENK[expert].t()
            out.append(product[: end - start])
        start = end
    return torch.cat(out)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", list(grouped_gemm.schedules()))
def test_every_schedule_equals_one_linear_per_expert(name, load):
    expert_TK = routes(9, 6, 2, load)
    plan = dispatch(expert_TK, 6)
    x_RK = plan.gather(values(9, 48))
    weight = values(6, 40, 48, seed=1, scale=0.3)
    mostly_equal(grouped_gemm.schedules()[name](x_RK, weight, plan), per_expert(x_RK, weight, plan))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("weight_left", [False, True])
def test_gather_swiglu_and_scatter_are_schedules(weight_left, tma):
    tokens, experts, inner = 11, 5, 40
    config = grouped_gemm.StreamConfig(columns=32, depth=32, stages=2, warps=4, weight_left=weight_left, tma=tma)
    plan = dispatch(routes(tokens, experts, 2), experts, block=16)
    x, weight = values(tokens, 48), values(experts, 2 * inner, 48, seed=1, scale=0.3)
    gate_up = grouped_gemm.stream(plan.gather(x), weight, plan, config=config)
    want = swiglu(gate_up[:, :inner], gate_up[:, inner:])
    got = grouped_gemm.stream(x, weight, plan, swiglu=True, gather=True, config=config)
    assert same_bits(got, want)
    scattered = grouped_gemm.stream(x, weight, plan, swiglu=True, gather=True, scatter=True, config=config)
    assert same_bits(scattered, want[plan.row_TK.flatten().long()])


def test_weight_gradient_of_an_expert_without_rows_is_zero():
    plan = dispatch(routes(6, 6, 2, "one"), 6)
    x, grad = values(12, 16), values(12, 24, seed=1)
    got = grouped_gemm.grouped_weight_grad(grad, x, plan)
    assert got.shape == (6, 24, 16)
    assert got[:2].any()
    assert not got[2:].any()


def test_a_forbidden_schedule_is_not_chosen(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "_forbidden", set())
    name = grouped_gemm.choose(64, 128)
    assert name.startswith("stream")
    grouped_gemm.forbid(name)
    assert name not in grouped_gemm.schedules()
    assert grouped_gemm.choose(64, 128) != name
    for other in grouped_gemm.schedules():
        grouped_gemm.forbid(other)
    with pytest.raises(ContractError, match="every schedule is forbidden"):
        grouped_gemm.choose(64, 128)
    with pytest.raises(ContractError, match="no schedule 'x'"):
        grouped_gemm.forbid("x")


def test_stream_needs_tiles():
    with pytest.raises(ContractError, match="no tiles"):
        grouped_gemm.stream(values(4, 16), values(6, 8, 16), dispatch(routes(2, 6, 2), 6))


@on_gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tokens", [1, 5, 32, 256, 700])
@pytest.mark.parametrize(("columns", "depth"), [(1536, 2048), (2048, 768), (96, 80)])
def test_bits_on_the_device(columns, depth, tokens, load):
    plan = dispatch(routes(tokens, 128, 8, load), 128)
    x_RK = plan.gather(values(tokens, depth))
    weight = torch.randn(128, columns, depth, device=DEVICE, dtype=torch.bfloat16) * 0.05
    want = per_expert(x_RK, weight, plan)
    for name, run in grouped_gemm.schedules().items():
        assert same_bits(run(x_RK, weight, plan), want), name
