"""K1, K2, K3 of diagnosis and correction: one number each, and the right one."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from verl_tim.correction import ratios
from verl_tim.diagnosis import estimators

SIZES = (1e-12, 1e-8, 1e-6, 1e-4, 3e-3, 0.0099, 0.01, 0.05, 0.0999, 0.1, 0.5, 3.0, 19.0)


def exact_k3(x: float) -> float:
    """exp(x) - 1 - x by its series in rational numbers, which do not cancel."""
    x_ = Fraction(x)
    term, total = x_, Fraction(0)
    for n in range(2, 120):
        term = term * x_ / n
        total += term
    return float(total)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_k3_holds_its_relative_accuracy_at_every_size(dtype, relative):
    x = torch.tensor([sign * size for size in SIZES for sign in (1, -1)], dtype=dtype)
    exact = torch.tensor([exact_k3(v) for v in x.tolist()], dtype=torch.float64)
    for k3 in (ratios.k3, estimators.k3):
        got = k3(x).double()
        assert (got > 0).all()
        assert ((got - exact).abs() / exact).max() < relative


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sides_of_the_house_agree_in_every_bit(name, dtype):
    x = torch.cat([sign * torch.logspace(-12, 12, 400, dtype=torch.float64) for sign in (1, -1)]).to(dtype)
    words = torch.int32 if dtype == torch.float32 else torch.int64
    ours, theirs = (getattr(module, name)(x) for module in (ratios, estimators))
    assert torch.isfinite(ours).all()
    assert torch.equal(ours.view(words), theirs.view(words))


def test_the_metrics_of_one_token_have_that_number():
    """`tim/ppo_k3` of a token that hardly moved: the plain expm1(x) - x is 6e-9 off there, of its own size."""
    moved = torch.tensor([[-1.0 + 2.0**-20]])
    sums = estimators.RatioSums.of(moved, torch.tensor([[-1.0]]), torch.ones(1, 1))
    assert sums.metrics()["tim/ppo_k3"] == pytest.approx(exact_k3(2.0**-20), rel=1e-13)
