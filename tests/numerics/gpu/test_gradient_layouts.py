"""A gradient arrives in whatever layout autograd has it: a sum's is expanded, with strides of 0."""

from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.activation import swiglu
from verl_tim.numerics.attention import varlen_attention
from verl_tim.numerics.contract import interpreted_schedules
from verl_tim.numerics.embedding import embedding
from verl_tim.numerics.head import token_log_probs
from verl_tim.numerics.linear import linear
from verl_tim.numerics.moe import experts, router
from verl_tim.numerics.norm import add_rms_norm, rms_norm
from verl_tim.numerics.rope import qk_norm_rope

from ..bits import same_bits
from .devices import DEVICE, values, weights

pytest.importorskip("triton")


def _rope(q, k, wq, wk):
    table = values(2, 5, 8, seed=9, dtype=torch.float32)
    return qk_norm_rope(q, k, (wq, wk), 1e-6, table[0], table[1])


def _attention(q, k, v):
    return (varlen_attention(q, k, v, torch.tensor([0, 3, 5], device=DEVICE)),)


def _moe(x, gate, gate_up, down):
    return (experts(x, router(x, gate, 2, True), gate_up, down),)


def _log_probs(hidden, weight):
    return token_log_probs(hidden, weight, torch.arange(5, device=DEVICE), 0.7, with_entropy=True)


OPS = {
    "rms_norm": (lambda x, w: (rms_norm(x, w, 1e-6),), ((5, 16), (16,))),
    "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w, 1e-6), ((5, 16), (5, 16), (16,))),
    "swiglu": (lambda gate, up: (swiglu(gate, up),), ((5, 16), (5, 16))),
    "qk_norm_rope": (_rope, ((5, 4, 16), (5, 2, 16), (16,), (16,))),
    "embedding": (lambda w: (embedding(torch.tensor([1, 2, 1], device=DEVICE), w),), ((5, 16),)),
    "linear": (lambda x, w, b: (linear(x, w, b),), ((5, 16), (8, 16), (8,))),
    "attention": (_attention, ((5, 4, 16), (5, 2, 16), (5, 2, 16))),
    "experts": (_moe, ((5, 16), (6, 16), (6, 32, 16), (6, 16, 16))),
    "log_probs": (_log_probs, ((5, 16), (50, 16))),
}


@pytest.mark.parametrize("op", OPS)
def test_an_expanded_gradient_is_the_same_as_a_whole_one(op):
    run, shapes = OPS[op]

    def gradients(of):
        leaves = [
            (weights(*size) if len(size) == 1 else values(*size, seed=seed)).requires_grad_()
            for seed, size in enumerate(shapes)
        ]
        with interpreted_schedules():
            outputs = run(*leaves)
            torch.autograd.backward(outputs, [of(output) for output in outputs])
        return [leaf.grad for leaf in leaves]

    want = gradients(torch.ones_like)
    for got, whole in zip(gradients(lambda y: y.new_ones(()).expand(y.shape)), want, strict=True):
        assert same_bits(got, whole)
