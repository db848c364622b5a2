"""min-p, top-k, top-p on a GPU against the sorting reference."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.bits import randn, same_bits
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.sampling import SamplingTensors, sample

head = pytest.importorskip("verl_tim.numerics.gpu.head")
sampling = pytest.importorskip("verl_tim.numerics.gpu.sampling")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _rows(rows: int):
    pick = torch.Generator().manual_seed(3)

    def column(values, dtype):
        values = torch.tensor(values, dtype=dtype)
        return values[torch.randint(0, len(values), (rows,), generator=pick)].to(DEVICE)

    cuts = sampling.Cuts(
        column([-1, 3, 10, 50, 1, 300, -1, 5], torch.int64),
        column([0.9, 0.5, 1.0, 0.95, 0.3, 0.99, 1.0, 0.2], torch.float32),
        column([0.0, 0.1, 0.0, 0.01, 0.0, 0.5, 0.001, 1.0], torch.float32),
    )
    temperature = column([1.0, 0.7, 0.0, 1.3, 0.5], torch.float32)
    seed = torch.arange(rows, device=DEVICE) * 7 + (1 << 35)
    return cuts, temperature, seed, torch.arange(rows, device=DEVICE)


def _reference(logits, cuts, temperature, seed, position):
    return sample(logits, SamplingTensors(temperature, *cuts, seed, position))


def test_token_mass_and_log_prob_are_the_references(monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 256)
    rows, vocab = 16, 320
    hidden = randn(rows, 64, dtype=torch.bfloat16, scale=0.5).to(DEVICE)
    weight = randn(vocab, 64, dtype=torch.bfloat16, seed=1).to(DEVICE)
    cuts, temperature, seed, position = _rows(rows)
    got = sampling.sample_with_cuts(hidden, weight, temperature, cuts, seed, position)
    want = _reference(hidden.float() @ weight.float().t(), cuts, temperature, seed, position)
    assert torch.equal(got.token_R, want.token_B)
    assert torch.equal(got.top1_R, want.top1_B)
    assert (got.kept_mass_R - want.kept_mass_B).abs().max() < 2e-6
    assert (got.log_prob_R - want.log_prob_B).abs().max() < 1e-5


def test_ties_at_the_border_go_to_the_lower_ids(monkeypatch):
    """Eight equal largest logits: top-k 3 keeps ids 0..2, top-p 0.4 of their mass keeps four of the eight."""
    monkeypatch.setattr(sampling, "_BLOCK", 64)
    hidden = torch.ones(24, 16, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((64, 16), -1.0, dtype=torch.bfloat16, device=DEVICE)
    weight[8:16] = 1.0
    off, seed = torch.ones(24, device=DEVICE), torch.arange(24, device=DEVICE)
    k3 = torch.full((24,), 3, device=DEVICE)
    by_k = sampling.sample_with_cuts(hidden, weight, off, sampling.Cuts(k3, off, 0 * off), seed, seed)
    assert set(by_k.token_R.tolist()) == {8, 9, 10}
    by_p = sampling.sample_with_cuts(
        hidden, weight, off, sampling.Cuts(torch.full_like(k3, -1), 0.4 * off, 0 * off), seed, seed
    )
    assert set(by_p.token_R.tolist()) == {8, 9, 10, 11}
    assert (by_p.kept_mass_R - 0.5).abs().max() < 1e-5


def test_refuses_what_it_cannot_serve():
    hidden, weight = randn(2, 32, dtype=torch.bfloat16).to(DEVICE), randn(64, 32, dtype=torch.bfloat16).to(DEVICE)
    one, seed = torch.ones(2, device=DEVICE), torch.arange(2, device=DEVICE)
    with pytest.raises(ContractError, match="top_k must be"):
        sampling.sample_with_cuts(hidden, weight, one, sampling.Cuts(seed.int(), one, one), seed, seed)
    with pytest.raises(ContractError, match="top_p must be"):
        sampling.sample_with_cuts(hidden, weight, one, sampling.Cuts(seed, one[:1], one), seed, seed)


@pytest.mark.gpu
def test_of_a_real_vocabulary():
    """Random cuts, peaked and flat rows: the sort's kept mass, and the log-prob has the trainer's bits."""
    vocab, inner, rows = 151936, 2048, 96
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, inner, device="cuda", generator=generator).mul_(inner**-0.5).bfloat16()
    scale = torch.linspace(0.2, 8.0, rows, device="cuda")[:, None]
    hidden = (torch.randn(rows, inner, device="cuda", generator=generator) * scale).bfloat16()
    cuts, temperature, seed, position = _rows(rows)
    got = sampling.sample_with_cuts(hidden, weight, temperature, cuts, seed, position)
    logits = head.gemm(hidden, weight, out_dtype=torch.float32)
    want = _reference(logits, cuts, temperature, seed, position)
    # the sort ranks by rounded log-probs: at a border the two may differ by one id
    assert ((got.kept_mass_R - want.kept_mass_B).abs() < 1e-3).all()
    assert (got.token_R == want.token_B).float().mean() > 0.95
    scored = head.token_log_probs(hidden, weight, got.token_R, temperature)
    assert same_bits(got.log_prob_R, scored.log_prob_T)


@pytest.mark.gpu
def test_cuts_that_cut_nothing_draw_what_the_plain_sampler_draws():
    hidden = torch.randn(70, 2048, device="cuda").bfloat16()
    weight = torch.randn(151936, 2048, device="cuda").mul_(0.05).bfloat16()
    one, seed = torch.ones(70, device="cuda"), torch.arange(70, device="cuda")
    off = sampling.Cuts(torch.full_like(seed, -1), one, 0 * one)
    got = sampling.sample_with_cuts(hidden, weight, one, off, seed, seed)
    want = head.sample(hidden, weight, one, seed, seed)
    assert torch.equal(got.token_R, want.token_T)
    assert same_bits(got.log_prob_R, want.log_prob_T)
    assert (got.kept_mass_R == 1.0).all()
