"""Gradients of the GPU head against autograd in float64 (interpreter) and float32 (device)."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.bits import randn

head = pytest.importorskip("verl_tim.numerics.gpu.head")
head_backward = pytest.importorskip("verl_tim.numerics.gpu.head_backward")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _gradients(hidden, weight, target, temperature, g, h, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
    divisor = torch.where(temperature == 0, 1.0, temperature).to(dtype)
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t() / divisor[:, None], -1)
    loss = torch.zeros((), dtype=dtype, device=hidden.device)
    if g is not None:
        loss = loss + (log_p.gather(1, target[:, None])[:, 0] * g).sum()
    if h is not None:
        loss = loss - ((log_p.exp() * log_p).sum(-1) * h).sum()
    loss.backward()
    return [leaf.grad for leaf in leaves]


def _relative(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("slab", [1, 1 << 26], ids=["slabs", "one slab"])
@pytest.mark.parametrize("wanted", ["both", "log_prob", "entropy"])
def test_against_autograd(wanted, slab, monkeypatch):
    monkeypatch.setattr(head_backward, "_SLAB_ELEMENTS", slab)
    monkeypatch.setattr(head_backward, "_COLUMN_UNIT", 128)
    rows, vocab, inner = 6, 300, 64
    hidden = randn(rows, inner, dtype=torch.bfloat16, scale=0.3).to(DEVICE)
    weight = randn(vocab, inner, dtype=torch.bfloat16, seed=1).to(DEVICE)
    target = torch.tensor([0, vocab - 1, 17, 128, 127, 255], device=DEVICE)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.5, 1.0], device=DEVICE)
    if wanted == "log_prob":
        temperature = temperature[1:2].expand(rows)  # a scalar temperature arrives with stride 0
    g = randn(rows, seed=5).to(DEVICE) if wanted != "entropy" else None
    h = randn(rows, seed=6).to(DEVICE) if wanted != "log_prob" else None
    out = head.token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    got = head_backward.head_backward(
        hidden, weight, target, temperature, out.max_T, out.log_sum_T, out.entropy_T, g, h
    )
    want = _gradients(hidden, weight, target, temperature, g, h, torch.float64)
    for mine, double in zip(got, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert _relative(mine, double) < 5e-3


def test_only_what_is_wanted():
    hidden, weight = randn(2, 32, dtype=torch.bfloat16).to(DEVICE), randn(64, 32, dtype=torch.bfloat16).to(DEVICE)
    target, temperature = torch.tensor([1, 2], device=DEVICE), torch.ones(2, device=DEVICE)
    out = head.token_log_probs(hidden, weight, target, temperature)
    one = torch.ones(2, device=DEVICE)
    common = (hidden, weight, target, temperature, out.max_T, out.log_sum_T, None)
    assert head_backward.head_backward(*common, None, None) == (None, None)
    d_hidden, d_weight = head_backward.head_backward(*common, one, None, weight_grad=False)
    assert d_weight is None
    assert d_hidden.shape == hidden.shape
    d_hidden, d_weight = head_backward.head_backward(*common, one, None, hidden_grad=False)
    assert d_hidden is None
    assert d_weight.shape == weight.shape


@pytest.mark.gpu
def test_of_a_real_vocabulary_repeats_and_stays_in_bounds():
    rows, vocab, inner = 2048, 151936, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, inner, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(vocab, inner, device="cuda", generator=generator).mul_(0.05).bfloat16()
    target = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    temperature = torch.full((rows,), 0.8, device="cuda")
    g, h = torch.randn(2, rows, device="cuda", generator=generator).unbind()
    out = head.token_log_probs(hidden, weight, target, temperature, with_entropy=True)

    def run():
        return head_backward.head_backward(
            hidden, weight, target, temperature, out.max_T, out.log_sum_T, out.entropy_T, g, h
        )

    got = run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = run()
    torch.cuda.synchronize()
    # below one bfloat16 [rows, vocab] tensor besides the gradients themselves
    assert torch.cuda.max_memory_allocated() - before - again[1].nbytes < rows * vocab * 2
    for a, b in zip(got, again, strict=True):
        assert torch.equal(a, b)
    torch.backends.cuda.matmul.allow_tf32 = False
    for mine, want in zip(got, _gradients(hidden, weight, target, temperature, g, h, torch.float32), strict=True):
        assert _relative(mine, want) < 6e-3
