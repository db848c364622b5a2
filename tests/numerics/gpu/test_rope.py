from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import norm, rope
from verl_tim.numerics.rope import apply_rope

from ..bits import same_bits
from .devices import DEVICE, close, mostly_equal, on_gpu, values, weights

EPS = 1e-6
HEAD_DIMS = (64, 80, 96, 128, 256)


class _Case:
    """A fused qkv row, tables and weights."""

    def __init__(self, tokens: int, q_heads: int, kv_heads: int, head_dim: int, qk_norm: bool = True) -> None:
        qkv = values(tokens, q_heads + 2 * kv_heads, head_dim)
        self.q, self.k, self.v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
        angle = values(tokens, head_dim // 2, seed=5, scale=20.0, dtype=torch.float32)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.weights = (weights(head_dim, seed=1), weights(head_dim, seed=2)) if qk_norm else (None, None)

    def run(self, **options):
        return rope.qk_norm_rope(self.q, self.k, *self.weights, EPS, self.cos, self.sin, **options)

    def unfused(self):
        """`norm.rms_norm` per head, then the reference rotation."""
        pair = (self.q, self.k)
        if self.weights[0] is not None:
            pair = tuple(norm.rms_norm(x.contiguous(), w, EPS)[0] for x, w in zip(pair, self.weights, strict=True))
        return tuple(apply_rope(x, self.cos, self.sin) for x in pair)

    def pages(self, size: int = 4):
        tokens, kv_heads, head_dim = self.k.shape
        count = tokens // size + 2
        pools = torch.zeros(2, count, size, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        slot = torch.randperm(count * size, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
        return pools[0], pools[1], slot


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (6, 3, 80)])
def test_fused_equals_unfused(q_heads, kv_heads, head_dim, qk_norm):
    case = _Case(5, q_heads, kv_heads, head_dim, qk_norm)
    got, want = case.run(), case.unfused()
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


def test_several_groups_of_heads_per_program(monkeypatch):
    case = _Case(5, 40, 2, 64)
    want = case.run()
    monkeypatch.setattr(rope, "MANY_TOKENS", 5)
    got = case.run()
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_writes_keys_and_values_into_pages(slot_dtype):
    case = _Case(6, 4, 2, 16)
    k_pages, v_pages, slot = case.pages()
    q, k = case.run(v_THD=case.v, kv_write=(k_pages, v_pages, slot.to(slot_dtype)))
    assert same_bits(k_pages.flatten(0, 1)[slot], k)
    assert same_bits(v_pages.flatten(0, 1)[slot], case.v)
    assert int((k_pages.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == 6
    lean, none = case.run(v_THD=case.v, kv_write=(k_pages, v_pages, slot), keep_k=False)
    assert none is None
    assert same_bits(lean, q)


LAYOUTS = [(6, 3, 24), (14, 2, 64), (4, 4, 80), (8, 1, 96), (16, 8, 128), (8, 4, 256)]


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), LAYOUTS)
def test_gradients(q_heads, kv_heads, head_dim, qk_norm):
    case = _Case(5, q_heads, kv_heads, head_dim, qk_norm)
    grads = values(5, q_heads, head_dim, seed=7), values(5, kv_heads, head_dim, seed=8)
    got = rope.qk_norm_rope_backward(*grads, case.q, case.k, *case.weights, EPS, case.cos, case.sin)
    for index, x in enumerate((case.q, case.k)):
        x, weight = x.double().requires_grad_(), case.weights[index]
        y = x
        if weight is not None:
            weight = weight.double().requires_grad_()
            y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight
        y1, y2 = y.chunk(2, -1)
        cos, sin = case.cos[:, None].double(), case.sin[:, None].double()
        torch.cat([y1 * cos - y2 * sin, y2 * cos + y1 * sin], -1).backward(grads[index].double())
        close(got[index], x.grad)
        if weight is None:
            assert got[2 + index] is None
        else:
            close(got[2 + index], weight.grad)


def test_refuses_what_it_does_not_cover():
    case = _Case(3, 2, 1, 16)
    case.cos = case.cos.bfloat16()
    with pytest.raises(ContractError, match=r"cos is torch\.bfloat16"):
        case.run()
    case = _Case(3, 2, 1, 16)
    with pytest.raises(ContractError, match="needs v_THD"):
        case.run(kv_write=case.pages())
    case.weights = (case.weights[0], None)
    with pytest.raises(ContractError, match="must both be given"):
        case.run()


@on_gpu
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(16, 8), (32, 4), (14, 2), (6, 3)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_on_the_device(head_dim, q_heads, kv_heads, monkeypatch):
    case = _Case(50, q_heads, kv_heads, head_dim)
    q, k = case.run()
    for got, want in zip((q, k), case.unfused(), strict=True):
        assert same_bits(got, want)
    k_pages, v_pages, slot = case.pages(16)
    monkeypatch.setattr(rope, "MANY_TOKENS", 1)
    for got, want in zip(case.run(), (q, k), strict=True):
        assert same_bits(got, want)
    paged, _ = case.run(v_THD=case.v, kv_write=(k_pages, v_pages, slot), keep_k=False)
    assert same_bits(paged, q)
    assert same_bits(k_pages.flatten(0, 1)[slot], k)
    assert same_bits(v_pages.flatten(0, 1)[slot], case.v)
    one = slice(7, 8)
    alone = rope.qk_norm_rope(case.q[one], case.k[one], *case.weights, EPS, case.cos[one], case.sin[one])
    assert same_bits(alone[0], q[one])
    assert same_bits(alone[1], k[one])
    mostly_equal(k.cpu(), _cpu_keys(case))


def _cpu_keys(case: _Case) -> torch.Tensor:
    from verl_tim.numerics.norm import rms_norm

    return apply_rope(rms_norm(case.k.cpu(), case.weights[1].cpu(), EPS), case.cos.cpu(), case.sin.cpu())


@on_gpu
def test_backward_is_deterministic():
    case = _Case(3000, 16, 8, 128)
    grads = values(3000, 16, 128, seed=7), values(3000, 8, 128, seed=8)
    first, again = (
        rope.qk_norm_rope_backward(*grads, case.q, case.k, *case.weights, EPS, case.cos, case.sin) for _ in range(2)
    )
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
