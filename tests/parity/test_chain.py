"""The parity chain. Each link is a test of its own, so that a failure names its link:

1. a row does not depend on the other rows of its batch (batch invariance);
2. a prefill row equals the decode row at the same position (prefill = decode);
3. the trainer's packed or padded forward equals the rollout's prefill (trainer = prefill);
4. hence trainer = decode, checked end to end on sampled tokens, again after the weights moved.

Models have peaked logits; comparisons are of bit patterns, on finite values, with the number of values asserted.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import DTYPES, VOCAB, PagedRunner, Sequence, engine_of, perturb, rollout, tiny_model
from tests.parity.bits import assert_peaked, assert_same_bits, recorded, score
from verl_tim.models import apply_contract

KINDS = ("qwen3", "qwen3_moe")
LENGTHS = (1, 2, 7, 8, 9, 63, 64, 65, 100, 129)
ROWS = sum(LENGTHS)

both_models = pytest.mark.parametrize("kind", KINDS)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _sequences(seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    return [Sequence(torch.randint(0, VOCAB, (n,), generator=generator).tolist(), n, 0, 1.0) for n in LENGTHS]


def _prefill(model, sequences: list[Sequence], page_size: int = 16) -> torch.Tensor:
    """Hidden states of every row, all sequences in one step."""
    runner = PagedRunner(model, page_size=page_size, num_pages=sum(-(-len(s.tokens) // page_size) for s in sequences))
    return runner.step([(s, len(s.tokens)) for s in sequences])


@both_dtypes
@both_models
def test_link_1_batch_invariance(kind, dtype):
    """Every sequence alone, and all in another order and page size, give the rows they give in company."""
    model = engine_of(tiny_model(kind, dtype=dtype), dtype=dtype)
    together = model.logits(_prefill(model, _sequences())).split(LENGTHS)
    compared = 0
    for want, sequence in zip(together, _sequences(), strict=True):
        alone = _prefill(model, [sequence], page_size=3)
        # logits of one row at a time as well: the head's batch is another one
        got = torch.cat([model.logits(row[None]) for row in alone])
        compared += assert_same_bits(got[:, :VOCAB], want[:, :VOCAB], f"length {len(sequence.tokens)}")
    order = _sequences()[::-1]
    other = model.logits(_prefill(model, order, page_size=1)).split(LENGTHS[::-1])
    for want, got in zip(together, other[::-1], strict=True):
        compared += assert_same_bits(got[:, :VOCAB], want[:, :VOCAB], "another order")
    assert compared == 2 * ROWS * VOCAB


@both_dtypes
@both_models
def test_link_2_prefill_equals_decode(kind, dtype):
    """Token-by-token decode, and chunked prefill cut anywhere, give the rows of the whole prefill."""
    model = engine_of(tiny_model(kind, dtype=dtype), dtype=dtype)
    want = _prefill(model, _sequences()).split(LENGTHS)
    compared = 0
    for chunks in ((1,), (5, 1, 17, 2), (64, 3)):
        sequences = _sequences()
        runner = PagedRunner(model, page_size=7, num_pages=90)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        step = 0
        while alive := [(i, s) for i, s in enumerate(sequences) if s.cached < len(s.tokens)]:
            counts = [min(chunks[(step + i) % len(chunks)], len(s.tokens) - s.cached) for i, s in alive]
            hidden = runner.step([(s, n) for (_, s), n in zip(alive, counts, strict=True)]).split(counts)
            for (i, _), h in zip(alive, hidden, strict=True):
                rows[i].append(h)
            step += 1
        for got, expected in zip(rows, want, strict=True):
            compared += assert_same_bits(torch.cat(got), expected, f"chunks {chunks}")
    assert compared == 3 * ROWS * 64


@both_dtypes
@both_models
def test_link_3_trainer_equals_prefill(kind, dtype):
    """The trainer's hidden states, packed and padded on either side, are the rollout's prefill rows."""
    hf_model = tiny_model(kind, dtype=dtype)
    want = _prefill(engine_of(hf_model, dtype=dtype), _sequences())
    apply_contract(hf_model)
    captured: list[torch.Tensor] = []
    hf_model.model.norm.register_forward_hook(lambda module, args, output: captured.append(output))
    compared = 0
    for layout in ("packed", "left", "right"):
        with torch.no_grad():
            score(hf_model, _sequences(), layout, 1.0)
        compared += assert_same_bits(captured.pop()[:ROWS], want, layout)
    assert compared == 3 * ROWS * 64


@both_dtypes
@pytest.mark.parametrize(("temperature", "head_scale"), [(0.6, 7.0), (1.0, 9.0), (1.3, 12.0)])
@both_models
def test_link_4_trainer_equals_decode_after_weight_updates(kind, temperature, head_scale, dtype):
    """Sampled tokens with mixed lengths, chunked prefill beside decodes, and preemption: the log-prob recorded when a
    token was drawn is the trainer's, for two weight versions. 960 tokens per case, 11,520 over the test."""
    hf_model = tiny_model(kind, dtype=dtype, head_scale=head_scale)
    engine = engine_of(hf_model, dtype=dtype)
    handle = apply_contract(hf_model)
    compared = 0
    for version in range(2):
        if version:
            before = engine.weight_checksum()
            perturb(hf_model)
            engine.load_weights(hf_model.state_dict().items())
            assert engine.weight_checksum() != before
        sequences = rollout(engine, prompts=16, new_tokens=30, temperature=temperature, page_size=5 + version)
        assert_peaked(sequences)
        with torch.no_grad():
            for first, layout in ((0, "packed"), (6, "left"), (11, "right")):  # micro-batches of different size
                part = sequences[first : {0: 6, 6: 11, 11: 16}[first]]
                compared += assert_same_bits(score(hf_model, part, layout, temperature), recorded(part), layout)
    assert compared == 2 * 16 * 30
    assert handle.forward_calls == 6


@both_dtypes
@both_models
def test_thread_count_does_not_matter(kind, dtype):
    """Trainer and rollout may run with different numbers of threads."""
    model = engine_of(tiny_model(kind, dtype=dtype), dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = _prefill(model, _sequences())
        torch.set_num_threads(3)
        got = _prefill(model, _sequences(), page_size=3)
    finally:
        torch.set_num_threads(threads)
    assert assert_same_bits(got, want, "three threads") == ROWS * 64
