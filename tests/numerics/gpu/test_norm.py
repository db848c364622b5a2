from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import norm
from verl_tim.numerics.norm import rms_norm as cpu_rms_norm

from ..bits import same_bits
from .devices import DEVICE, close, mostly_equal, on_gpu, values, weights

EPS = 1e-6
SIZES = (1024, 2048, 2560, 4096, 5120, 64, 80, 96, 128, 256)


def _double_gradients(x, weight, grad):
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight
    y.backward(grad.double())
    return x.grad, weight.grad


@pytest.mark.parametrize("size", [16, 80, 130, 256])
def test_rounds_like_the_reference(size):
    x, weight = values(7, size), weights(size)
    got, none = norm.rms_norm(x, weight, EPS)
    assert none is None
    mostly_equal(got, cpu_rms_norm(x, weight, EPS))


def test_residual_sum_is_rounded_then_normalised():
    x, residual, weight = values(5, 96), values(5, 96, seed=1), weights(96)
    got, total = norm.rms_norm(x, weight, EPS, residual)
    assert same_bits(total, x + residual)
    assert same_bits(got, norm.rms_norm(total, weight, EPS)[0])


def test_strided_rows_and_out():
    wide, weight = values(6, 200), weights(96)
    view = wide[:, 40:136]
    out = torch.zeros(6, 300, dtype=torch.bfloat16, device=DEVICE)[:, 100:196]
    got, _ = norm.rms_norm(view, weight, EPS, out=out)
    assert got is out
    assert same_bits(out, norm.rms_norm(view.contiguous(), weight, EPS)[0])


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_gradients(rows, with_residual):
    x, weight, grad = values(rows, 80), weights(80), values(rows, 80, seed=2)
    other = values(rows, 80, seed=3) if with_residual else None
    grad_x, grad_weight = norm.rms_norm_backward(grad, x, weight, EPS, other)
    want_x, want_weight = _double_gradients(x, weight, grad)
    close(grad_x, want_x if other is None else want_x + other.double())
    close(grad_weight, want_weight)


def test_no_rows():
    x, weight = values(0, 64), weights(64)
    assert norm.rms_norm(x, weight, EPS)[0].shape == (0, 64)
    assert not norm.rms_norm_backward(x, x, weight, EPS)[1].any()


def test_refuses_what_it_does_not_cover():
    with pytest.raises(ContractError, match=r"x is torch\.float32"):
        norm.rms_norm(values(2, 64).float(), weights(64), EPS)
    with pytest.raises(ContractError, match="even size"):
        norm.rms_norm(values(2, 63), weights(63), EPS)
    with pytest.raises(ContractError, match="weight is"):
        norm.rms_norm(values(2, 64), weights(32), EPS)
    with pytest.raises(ContractError, match="contiguous there"):
        norm.rms_norm(values(64, 64).t(), weights(64), EPS)


@on_gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_on_every_schedule(size, monkeypatch):
    x, residual, weight = values(67, size), values(67, size, seed=1), weights(size)
    want, total = norm.rms_norm(x, weight, EPS, residual)
    for row in (0, 3, 66):
        assert same_bits(norm.rms_norm(x[row : row + 1], weight, EPS, residual[row : row + 1])[0], want[row : row + 1])
    unaligned = torch.empty(67 * size + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(67, size).copy_(total)
    assert same_bits(norm.rms_norm(unaligned, weight, EPS)[0], want)
    log_half, _ = norm._tile(size)
    for rows, warps in ((1, 4), (2, 1), (4, 8), (1, 16), (8, 2)):
        monkeypatch.setattr(norm, "_tile", lambda _size, rows=rows: (log_half, rows))
        monkeypatch.setattr(norm, "_FORWARD_WARPS", warps)
        assert same_bits(norm.rms_norm(total, weight, EPS)[0], want), (rows, warps)
        assert same_bits(norm.rms_norm(x, weight, EPS, residual)[0], want), (rows, warps)


@on_gpu
@pytest.mark.parametrize("size", SIZES)
def test_many_rows(size):
    x, weight, grad = values(5000, size), weights(size), values(5000, size, seed=2)
    mostly_equal(norm.rms_norm(x, weight, EPS)[0], cpu_rms_norm(x, weight, EPS))
    first, again = (norm.rms_norm_backward(grad, x, weight, EPS) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    for got, want in zip(first, _double_gradients(x, weight, grad), strict=True):
        close(got, want)
