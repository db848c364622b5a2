"""Weights split over ranks by output columns, on the GPU's schedules: the bits of one rank.

Ranks run one after another (`turns.py`). In the interpreter products are of small integers, whose sums are exact in any
order, so that what is merged is compared bit by bit there, too; on a GPU operands are any.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.test_split_model import ROWS, batch
from tests.models.tiny import engine_of, tiny_model
from verl_tim.models import build_model, config_from_hf
from verl_tim.models.place import Place
from verl_tim.numerics.contract import interpreted_schedules
from verl_tim.numerics.gpu import grouped_gemm, head, moe, sampling
from verl_tim.numerics.gpu.vocabulary_tile import TILE
from verl_tim.numerics.sampling import SamplingTensors, draw
from verl_tim.numerics.shards import VocabularyPart
from verl_tim.numerics.split_head import split_draw, split_logits

from ..bits import same_bits
from .devices import DEVICE, on_gpu, values
from .test_dispatch import routes
from .turns import in_turns

ON_GPU = DEVICE == "cuda"
VOCABS = (TILE, 2 * TILE, 4 * TILE + 1, 3 * TILE - 5)


def operand(*size: int, seed: int) -> torch.Tensor:
    if ON_GPU:
        return values(*size, seed=seed, scale=0.5)
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).bfloat16() / 4


def head_inputs(vocab: int, rows: int = 6):
    target = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    target[0], target[1] = 0, vocab - 1
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.5, 1.0])[torch.arange(rows) % 6]
    return operand(rows, 64, seed=0), operand(vocab, 64, seed=1), target.to(DEVICE), temperature.to(DEVICE)


@pytest.mark.parametrize("schedule", ["stream", "slabs"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probs_entropy_and_top1(vocab, ranks, schedule, monkeypatch):
    monkeypatch.setattr(head, "_FEW_ROWS", {"stream": 1 << 20, "slabs": -1}[schedule])
    hidden, weight, target, temperature = head_inputs(vocab)
    want = head.token_log_probs(hidden, weight, target, temperature, with_entropy=True, with_top1=True)

    def on_rank(shards):
        part = VocabularyPart(shards, vocab, TILE)
        return head.token_log_probs(
            hidden, weight[part.rows], target, temperature, with_entropy=True, with_top1=True, part=part
        )

    for got in in_turns(ranks, on_rank):
        assert torch.equal(got.top1_T, want.top1_T)
        for name in ("log_prob_T", "entropy_T", "max_T", "log_sum_T"):
            assert same_bits(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize(
    ("cuts", "vocab", "ranks"),
    [(*which, 3) for which in (("none", 513), ("some", 513), ("all", 300))] + [("some", TILE, 2)],
)
def test_draws(vocab, ranks, cuts, monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 256)
    rows = 8
    hidden, weight, _, temperature = head_inputs(vocab, rows)
    at = torch.arange(rows, device=DEVICE)
    cut = {"none": at < 0, "some": at % 2 == 0, "all": at >= 0}[cuts]
    params = SamplingTensors(
        torch.where(cut, 0.8, temperature),
        torch.where(cut, 5, -1),
        torch.where(cut, 0.9, 1.0),
        torch.zeros(rows, device=DEVICE),
        at * 7919 + (1 << 40),
        at + 5,
    )
    with interpreted_schedules():
        want = draw(hidden, weight, vocab, params)

        def on_rank(shards):
            part = VocabularyPart(shards, vocab, TILE)
            return split_draw(hidden, weight[part.rows], part, params), split_logits(hidden, weight[part.rows], part)

        for got, logits in in_turns(ranks, on_rank):
            for name in ("token_B", "top1_B"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name
            for name in ("log_prob_B", "kept_mass_B"):
                assert same_bits(getattr(got, name), getattr(want, name)), name
            assert same_bits(logits, (hidden.float() @ weight.float().t()) if not ON_GPU else logits)
    assert len(want.token_B.unique()) > 1


@pytest.mark.parametrize("name", list(grouped_gemm.schedules()))
def test_experts(name):
    experts, hidden, inner, top_k, ranks = 6, 48, 32, 2, 2
    x, gate_up = operand(20, hidden, seed=0), operand(experts, 2 * inner, hidden, seed=1)
    down = operand(experts, hidden, inner, seed=2)
    expert_TK = routes(20, experts, top_k)
    weight_TK = torch.tensor([0.75, 0.25], device=DEVICE).repeat(20, 1)
    want = moe.experts(x, expert_TK, weight_TK, gate_up, down, schedule=name)

    def on_rank(shards):
        gate = torch.arange(inner, device=DEVICE)[shards.part(inner, "inner")]
        own_gate_up = gate_up[:, torch.cat([gate, gate + inner])].contiguous()
        own_down = down[:, shards.part(hidden, "hidden")].contiguous()
        return moe.experts(x, expert_TK, weight_TK, own_gate_up, own_down, schedule=name, shards=shards)

    got = torch.cat(in_turns(ranks, on_rank), 1)
    if ON_GPU:
        assert same_bits(got, want)
    else:  # the inner rows are no integers, and the interpreter's products depend on the shape
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
def test_the_whole_model(kind):
    """Forward and draw of a split model. On a GPU bit by bit; the interpreter's products depend on the shape."""
    hf_model = tiny_model(kind, dtype=torch.bfloat16, num_hidden_layers=1, mlp_only_layers=[])
    token_T = torch.arange(ROWS) * 37 % 99
    at = torch.arange(ROWS, device=DEVICE)
    off = torch.ones(ROWS, device=DEVICE)
    params = SamplingTensors(off, at * 0 - 1, off, off * 0, at, at)
    with interpreted_schedules():
        whole = engine_of(hf_model, dtype=torch.bfloat16) if not ON_GPU else on_device(hf_model, Place())
        want = outcome(whole, token_T, params)

        def on_rank(shards):
            return outcome(on_device(hf_model, Place(shards)), token_T, params)

        for got in in_turns(2, on_rank):
            for a, b in zip(got, want, strict=True):
                if ON_GPU:
                    assert same_bits(a, b)
                else:
                    torch.testing.assert_close(a, b, atol=0.1, rtol=0.1)


def on_device(hf_model, place: Place):
    model = build_model(config_from_hf(hf_model.config), dtype=torch.bfloat16, device=DEVICE, place=place)
    model.load_weights(hf_model.state_dict().items())
    return model


def outcome(model, token_T, params):
    layers, kv_heads, dim = model.kv_shape
    k_pages, v_pages = (
        torch.zeros(layers, 9, 4, kv_heads, dim, dtype=model.dtype, device=model.device) for _ in range(2)
    )
    hidden = model.forward(token_T.to(model.device), batch(model.device), k_pages, v_pages)
    given = model.log_probs(hidden, params.position_B, params.temperature_B)
    return hidden.float(), given, model.draw(hidden[:2], params.rows(params.position_B[:2])).kept_mass_B


def test_sampling_module_gathers_logits_of_parts_without_columns():
    """A rank may have no tile at all."""
    hidden, weight, _, _ = head_inputs(TILE, 3)

    def on_rank(shards):
        part = VocabularyPart(shards, TILE, TILE)
        assert part.width == (TILE if shards.rank == 0 else 0)
        return sampling.gather_logits(hidden, weight[part.rows], part)

    first, second = in_turns(2, on_rank)
    assert same_bits(first, second)


@on_gpu
@pytest.mark.parametrize("rows", [1, 40, 130])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_a_real_vocabulary_has_the_same_bits(ranks, rows):
    vocab, inner = 151936, 1024
    hidden, weight = values(rows, inner, scale=0.5), values(vocab, inner, seed=1)
    at = torch.arange(rows, device=DEVICE)
    params = SamplingTensors(
        0.5 + at % 3 * 0.4,
        torch.where(at % 4 == 1, 20, -1),
        torch.where(at % 5 == 2, 0.9, 1.0),
        at * 0.0,
        at * 7919,
        at,
    )
    target = at * 991
    want, scored = draw(hidden, weight, vocab, params), head.token_log_probs(hidden, weight, target, 0.5 + at % 3 * 0.4)

    def on_rank(shards):
        part = VocabularyPart(shards, vocab, TILE)
        own = weight[part.rows]
        again = head.token_log_probs(hidden, own, target, 0.5 + at % 3 * 0.4, part=part)
        return split_draw(hidden, own, part, params), again

    for got, again in in_turns(ranks, on_rank):
        assert torch.equal(got.token_B, want.token_B)
        assert torch.equal(got.top1_B, want.top1_B)
        assert same_bits(got.log_prob_B, want.log_prob_B)
        assert same_bits(got.kept_mass_B, want.kept_mass_B)
        assert same_bits(again.log_prob_T, scored.log_prob_T)


@on_gpu
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2", "llama"])
def test_the_whole_model_has_the_same_bits(kind):
    test_the_whole_model(kind)
