from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.head import head_logits, log_probs_of
from verl_tim.numerics.sampling import SamplingTensors, gumbel_noise, philox, sample, sample_reference

from .bits import randn, same_bits

VOCAB = 99


def params(rows: int, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, position=5) -> SamplingTensors:
    def full(value, dtype):
        return value.to(dtype) if isinstance(value, torch.Tensor) else torch.full((rows,), value, dtype=dtype)

    return SamplingTensors(
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        full(seed, torch.int64),
        full(position, torch.int64),
    )


def _logits(rows: int = 12, scale: float = 1.0) -> torch.Tensor:
    return head_logits(randn(rows, 16), randn(VOCAB, 16, seed=1, scale=scale))


def test_philox_known_answers():
    """Random123's kat_vectors for philox4x32, 10 rounds."""
    full = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, (full, full), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, want in cases:
        got = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
        assert tuple(int(word) for word in got) == want


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(1, 300))
@settings(max_examples=40)
def test_noise_depends_on_seed_position_and_token_alone(seed, position, vocab):
    seeds = torch.tensor([1, seed, 2])
    positions = torch.tensor([9, position, position])
    alone = gumbel_noise(seeds[1:2], positions[1:2], vocab)
    assert torch.isfinite(alone).all()
    assert same_bits(gumbel_noise(seeds, positions, vocab + 7)[1:2, :vocab], alone)


def test_noise_is_gumbel():
    noise = gumbel_noise(torch.arange(400), torch.arange(400) % 7, 500).double()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.01
    uniform = torch.exp(-torch.exp(-noise)).flatten()
    histogram = torch.histc(uniform, 50, 0, 1)
    chi_square = ((histogram - 4000) ** 2 / 4000).sum()
    assert chi_square < 90  # 49 degrees of freedom
    assert abs(torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]) < 0.01


def test_draws_follow_the_distribution():
    logits = _logits(1, scale=0.5).expand(20000, -1)
    tokens = sample(logits, params(20000, temperature=0.8, seed=torch.arange(20000))).token_B
    p = torch.softmax(logits[0, :VOCAB] / 0.8, -1)
    counts = torch.bincount(tokens, minlength=VOCAB)
    expected = p * 20000
    busy = expected > 5
    chi_square = ((counts[busy] - expected[busy]) ** 2 / expected[busy]).sum()
    assert chi_square < busy.sum() + 5 * math.sqrt(2 * busy.sum())
    assert tokens.max() < VOCAB, "padding columns are never drawn"


def test_a_draw_does_not_depend_on_its_company():
    logits = _logits(30)
    mixed = params(
        30,
        temperature=torch.linspace(0, 1.5, 30),
        top_k=torch.where(torch.arange(30) % 3 == 0, 7, -1),
        top_p=torch.where(torch.arange(30) % 4 == 0, 0.9, 1.0),
        seed=torch.arange(30),
        position=torch.arange(30),
    )
    together = sample(logits, mixed)
    for row in range(30):
        part = slice(row, row + 1)
        alone = sample(logits[part], SamplingTensors(*(getattr(mixed, f)[part] for f in mixed.__dataclass_fields__)))
        for name in ("token_B", "log_prob_B", "kept_mass_B", "top1_B"):
            assert same_bits(getattr(alone, name), getattr(together, name)[part])


def test_equals_its_reference():
    logits = _logits(40, scale=0.4)
    rows = torch.arange(40)
    mixed = params(
        40,
        temperature=torch.where(rows % 7 == 0, 0.0, 0.5 + rows / 40),
        top_k=torch.where(rows % 3 == 0, 6, -1),
        top_p=torch.where(rows % 4 == 1, 0.6, 1.0),
        min_p=torch.where(rows % 5 == 2, 0.1, 0.0),
        seed=rows - 3,
        position=rows * 2**31,
    )
    assert sample(logits, mixed).token_B.tolist() == [sample_reference(logits[i], mixed, i) for i in range(40)]


def test_log_prob_is_that_of_the_full_vocabulary():
    logits = _logits()
    for cut in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}):
        drawn = sample(logits, params(12, temperature=0.7, seed=torch.arange(12), **cut))
        want, _ = log_probs_of(logits, drawn.token_B, torch.full((12,), 0.7))
        assert same_bits(drawn.log_prob_B, want)


def test_greedy_takes_the_lowest_of_the_largest_and_scores_at_one():
    logits = _logits()
    logits[2, 50] = logits[2, 20] = logits[2].max() + 1
    drawn = sample(logits, params(12, temperature=0.0, top_k=5, top_p=0.3))
    assert same_bits(drawn.token_B, drawn.top1_B)
    assert drawn.token_B[2] == 20
    want, _ = log_probs_of(logits, drawn.token_B, torch.ones(12))
    assert same_bits(drawn.log_prob_B, want)
    assert (drawn.kept_mass_B == 1).all()


def _kept_reference(p: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Slow: which ids the cuts keep, most probable first, ties to the lower id."""
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    order = [i for i in order if p[i] >= min_p * p[order[0]]]
    if top_k >= 0:
        order = order[:top_k]
    total, mass, kept = sum(p[i].item() for i in order), 0.0, []
    for i in order:
        if top_p < 1.0 and kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += p[i].item()
    return kept


@pytest.mark.parametrize("top_k", [-1, 1, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_cuts(top_k, top_p, min_p):
    logits = _logits(1, scale=0.4)
    p = torch.softmax(logits[0, :VOCAB] / 0.9, -1)
    kept = _kept_reference(p, top_k, top_p, min_p)
    n = 400
    drawn = sample(
        logits.expand(n, -1),
        params(n, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, seed=torch.arange(n)),
    )
    assert set(drawn.token_B.tolist()) <= set(kept)
    if len(kept) <= 4:
        assert set(drawn.token_B.tolist()) == set(kept), "every kept token is drawn sooner or later"
    want = sum(p[i].item() for i in kept) if len(kept) < VOCAB else 1.0
    assert torch.allclose(drawn.kept_mass_B, torch.full((n,), want), atol=1e-5)
    if len(kept) == VOCAB:
        assert (drawn.kept_mass_B == 1.0).all()


def test_top_k_breaks_ties_by_the_lower_id():
    logits = torch.full((50, 128), -torch.inf)
    logits[:, :VOCAB] = 0.0
    drawn = sample(logits, params(50, top_k=3, seed=torch.arange(50)))
    assert set(drawn.token_B.tolist()) == {0, 1, 2}
    assert torch.allclose(drawn.kept_mass_B, torch.full((50,), 3 / VOCAB))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -1.0}, "min_p=-1.0"),
    ],
)
def test_refuses_parameters_out_of_range(bad, message):
    with pytest.raises(ContractError, match=message):
        sample(_logits(3), params(3, **bad))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_broken_logits(value):
    logits = _logits(3)
    logits[1] = value
    with pytest.raises(ContractError, match="NaN or no finite value"):
        sample(logits, params(3))
