from __future__ import annotations

import pytest
import torch

from verl_tim.numerics import embedding as op
from verl_tim.numerics.contract import interpreted_schedules
from verl_tim.numerics.gpu import embedding

from ..bits import same_bits
from .devices import DEVICE, mostly_equal, on_gpu, values


def _case(tokens: int, vocab: int, size: int):
    token_T = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    token_T[::3] = 7  # one token that is everywhere
    return token_T, values(tokens, size)


def _want(token_T, grad, vocab):
    zeros = torch.zeros(vocab, grad.shape[1], dtype=torch.float64, device=DEVICE)
    return zeros.index_add(0, token_T, grad.double())


@pytest.mark.parametrize("piece", [2, 4, 64])
@pytest.mark.parametrize("tokens", [0, 1, 61])
def test_gradient(tokens, piece, monkeypatch):
    monkeypatch.setattr(embedding, "_PIECE", piece)
    token_T, grad = _case(tokens, 12, 16)
    token_T[1::3] = 8
    got = embedding.embedding_backward(grad, token_T, 12)
    mostly_equal(got, _want(token_T, grad, 12).bfloat16())


@pytest.mark.parametrize("padding_idx", [None, 7])
def test_autograd_takes_it_and_leaves_out_the_padding_row(padding_idx):
    token_T, grad = _case(30, 12, 16)
    weight = values(12, 16, seed=1).requires_grad_()
    with interpreted_schedules():
        out = op.embedding(token_T, weight, padding_idx)
        out.backward(grad)
    want = embedding.embedding_backward(grad, token_T, 12)
    if padding_idx is not None:
        assert want[padding_idx].any()
        want[padding_idx] = 0
    assert same_bits(out.detach(), weight.detach()[token_T])
    assert same_bits(weight.grad, want)


@on_gpu
@pytest.mark.parametrize("tokens", [700, 20_000])
def test_gradient_is_deterministic_and_rounded_once(tokens):
    token_T, grad = _case(tokens, 5000, 1024)
    first = embedding.embedding_backward(grad, token_T, 5000)
    assert all(same_bits(embedding.embedding_backward(grad, token_T, 5000), first) for _ in range(5))
    mostly_equal(first, _want(token_T, grad, 5000).bfloat16())
