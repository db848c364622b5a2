from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.linear import PreparedLinear, linear, linear_reference

from .bits import DTYPES, close_to_double, randn, same_bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (13, 37, 5), (40, 96, 200), (3, 256, 768)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_its_reference(rows, inputs, outputs, bias, dtype):
    x, w = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    b = randn(outputs, dtype=dtype, seed=2) if bias else None
    got = linear(x, w, b)
    # Some machines' fp32 GEMM depends on the number of outputs too. Both sides of a run call it with the same number,
    # so that is no mismatch, but there the reference, which takes 64 outputs at a time, has other bits.
    x_8K, w_PK = (torch.nn.functional.pad(t.float(), (0, 0, 0, -len(t) % n)) for t, n in ((x, 8), (w, 64)))
    tiles = torch.cat([torch.mm(x_8K, tile.t().contiguous()) for tile in w_PK.split(64)], dim=1)
    if same_bits(torch.mm(x_8K, w_PK.t()), tiles):
        assert same_bits(got, linear_reference(x, w, b))
    want = x.double() @ w.double().t() + (0 if b is None else b.double())
    close_to_double(got, want, dtype)


@given(st.integers(1, 130), st.integers(0, 130), st.integers(1, 140), st.integers(1, 150))
@settings(max_examples=60)
def test_a_row_does_not_depend_on_its_company(rows, first, inputs, outputs):
    x, w = randn(131, inputs), randn(outputs, inputs, seed=1)
    part = slice(min(first, 131 - rows), min(first, 131 - rows) + rows)
    assert same_bits(linear(x[part], w), linear(x, w)[part])


def test_unaligned_and_strided_operands_change_nothing():
    x, w = randn(24, 64), randn(70, 64, seed=1)
    want = linear(x, w)
    shifted = torch.cat([torch.zeros(3), w.flatten()])[3:].view(70, 64)
    assert shifted.data_ptr() % 64 != 0
    assert same_bits(linear(x, shifted), want)
    assert same_bits(linear(x.t().contiguous().t(), w), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepared_and_fused_equal_plain(dtype):
    x = randn(16, 48, dtype=dtype)
    parts = [randn(n, 48, dtype=dtype, seed=n) for n in (64, 32, 20)]
    biases = [randn(n, dtype=dtype, seed=n + 1) for n in (64, 32, 20)]
    prepared = PreparedLinear([64, 32, 20], 48, dtype=dtype, device=torch.device("cpu"), bias=True)
    for i, (w, b) in enumerate(zip(parts, biases, strict=True)):
        prepared.weight_view(i).copy_(w)
        prepared.bias_view(i).copy_(b)
    for got, w, b in zip(prepared(x).split([64, 32, 20], 1), parts, biases, strict=True):
        assert same_bits(got, linear(x, w, b))


def test_autocast_outside_changes_nothing():
    x, w = randn(8, 64).requires_grad_(), randn(64, 64, seed=1).requires_grad_()
    want = linear(x, w)
    want.sum().backward()
    grads = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear(x, w)
        got.sum().backward()
    assert same_bits(got.detach(), want.detach())
    assert same_bits(x.grad, grads[0])
    assert same_bits(w.grad, grads[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype):
    x, w, b = randn(13, 37, dtype=dtype), randn(21, 37, dtype=dtype, seed=1), randn(21, dtype=dtype, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    doubles = [t.double().requires_grad_() for t in (x, w, b)]
    g = randn(13, 21, dtype=dtype, seed=3)
    linear(*leaves).backward(g)
    (doubles[0] @ doubles[1].t() + doubles[2]).backward(g.double())
    for leaf, double in zip(leaves, doubles, strict=True):
        assert leaf.grad.dtype == dtype
        close_to_double(leaf.grad, double.grad, dtype)


def test_float32_output_is_not_rounded():
    x, w = randn(8, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16, seed=1)
    wide = linear(x, w, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert same_bits(wide.bfloat16(), linear(x, w))
    assert not torch.equal(wide, wide.bfloat16().float())


def test_refuses_other_dtypes_and_shapes():
    with pytest.raises(ContractError, match=r"weight is torch\.bfloat16; all must be"):
        linear(randn(2, 4), randn(3, 4, dtype=torch.bfloat16))
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(ContractError, match=r"all must be torch\.float32 or torch\.bfloat16"):
            linear(randn(2, 4).to(dtype), randn(3, 4).to(dtype))
    for size in (1, 2):
        with pytest.raises(ContractError, match="does not fit 3 outputs"):
            linear(randn(2, 4), randn(3, 4), randn(size))
    with pytest.raises(ContractError, match="does not fit"):
        linear(randn(2, 4), randn(3, 5))
