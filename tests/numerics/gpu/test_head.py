"""The GPU head: log-probs, entropy, draws. In the interpreter the logic is checked; on a GPU the bits too."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.bits import randn, same_bits
from verl_tim.numerics.contract import ContractError

from .shapes import HEADS

gpu_head = pytest.importorskip("verl_tim.numerics.gpu.head")
tile = pytest.importorskip("verl_tim.numerics.gpu.vocabulary_tile")
sampling = pytest.importorskip("verl_tim.numerics.sampling")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = (64, 128, 300, 513)


def _inputs(vocab: int, rows: int = 6, inner: int = 64, device: str = DEVICE):
    hidden = randn(rows, inner, dtype=torch.bfloat16, scale=0.5).to(device)
    weight = randn(vocab, inner, dtype=torch.bfloat16, seed=1).to(device)
    target = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    target[0], target[1] = 0, vocab - 1
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.5, 1.0])[torch.arange(rows) % 6]
    return hidden, weight, target.to(device), temperature.to(device)


def _scaled_double(hidden, weight, temperature):
    divisor = torch.where(temperature == 0, 1.0, temperature).double()
    return (hidden.double() @ weight.double().t()) / divisor[:, None]


def _seeds(rows: int, device: str = DEVICE):
    seed = torch.arange(rows, device=device) * 7919 + (1 << 40) - 3 * rows
    return seed, torch.arange(rows, device=device) * 3 + (1 << 33) * (torch.arange(rows, device=device) % 2)


def _by(monkeypatch, schedule: str) -> None:
    monkeypatch.setattr(gpu_head, "_FEW_ROWS", {"stream": 1 << 20, "slabs": -1}[schedule])


schedules = pytest.mark.parametrize("schedule", ["stream", "slabs"])


@schedules
@pytest.mark.parametrize("vocab", VOCABS)
def test_close_to_double(vocab, schedule, monkeypatch):
    _by(monkeypatch, schedule)
    hidden, weight, target, temperature = _inputs(vocab)
    got = gpu_head.token_log_probs(hidden, weight, target, temperature, with_entropy=True, with_top1=True)
    z = _scaled_double(hidden, weight, temperature)
    want = torch.log_softmax(z, -1)
    assert (got.log_prob_T - want.gather(1, target[:, None])[:, 0]).abs().max() < 3e-5
    assert (got.entropy_T + (want.exp() * want).sum(-1)).abs().max() < 3e-5
    assert ((got.max_T + got.log_sum_T) - z.logsumexp(-1)).abs().max() < 3e-5
    assert torch.equal(got.top1_T, z.argmax(-1))
    without = gpu_head.token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    assert same_bits(got.log_prob_T, without.log_prob_T)


@schedules
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_the_token_of_the_reference_noise(vocab, schedule, monkeypatch):
    _by(monkeypatch, schedule)
    hidden, weight, _, temperature = _inputs(vocab, rows=12)
    seed, position = _seeds(12)
    drawn = gpu_head.sample(hidden, weight, temperature, seed, position)
    z = _scaled_double(hidden, weight, temperature)
    score = z + sampling.gumbel_noise(seed, position, vocab).double()
    want = torch.where(temperature == 0, z.argmax(-1), score.argmax(-1))
    assert torch.equal(drawn.token_T, want)
    log_p = torch.log_softmax(z, -1).gather(1, want[:, None])[:, 0]
    assert (drawn.log_prob_T - log_p).abs().max() < 3e-5
    assert torch.equal(drawn.top1_T, z.argmax(-1))


def test_philox_words_are_those_of_the_reference():
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def words(out_ptr, seed, position, QUADS: tl.constexpr):
        quad = tl.arange(0, QUADS)
        at = tl.full((QUADS,), 0, tl.int64)
        w0, w1, w2, w3 = tile.philox_words(quad, at + position, at + seed)
        tl.store(out_ptr + quad * 4, w0.to(tl.int64))
        tl.store(out_ptr + quad * 4 + 1, w1.to(tl.int64))
        tl.store(out_ptr + quad * 4 + 2, w2.to(tl.int64))
        tl.store(out_ptr + quad * 4 + 3, w3.to(tl.int64))

    mask = 0xFFFFFFFF
    for seed, position in ((0, 0), (123456789, 77), ((1 << 62) + 12345, (1 << 40) + 9), (-5, 3)):
        got = torch.empty(64, dtype=torch.int64, device=DEVICE)
        words[(1,)](got, seed, position, QUADS=16)
        counter = (torch.arange(16), *(torch.tensor(c) for c in (position & mask, (position >> 32) & mask, 0)))
        key = (torch.tensor(seed & mask), torch.tensor((seed >> 32) & mask))
        want = torch.stack([w.expand(16) for w in sampling.philox(counter, key)], -1).flatten()
        assert torch.equal(got.cpu(), want)


def test_ties_go_to_the_lower_id():
    hidden, weight, target, temperature = _inputs(300)
    hidden.fill_(1.0)
    weight.fill_(0.5)  # every order of summation is exact
    got = gpu_head.token_log_probs(hidden, weight, target, temperature, with_top1=True)
    assert got.top1_T.tolist() == [0] * 6


def test_noise_is_the_exponential_of_its_word():
    """Small words decide draws: the series there, and the logarithm elsewhere, to 1e-4 of -log(1 - u)."""
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def noise(word_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out_ptr + i, tile.waiting_time(tl.load(word_ptr + i).to(tl.uint32)))

    words = torch.cat([torch.arange(512), (2 ** torch.linspace(0, 32, 3584, dtype=torch.float64)).long() - 1])
    got = torch.empty(4096, device=DEVICE)
    noise[(1,)](words.to(DEVICE), got, N=4096)
    want = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    usual = want < 15  # beyond it u rounds to 1; such a token wins nothing
    assert ((got.cpu().double() / want)[usual] - 1).abs().max() < 1e-4
    assert (got.cpu()[~usual] >= 15).all()


def test_temperature_zero_is_scored_at_one():
    hidden, weight, target, temperature = _inputs(300)
    zero, one = torch.zeros_like(temperature), torch.ones_like(temperature)
    got, want = (gpu_head.token_log_probs(hidden, weight, target, t).log_prob_T for t in (zero, one))
    assert same_bits(got, want)


@schedules
def test_a_target_outside_the_vocabulary_shows(schedule, monkeypatch):
    _by(monkeypatch, schedule)
    hidden, weight, target, temperature = _inputs(300)
    want = gpu_head.token_log_probs(hidden, weight, target, temperature).log_prob_T
    target[2], target[4], target[5] = -100, 300, 2**32  # the last is a token in its lower 32 bits
    got = gpu_head.token_log_probs(hidden, weight, target, temperature).log_prob_T
    assert got.isnan().tolist() == [False, False, True, False, True, True]
    assert same_bits(got[[0, 1, 3]], want[[0, 1, 3]])


def test_no_rows():
    hidden, weight, target, temperature = _inputs(300)
    got = gpu_head.token_log_probs(hidden[:0], weight, target[:0], temperature[:0], with_entropy=True)
    assert got.log_prob_T.shape == got.entropy_T.shape == (0,)
    seed, position = _seeds(0)
    assert gpu_head.sample(hidden[:0], weight, temperature[:0], seed, position).token_T.shape == (0,)


def test_refuses_what_it_cannot_serve():
    hidden, weight, target, temperature = _inputs(300)
    with pytest.raises(ContractError, match=r"must be torch\.bfloat16"):
        gpu_head.token_log_probs(hidden.float(), weight.float(), target, temperature)
    with pytest.raises(ContractError, match="does not fit"):
        gpu_head.token_log_probs(hidden[:, :32], weight, target, temperature)
    with pytest.raises(ContractError, match="temperature must be float32"):
        gpu_head.token_log_probs(hidden, weight, target, temperature.double())
    with pytest.raises(ContractError, match="target has shape"):
        gpu_head.token_log_probs(hidden, weight, target[:-1], temperature)


def _peaked(vocab: int, inner: int, rows: int):
    """Hidden states that point at one weight row each: mean top probability about a half, as trained models have."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, inner, device="cuda", generator=generator).mul_(inner**-0.5).bfloat16()
    aim = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    noise = torch.randn(rows, inner, device="cuda", generator=generator)
    hidden = (weight[aim].float() * 12.0 + noise).bfloat16()
    return hidden, weight


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_sampler_and_trainer_share_every_bit(name, monkeypatch):
    """The chain on the device: each schedule, each batch size, a row alone: one log-prob."""
    vocab, inner = HEADS[name]
    rows = 600
    hidden, weight = _peaked(vocab, inner, rows)
    temperature = torch.tensor([0.6, 1.0, 1.3, 0.0], device="cuda")[torch.arange(rows, device="cuda") % 4]
    seed, position = _seeds(rows, "cuda")
    drawn = gpu_head.sample(hidden, weight, temperature, seed, position)
    want = gpu_head.token_log_probs(hidden, weight, drawn.token_T, temperature, with_entropy=True, with_top1=True)
    assert same_bits(drawn.log_prob_T, want.log_prob_T)
    for count in (1, 2, 7, 8, 9, 16, 33, 64, 65, 128, 255, 256, 257, 512):
        part = slice(3, 3 + count)
        for few in (64, 1 << 20) if count < 200 else (64,):
            monkeypatch.setattr(gpu_head, "_FEW_ROWS", few)
            again = gpu_head.sample(hidden[part], weight, temperature[part], seed[part], position[part])
            assert torch.equal(again.token_T, drawn.token_T[part])
            assert same_bits(again.log_prob_T, drawn.log_prob_T[part])
            scored = gpu_head.token_log_probs(
                hidden[part], weight, drawn.token_T[part], temperature[part], with_entropy=True, with_top1=True
            )
            assert same_bits(scored.log_prob_T, want.log_prob_T[part])
            assert same_bits(scored.entropy_T, want.entropy_T[part])
            assert torch.equal(scored.top1_T, want.top1_T[part])


@pytest.mark.gpu
def test_slabs_and_row_chunks_are_schedules(monkeypatch):
    hidden, weight = _peaked(151936, 2048, 1024)
    target = torch.randint(0, 151936, (1024,), device="cuda")
    temperature = torch.full((1024,), 0.7, device="cuda")
    want = gpu_head.token_log_probs(hidden, weight, target, temperature, with_entropy=True, with_top1=True)
    for chunk, slab in ((100, 1 << 20), (1000, 1 << 23), (4096, 1 << 30)):
        monkeypatch.setattr(gpu_head, "_CHUNK_ROWS", chunk)
        monkeypatch.setattr(gpu_head, "_SLAB_ELEMENTS", slab)
        got = gpu_head.token_log_probs(hidden, weight, target, temperature, with_entropy=True, with_top1=True)
        assert same_bits(got.log_prob_T, want.log_prob_T)
        assert same_bits(got.entropy_T, want.entropy_T)
