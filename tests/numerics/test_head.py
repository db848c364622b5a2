from __future__ import annotations

import pytest
import torch

from verl_tim.numerics import head
from verl_tim.numerics.contract import VOCAB_TILE, ContractError
from verl_tim.numerics.head import head_logits, log_probs_of, log_probs_reference, token_log_probs

from .bits import DTYPES, close_to_double, randn, same_bits

VOCABS = (64, 99, VOCAB_TILE, 2 * VOCAB_TILE + 130)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _inputs(vocab: int, dtype: torch.dtype, rows: int = 21):
    hidden, weight = randn(rows, 32, dtype=dtype), randn(vocab, 32, dtype=dtype, seed=1)
    target = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    target[0], target[1] = 0, vocab - 1
    temperature = torch.tensor([0.6, 1.0, 1.3])[torch.arange(rows) % 3]
    return hidden, weight, target, temperature


@both_dtypes
@pytest.mark.parametrize("vocab", VOCABS)
def test_equals_its_reference(vocab, dtype):
    hidden, weight, target, temperature = _inputs(vocab, dtype)
    got, entropy = token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    assert got.dtype == torch.float32
    assert same_bits(got, log_probs_reference(hidden, weight, target, temperature))
    want = torch.log_softmax(hidden.double() @ weight.double().t() / temperature.double()[:, None], -1)
    close_to_double(got, want.gather(1, target[:, None])[:, 0], torch.float32)
    close_to_double(entropy, -(want.exp() * want).sum(-1), torch.float32)


@both_dtypes
@pytest.mark.parametrize("vocab", VOCABS)
def test_trainer_and_sampler_share_every_bit(vocab, dtype):
    """The row-chunked trainer function and the sampler's logits, one row at a time, give the same log-probs."""
    hidden, weight, target, temperature = _inputs(vocab, dtype)
    want, want_entropy = token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    for row in range(0, 21, 4):
        part = slice(row, row + 1)
        logits = head_logits(hidden[part], weight)
        got, entropy = log_probs_of(logits, target[part], temperature[part], vocab_size=vocab)
        assert same_bits(got, want[part])
        assert same_bits(entropy, want_entropy[part])


def test_row_chunks_are_a_schedule(monkeypatch):
    hidden, weight, target, temperature = _inputs(VOCAB_TILE + 64, torch.float32)
    want = token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 1)
    got = token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@both_dtypes
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_gradients_of_log_prob_and_entropy(dtype, chunk, monkeypatch):
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", chunk)
    hidden, weight, target, temperature = _inputs(99, dtype)
    g, h = randn(21, seed=5), randn(21, seed=6)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    doubles = [t.double().requires_grad_() for t in (hidden, weight)]
    log_prob, entropy = token_log_probs(*leaves, target, temperature, with_entropy=True)
    ((log_prob * g).sum() + (entropy * h).sum()).backward()
    log_p = torch.log_softmax(doubles[0] @ doubles[1].t() / temperature.double()[:, None], -1)
    chosen = log_p.gather(1, target[:, None])[:, 0]
    ((chosen * g.double()).sum() - ((log_p.exp() * log_p).sum(-1) * h.double()).sum()).backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        close_to_double(leaf.grad, double.grad, dtype)


def test_unused_outputs_cost_no_gradient():
    hidden, weight, target, temperature = _inputs(99, torch.float32)
    hidden.requires_grad_()
    log_prob, _ = token_log_probs(hidden, weight, target, temperature, with_entropy=True)
    log_prob.sum().backward()
    alone = hidden.grad.clone()
    hidden.grad = None
    token_log_probs(hidden, weight, target, temperature)[0].sum().backward()
    assert same_bits(hidden.grad, alone)


def test_nothing_of_size_tokens_times_vocabulary_is_kept():
    hidden, weight, target, temperature = _inputs(1024, torch.float32, rows=512)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        token_log_probs(hidden.requires_grad_(), weight, target, temperature, with_entropy=True)
    assert kept
    assert max(kept) <= weight.numel()


def test_padding_columns_are_minus_infinity():
    logits = head_logits(randn(3, 16), randn(99, 16, seed=1))
    assert logits.shape == (3, 128)
    assert torch.isfinite(logits[:, :99]).all()
    assert (logits[:, 99:] == -torch.inf).all()


def test_logits_are_not_rounded_to_the_operand_dtype():
    logits = head_logits(randn(3, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16, seed=1))
    assert not torch.equal(logits, logits.bfloat16().float())


def test_temperature_zero_is_scored_at_one():
    hidden, weight, target, _ = _inputs(99, torch.float32)
    assert same_bits(token_log_probs(hidden, weight, target, 0.0)[0], token_log_probs(hidden, weight, target, 1.0)[0])


def test_one_ulp_of_temperature_shows():
    hidden, weight, target, _ = _inputs(99, torch.float32)
    other = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)).item()
    got, want = token_log_probs(hidden, weight, target, other)[0], token_log_probs(hidden, weight, target, 0.7)[0]
    assert not same_bits(got, want)


def test_refuses_rounded_temperatures_and_wrong_shapes():
    hidden, weight, target, temperature = _inputs(99, torch.float32)
    with pytest.raises(ContractError, match="already rounded"):
        token_log_probs(hidden, weight, target, temperature.bfloat16())
    with pytest.raises(ContractError, match="must agree"):
        token_log_probs(hidden, weight, target[:-1], temperature)
    with pytest.raises(ContractError, match="must agree"):
        token_log_probs(hidden, weight, target, temperature[:2])
    with pytest.raises(ContractError, match="hidden is"):
        token_log_probs(hidden.bfloat16(), weight, target, temperature)
    with pytest.raises(ContractError, match="must be float32"):
        log_probs_of(head_logits(hidden, weight), target, temperature.double())
    for function in (head_logits, lambda h, w: token_log_probs(h, w, target, 1.0)):
        with pytest.raises(ContractError, match="does not fit the weight"):
            function(hidden[:, :16], weight)
        with pytest.raises(ContractError, match=r"all must be torch\.float32 or torch\.bfloat16"):
            function(hidden.half(), weight.half())


@pytest.mark.parametrize("wrong", [-1, -100, 99, 127, 128, 2**32])
def test_a_target_outside_the_vocabulary_is_refused(wrong):
    """The padding columns (99 to 127 here) are no tokens either."""
    hidden, weight, target, _ = _inputs(99, torch.float32)
    target[7] = wrong
    with pytest.raises(ContractError, match=f"target {wrong} in row 7 is outside the vocabulary of 99"):
        token_log_probs(hidden, weight, target, 1.0)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(wrong):
    hidden, weight, target, _ = _inputs(99, torch.float32)
    with pytest.raises(ContractError, match="must be finite and not negative"):
        token_log_probs(hidden, weight, target, wrong)


@both_dtypes
@pytest.mark.parametrize("vocab", VOCABS)
def test_top1_is_the_likeliest_token_and_changes_no_bit(vocab, dtype):
    hidden, weight, target, temperature = _inputs(vocab, dtype)
    weight[3] = weight[5]  # a tie wherever these two win
    top1_T = torch.full((21,), -1)
    got, _ = token_log_probs(hidden.requires_grad_(), weight, target, temperature, top1_out_T=top1_T)
    got.sum().backward()
    assert same_bits(got, token_log_probs(hidden, weight, target, temperature)[0])
    logits = head_logits(hidden.detach(), weight)
    assert torch.equal(logits.gather(1, top1_T[:, None])[:, 0], logits.amax(-1))
    assert not bool((top1_T == 5).any()), "ties go to the lower id"
