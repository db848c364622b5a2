"""A model whose outputs are split over ranks, and whose layers are split over stages, has the bits of the whole one.

Ranks are threads here (`threads.py`); processes and the engine around them are tested in tests/engine/test_parallel*.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.threads import on_ranks
from verl_tim.models import WeightError, build_model, config_from_hf
from verl_tim.models.place import Place, misfits
from verl_tim.models.weights import checksum_of
from verl_tim.numerics import ContractError, PagedBatch, SamplingTensors
from verl_tim.numerics.contract import VOCAB_TILE
from verl_tim.numerics.head import token_log_probs

from .tiny import KINDS, engine_of, tiny_model

ROWS = 24  # of two sequences
SEVERAL_TILES = 2 * VOCAB_TILE + 77  # the last tile is ragged; over two ranks two and one, over four one has none


def model_bits(x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all()
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def params(rows: int) -> SamplingTensors:
    """Every kind of row: sampled, greedy, and each cut alone and together."""
    at = torch.arange(rows)
    return SamplingTensors(
        temperature_B=torch.tensor([1.0, 0.0, 0.6, 1.3])[at % 4],
        top_k_B=torch.tensor([-1, -1, 4, -1, 7])[at % 5],
        top_p_B=torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.9, 1.0])[at % 7],
        min_p_B=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0])[at % 6],
        seed_B=at * 977 + 5,
        position_B=at + 31,
    )


def batch(device: torch.device | str = "cpu") -> PagedBatch:
    starts, page_size, rows = [0, 13, 24], 4, ROWS
    position = torch.cat([torch.arange(13), torch.arange(11)])
    table = torch.tensor([[4, 2, 7, 1], [3, 8, 5, 0]])
    sequence = torch.tensor([0] * 13 + [1] * 11)
    slot = table[sequence, position // page_size] * page_size + position % page_size
    assert len(slot) == rows
    return PagedBatch(torch.tensor(starts), torch.tensor([13, 11]), table, slot, position, device=torch.device(device))


def run(model, token_T: torch.Tensor, received: torch.Tensor | None = None) -> torch.Tensor:
    layers, kv_heads, dim = model.kv_shape
    k_pages, v_pages = (torch.zeros(layers, 9, 4, kv_heads, dim, dtype=model.dtype) for _ in range(2))
    return model.forward(token_T, batch(), k_pages, v_pages, received=received)


def outcome(model, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    drawn = model.draw(hidden, params(ROWS))
    token = torch.arange(ROWS) * 211 % model.config.vocab_size
    return {
        "hidden": hidden,
        "logits": model.logits(hidden)[:, : model.config.vocab_size],
        "given": model.log_probs(hidden, token, params(ROWS).temperature_B),
        "log_prob": drawn.log_prob_B,
        "kept_mass": drawn.kept_mass_B,
        "token": drawn.token_B.to(torch.int32),
        "top1": drawn.top1_B.to(torch.int32),
    }


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(model_bits(got[name]), model_bits(value)), name


def split(hf_model, dtype: torch.dtype, place: Place):
    model = build_model(config_from_hf(hf_model.config), dtype=dtype, device="cpu", place=place)
    model.load_weights(hf_model.state_dict().items())
    return model


CASES = [
    *[(kind, dtype, {}) for kind in KINDS for dtype in (torch.bfloat16,)],
    ("qwen3", torch.float32, {"tie_word_embeddings": True}),
    ("qwen3_moe", torch.float32, {}),
    ("qwen3", torch.bfloat16, {"vocab_size": SEVERAL_TILES}),
    ("llama", torch.bfloat16, {"vocab_size": SEVERAL_TILES, "tie_word_embeddings": True}),
    ("qwen2", torch.float32, {"vocab_size": 2 * VOCAB_TILE, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kind", "dtype", "changes"), CASES, ids=str)
def test_outputs_split_over_ranks(kind, dtype, changes, ranks):
    heads = {"num_attention_heads": 8} if kind.startswith("qwen3") else {}
    hf_model = tiny_model(kind, dtype=dtype, num_key_value_heads=4, **heads, **changes)
    whole = engine_of(hf_model, dtype=dtype)
    token_T = torch.arange(ROWS) * 37 % whole.config.vocab_size
    want = outcome(whole, run(whole, token_T))
    want |= dict(zip(("log_prob2", "entropy"), entropy(whole, want["hidden"], None), strict=True))

    def on_rank(shards):
        model = split(hf_model, dtype, Place(shards))
        assert model.nbytes < whole.nbytes
        got = outcome(model, run(model, token_T))
        got |= dict(zip(("log_prob2", "entropy"), entropy(model, got["hidden"], model._part), strict=True))
        return got, model.weight_checksum()

    for got, checksum in on_ranks(ranks, on_rank):
        same(got, want)
        assert checksum == whole.weight_checksum()


def entropy(model, hidden: torch.Tensor, part):
    token = torch.arange(ROWS) * 17 % model.config.vocab_size
    temperature = params(ROWS).temperature_B
    if part is None:
        weight = model._head[: model.config.vocab_size].to(model.dtype)
        return token_log_probs(hidden, weight, token, temperature, with_entropy=True)
    from verl_tim.numerics.split_head import split_log_probs

    return split_log_probs(hidden, model._head, part, token, temperature, with_entropy=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (1, 3), (2, 3)])
def test_layers_split_over_stages(kind, tied, ranks, stages):
    dtype = torch.bfloat16
    hf_model = tiny_model(kind, dtype=dtype, tie_word_embeddings=tied, vocab_size=SEVERAL_TILES)
    whole = engine_of(hf_model, dtype=dtype)
    token_T = torch.arange(ROWS) * 37 % whole.config.vocab_size
    want = outcome(whole, run(whole, token_T))

    def on_rank(shards):
        received, digests = None, {}
        for stage in range(stages):
            model = split(hf_model, dtype, Place(shards, stage, stages))
            assert model.kv_shape[0] == 3 // stages + (stage < 3 % stages)
            received = run(model, token_T, received)
            digests |= model.weight_digests()
        return outcome(model, received), checksum_of(digests)

    results = [on_rank(Place().shards)] if ranks == 1 else on_ranks(ranks, on_rank)
    for got, checksum in results:
        same(got, want)
        assert checksum == whole.weight_checksum()


def test_a_row_with_broken_logits_does_not_stop_the_others():
    hf_model = tiny_model("qwen3", vocab_size=SEVERAL_TILES)
    whole = engine_of(hf_model, dtype=torch.float32)
    hidden = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))
    hidden[[3, 8]] = torch.nan
    want = whole.draw(hidden, params(ROWS))

    def on_rank(shards):
        return split(hf_model, torch.float32, Place(shards)).draw(hidden, params(ROWS))

    for got in on_ranks(2, on_rank):
        assert torch.isnan(got.log_prob_B).nonzero()[:, 0].tolist() == [3, 8]
        fine = ~torch.isnan(want.log_prob_B)
        assert torch.equal(got.token_B[fine], want.token_B[fine])
        assert torch.equal(model_bits(got.log_prob_B[fine]), model_bits(want.log_prob_B[fine]))


def test_strict_loading_on_every_rank():
    """A rank checks weights that it keeps a part of, or none of, as one that keeps all does."""
    hf_model = tiny_model("qwen3", dtype=torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    config = config_from_hf(hf_model.config)
    name = "model.layers.0.self_attn.k_proj.weight"
    broken = [
        ({**state, name: state[name][:-1]}, rf"'{name}' is \(63, 64\), the model needs \(64, 64\)"),
        ({key: value for key, value in state.items() if key != name}, f"1 of .* weights are missing: {name}"),
        ({**state, "model.layers.7.mlp.up_proj.weight": state[name]}, "layers.7.mlp.up_proj.weight' is unknown"),
    ]
    for weights, message in broken:

        def on_rank(shards, weights=weights, message=message):
            shards.all(torch.zeros(1))  # the ranks' only meeting: loading needs none
            for stage in range(2):
                model = build_model(config, dtype=torch.bfloat16, device="cpu", place=Place(shards, stage, 2))
                with pytest.raises(WeightError, match=message):
                    model.load_weights(weights.items())

        on_ranks(2, on_rank)


def test_what_cannot_be_split_is_named():
    config = config_from_hf(tiny_model("qwen3_moe").config)
    assert misfits(config, 2, 3) == []
    ((key, reason),) = misfits(config, 4, 1)
    assert key == "tensor_parallel_size"
    assert "num_key_value_heads=2: choose 2 or less" in reason
    ((key, reason),) = misfits(dataclasses.replace(config, num_kv_heads=4), 1, 4)
    assert key == "pipeline_parallel_size"
    assert "4 stages for 3 layers" in reason

    def on_rank(shards):
        shards.all(torch.zeros(1))
        split(tiny_model("qwen3"), torch.bfloat16, Place(shards))

    with pytest.raises(ContractError, match="num_key_value_heads=2"):
        on_ranks(4, on_rank)
