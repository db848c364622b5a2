"""norm, rope, activation, embedding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.numerics.activation import swiglu, swiglu_inference, swiglu_reference
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.embedding import embedding, embedding_reference
from verl_tim.numerics.norm import rms_norm, rms_norm_inference, rms_norm_reference
from verl_tim.numerics.rope import RopeTable, apply_rope, rope_reference

from .bits import DTYPES, close_to_double, randn, same_bits

FREQUENCIES = [10000.0 ** (-i / 16) for i in range(16)]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@both_dtypes
@pytest.mark.parametrize("width", [16, 64, 100, 1030])
def test_rms_norm_equals_its_reference(width, dtype):
    x, w = randn(11, width, dtype=dtype, scale=3), randn(width, dtype=dtype, seed=1)
    got = rms_norm(x, w, 1e-6)
    assert same_bits(got, rms_norm_reference(x, w, 1e-6))
    d = x.double()
    close_to_double(got, d * (d.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double(), dtype)


def test_rms_norm_on_heads_equals_rows():
    x, w = randn(5, 3, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16, seed=1)
    assert same_bits(rms_norm_inference(x, w.expand(3, 32), 1e-6), rms_norm_reference(x, w, 1e-6))


@both_dtypes
def test_rms_norm_gradients(dtype):
    x, w, g = (
        randn(2, 5, 32, dtype=dtype, scale=2),
        randn(32, dtype=dtype, seed=1),
        randn(2, 5, 32, dtype=dtype, seed=2),
    )
    leaves, doubles = [t.clone().requires_grad_() for t in (x, w)], [t.double().requires_grad_() for t in (x, w)]
    rms_norm(*leaves, 1e-6).backward(g)
    d = doubles[0]
    (d * (d.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * doubles[1]).backward(g.double())
    for leaf, double in zip(leaves, doubles, strict=True):
        close_to_double(leaf.grad, double.grad, dtype)


@both_dtypes
@pytest.mark.parametrize("size", [(1, 1), (3, 37), (9, 64)])
def test_swiglu_equals_its_reference(size, dtype):
    gate, up = randn(*size, dtype=dtype, scale=5), randn(*size, dtype=dtype, seed=1)
    got = swiglu(gate, up)
    assert same_bits(got, swiglu_reference(gate, up))
    close_to_double(got, torch.nn.functional.silu(gate.double()) * up.double(), dtype)


@given(st.integers(1, 300), st.integers(0, 40))
@settings(max_examples=40)
def test_swiglu_does_not_depend_on_the_position_in_memory(size, offset):
    gate, up = randn(400, scale=5), randn(400, seed=1)
    part = slice(offset, offset + size)
    assert same_bits(swiglu_inference(gate[part], up[part]), swiglu_inference(gate, up)[part])


def test_swiglu_is_finite_for_any_gate():
    gate = torch.tensor([-1e30, -200.0, -89.0, 0.0, 89.0, 1e30])
    assert torch.isfinite(swiglu_inference(gate, torch.ones(6))).all()


@both_dtypes
def test_swiglu_gradients(dtype):
    gate, up, g = (randn(7, 33, dtype=dtype, seed=i, scale=2) for i in range(3))
    leaves, doubles = (
        [t.clone().requires_grad_() for t in (gate, up)],
        [t.double().requires_grad_() for t in (gate, up)],
    )
    swiglu(*leaves).backward(g)
    (torch.nn.functional.silu(doubles[0]) * doubles[1]).backward(g.double())
    for leaf, double in zip(leaves, doubles, strict=True):
        close_to_double(leaf.grad, double.grad, dtype)


@both_dtypes
@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_rope_equals_its_reference(scaling, dtype):
    position = torch.tensor([0, 1, 2, 500, 1023, 1024, 1999])
    x = randn(7, 3, 32, dtype=dtype)
    table = RopeTable(FREQUENCIES, scaling, 2000, "cpu")
    got = apply_rope(x, *table.at(position, 2000))
    assert same_bits(got, rope_reference(x, FREQUENCIES, scaling, position))
    angle = position[:, None].double() * torch.tensor(FREQUENCIES, dtype=torch.float32).double()
    x1, x2 = x.double().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    want = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1) * scaling
    close_to_double(got, want, torch.bfloat16)  # float32 angles of large positions


def test_rope_table_does_not_depend_on_how_it_grew():
    grown, whole = RopeTable(FREQUENCIES, 1.0, 5000, "cpu"), RopeTable(FREQUENCIES, 1.0, 5000, "cpu")
    everywhere = torch.arange(5000)
    for limit in (1, 7, 1025, 1026, 3000):
        grown.at(torch.tensor([limit - 1]), limit)
    for got, want in zip(grown.at(everywhere, 5000), whole.at(everywhere, 5000), strict=True):
        assert same_bits(got, want)


def test_rope_gradient_is_the_inverse_rotation():
    table = RopeTable(FREQUENCIES, 1.0, 100, "cpu")
    cos, sin = table.at(torch.arange(7), 7)
    x = randn(7, 2, 32).requires_grad_()
    g = randn(7, 2, 32, seed=1)
    apply_rope(x, cos, sin).backward(g)
    close_to_double(apply_rope(x.grad, cos, sin), g.double(), torch.float32)


def test_rope_survives_growth_in_inference_mode():
    table = RopeTable(FREQUENCIES, 1.0, 100, "cpu")
    with torch.inference_mode():
        table.at(torch.arange(7), 7)
    x = randn(7, 2, 32).requires_grad_()
    apply_rope(x, *table.at(torch.arange(7), 7)).sum().backward()
    assert x.grad is not None


def test_rope_refuses_rounded_tables_and_long_positions():
    table = RopeTable(FREQUENCIES, 1.0, 100, "cpu")
    with pytest.raises(ContractError, match="max_position_embeddings=100"):
        table.at(torch.tensor([100]), 101)
    cos, sin = table.at(torch.arange(7), 7)
    with pytest.raises(ContractError, match="must stay float32"):
        apply_rope(randn(7, 2, 32), cos.bfloat16(), sin.bfloat16())


@both_dtypes
def test_embedding_equals_its_reference(dtype):
    weight, token = randn(20, 8, dtype=dtype), torch.tensor([3, 3, 0, 19])
    assert same_bits(embedding(token, weight), embedding_reference(token, weight))


def test_embedding_leaves_out_the_padding_row():
    weight, token = randn(20, 8).requires_grad_(), torch.tensor([3, 3, 0, 19])
    embedding(token, weight, 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum(1).nonzero().flatten().tolist() == [0, 19]
