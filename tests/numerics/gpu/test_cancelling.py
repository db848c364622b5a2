"""Operands whose products cancel: exactly zero, drawn from the seed alone, and loud about another order in bfloat16."""

from __future__ import annotations

import pytest
import torch

from .fake_cublaslt import ascending, halves

cancelling = pytest.importorskip("verl_tim.numerics.gpu.cancelling").cancelling


@pytest.mark.parametrize("inner", [2, 64, 97, 768])  # of an odd length the last column is left out
def test_every_product_is_zero_and_every_operand_finite(inner):
    x, weight = cancelling(3, 7, inner, "cpu")
    assert (x.shape, weight.shape) == ((3, inner), (7, inner))
    assert x.dtype == weight.dtype == torch.bfloat16
    assert torch.isfinite(x).all()
    assert torch.isfinite(weight).all()
    assert not (x.double() @ weight.double().t()).any()
    assert x[:, : inner // 2 * 2].any(0).all(), "a column without terms tests nothing"


def test_the_seed_decides_and_torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    first, again, other = (cancelling(3, 7, 64, "cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_shows_in_most_elements_where_random_operands_hide_it(dtype):
    x, weight = cancelling(5, 24, 256, "cpu")
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(n, 256, generator=generator).bfloat16() for n in (5, 24)]
    shares = []
    for a, b in ((x, weight), random):
        terms_TNK = a.float()[:, None] * b.float()[None]
        shares.append(float((ascending(terms_TNK).to(dtype) != halves(terms_TNK).to(dtype)).float().mean()))
    assert shares[0] > 0.8
    if dtype == torch.bfloat16:
        assert shares[1] < 0.05
