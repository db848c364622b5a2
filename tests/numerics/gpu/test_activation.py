from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.activation import swiglu_inference
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import activation

from ..bits import same_bits
from .devices import close, mostly_equal, on_gpu, values


@pytest.mark.parametrize("columns", [20, 1024 + 24])
def test_rounds_like_the_reference(columns):
    fused = values(3, 2 * columns, scale=3.0)
    gate, up = fused[:, :columns], fused[:, columns:]
    got = activation.swiglu(gate, up)
    mostly_equal(got, swiglu_inference(gate, up))
    assert same_bits(activation.swiglu(gate.contiguous(), up.contiguous()), got)


def test_extreme_gates():
    gate = torch.tensor([[-1e30, -200.0, -88.5, 0.0, 88.5, 1e30]]).bfloat16()
    up = torch.ones_like(gate)
    device = values(1).device
    got = activation.swiglu(gate.to(device), up.to(device)).cpu()
    assert torch.isfinite(got).all()
    assert torch.equal(got[0, 3:], gate[0, 3:])
    assert got[0, :3].abs().max() < 1e-30


def test_gradients():
    gate, up, grad = values(4, 40, scale=3.0), values(4, 40, seed=1), values(4, 40, seed=2)
    got = activation.swiglu_backward(grad, gate, up)
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    (torch.nn.functional.silu(leaves[0]) * leaves[1]).backward(grad.double())
    close(got[0], leaves[0].grad)
    close(got[1], leaves[1].grad)


def test_refuses_float32():
    with pytest.raises(ContractError, match="gate is"):
        activation.swiglu(values(2, 8).float(), values(2, 8))


@on_gpu
def test_bits_do_not_depend_on_the_place():
    gate, up = values(300, 6144, scale=3.0), values(300, 6144, seed=1)
    want = activation.swiglu(gate, up)
    assert same_bits(activation.swiglu(gate[7:8, 5:1000], up[7:8, 5:1000]), want[7:8, 5:1000])
    mostly_equal(want.cpu(), swiglu_inference(gate.cpu(), up.cpu()))
