from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from verl_tim.models import WeightError, build_model, config_from_hf, load_model_config, weight_checksum
from verl_tim.numerics import ContractError, PagedBatch

from .tiny import DTYPES, KINDS, VOCAB, PagedRunner, Sequence, engine_of, perturb, sampling, tiny_model

TOKENS = torch.randint(0, VOCAB, (77,), generator=torch.Generator().manual_seed(0)).tolist()


def _logits(model, page_size: int = 16) -> torch.Tensor:
    """Prefill of one sequence in three chunks."""
    runner = PagedRunner(model, page_size=page_size, num_pages=100)
    sequence = Sequence(list(TOKENS), len(TOKENS), 0, 1.0)
    return model.logits(torch.cat([runner.step([(sequence, n)]) for n in (40, 1, 36)]))[:, :VOCAB]


@pytest.mark.parametrize("numerics", ["contract", "stock"])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers_in_float32(kind, numerics):
    hf_model = tiny_model(kind)
    with torch.no_grad():
        want = hf_model(torch.tensor([TOKENS])).logits[0]
    got = _logits(engine_of(hf_model, dtype=torch.float32, numerics=numerics))
    assert torch.allclose(got, want, atol=2e-4 * want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_stock_has_the_rounding_points_of_transformers(kind):
    """In bfloat16 the stock engine is nearer to transformers than the contract, which keeps float32 RoPE and logits."""
    hf_model = tiny_model(kind, dtype=torch.bfloat16)
    with torch.no_grad():
        want = hf_model(torch.tensor([TOKENS])).logits[0].float()
    stock = (_logits(engine_of(hf_model, dtype=torch.bfloat16, numerics="stock")) - want).abs().mean()
    contract = (_logits(engine_of(hf_model, dtype=torch.bfloat16)) - want).abs().mean()
    assert stock < contract < 0.05 * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_loads_a_saved_checkpoint(kind, tied, dtype, tmp_path):
    """From the folder that save_pretrained writes (packed or per-expert names), with one checksum on both sides."""
    hf_model = tiny_model(kind, dtype=dtype, tie_word_embeddings=tied)
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    for numerics in ("contract", "stock"):
        model = build_model(load_model_config(tmp_path), dtype=dtype, device="cpu", numerics=numerics)
        model.load_checkpoint(tmp_path)
        assert model.weight_checksum() == weight_checksum(hf_model.named_parameters(), dtype)
        loaded = dict(model.named_weights())
        assert torch.equal(loaded["model.layers.1.mlp.up_proj.weight"], hf_model.model.layers[1].mlp.up_proj.weight)


def test_a_float32_stream_is_rounded_as_fsdp2_rounds():
    hf_model = tiny_model("qwen3")
    model = engine_of(hf_model, dtype=torch.bfloat16)
    assert model.weight_checksum() == engine_of(hf_model.to(torch.bfloat16), dtype=torch.bfloat16).weight_checksum()


@pytest.mark.parametrize("head_first", [False, True, None])
def test_a_tied_head_may_be_absent_or_come_in_any_order(head_first):
    hf_model = tiny_model("qwen3", tie_word_embeddings=True)
    weights = [(n, t) for n, t in hf_model.state_dict().items() if n != "lm_head.weight"]
    head = ("lm_head.weight", hf_model.lm_head.weight)
    if head_first is not None:
        weights.insert(0 if head_first else len(weights), head)
    model = build_model(config_from_hf(hf_model.config), dtype=torch.float32, device="cpu")
    model.load_weights(iter(weights))
    assert model.weight_checksum() == weight_checksum(hf_model.named_parameters(), torch.float32)


def _change(weights, how):
    weights = dict(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    if how == "unknown":
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif how == "missing":
        del weights[name]
    elif how == "misshapen":
        weights[name] = weights[name][:-1]
    elif how == "integer":
        weights[name] = weights[name].to(torch.int8)
    elif how == "duplicate":
        return [*weights.items(), (name, weights[name])]
    return list(weights.items())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown", r"'model.layers.9.mlp.up_proj.weight' is unknown"),
        ("missing", r"1 of 36 weights are missing: model.layers.1.self_attn.k_proj.weight"),
        ("misshapen", r"k_proj.weight' is \(63, 64\), the model needs \(64, 64\)"),
        ("integer", r"k_proj.weight' is torch.int8"),
        ("duplicate", r"k_proj.weight' came twice"),
    ],
)
def test_strict_loading_names_the_weight_and_the_model_refuses_to_run(how, message):
    hf_model = tiny_model("qwen3")
    model = engine_of(hf_model, dtype=torch.float32)
    with pytest.raises(WeightError, match=message):
        model.load_weights(_change(hf_model.state_dict(), how))
    with pytest.raises(WeightError, match="no complete set of weights"):
        _logits(model)
    with pytest.raises(WeightError, match="no complete set"):
        model.weight_checksum()
    model.load_weights(hf_model.state_dict().items())
    assert torch.isfinite(_logits(model)).all()


def test_a_stream_that_breaks_off_leaves_no_half_loaded_model():
    hf_model = tiny_model("qwen3")
    model = engine_of(hf_model, dtype=torch.float32)

    def broken():
        yield next(iter(hf_model.state_dict().items()))
        raise ConnectionError("sender died")

    with pytest.raises(ConnectionError):
        model.load_weights(broken())
    with pytest.raises(WeightError, match="no complete set of weights"):
        _logits(model)


def test_an_untied_head_given_to_a_tied_model_is_refused():
    hf_model = tiny_model("qwen3", tie_word_embeddings=True)
    model = build_model(config_from_hf(hf_model.config), dtype=torch.float32, device="cpu")
    weights = {**hf_model.state_dict(), "lm_head.weight": torch.ones(VOCAB, 64)}
    with pytest.raises(WeightError, match="differs from"):
        model.load_weights(weights.items())


def test_checkpoint_folders_that_cannot_be_read(tmp_path):
    model = build_model(config_from_hf(tiny_model("qwen3").config), dtype=torch.float32, device="cpu")
    with pytest.raises(WeightError, match=r"has no \*.safetensors"):
        model.load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(WeightError, match="not a readable safetensors file"):
        model.load_checkpoint(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"y": "absent.safetensors"}}')
    with pytest.raises(WeightError, match=r"lacks absent\.safetensors"):
        model.load_checkpoint(tmp_path)


@pytest.mark.parametrize("numerics", ["contract", "stock"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_of_a_weight_goes_stale(kind, numerics):
    """After an update the model is the one that a fresh load of the same weights gives, in every output bit."""
    hf_model = tiny_model(kind)
    model = engine_of(hf_model, dtype=torch.bfloat16, numerics=numerics)
    before = _logits(model)
    perturb(hf_model)
    model.load_weights(hf_model.state_dict().items())
    after = _logits(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, _logits(engine_of(hf_model, dtype=torch.bfloat16, numerics=numerics)))


@pytest.mark.parametrize("numerics", ["contract", "stock"])
def test_release_frees_and_reload_restores(numerics):
    hf_model = tiny_model("qwen3_moe")
    model = engine_of(hf_model, dtype=torch.float32, numerics=numerics)
    want, size = _logits(model), model.nbytes
    parameters = sum(p.nbytes for p in hf_model.parameters())
    assert size >= parameters
    model.release_weights()
    assert model.nbytes == 0
    with pytest.raises(WeightError, match="no complete set"):
        _logits(model)
    model.load_weights(hf_model.state_dict().items())
    assert torch.equal(_logits(model), want)
    assert model.nbytes == size


def test_contract_wants_padded_rows_and_fitting_slots():
    model = engine_of(tiny_model("qwen3"), dtype=torch.float32)
    pages = torch.zeros(3, 3, 4, 2, 32)
    one = torch.tensor([0])

    def batch(rows):
        zero = torch.zeros(rows, dtype=torch.int64)
        return PagedBatch(torch.tensor([0, 1]), one + 1, one[None] + 1, zero + 4, zero)

    with pytest.raises(ContractError, match="5 rows; pad them to a multiple of 8"):
        model.forward(torch.zeros(5, dtype=torch.int64), batch(5), pages, pages)
    with pytest.raises(ContractError, match="8 token ids but 16 slots"):
        model.forward(torch.zeros(8, dtype=torch.int64), batch(16), pages, pages)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float16), ("meta", torch.bfloat16)])
def test_refuses_to_be_built_without_a_contract(device, dtype):
    config = config_from_hf(tiny_model("qwen3").config)
    with pytest.raises(ContractError, match="numerics contract"):
        build_model(config, dtype=dtype, device=device)
    build_model(config, dtype=dtype, device=device, numerics="stock")
    with pytest.raises(ContractError, match="numerics='fast' is unknown"):
        build_model(config, dtype=torch.float32, device="cpu", numerics="fast")


def test_stock_samples_score_with_log_softmax():
    model = engine_of(tiny_model("qwen3"), dtype=torch.bfloat16, numerics="stock")
    logits = _logits(model)
    rows = torch.arange(logits.shape[0])
    drawn = model.sample(logits, sampling(torch.where(rows < 5, 0.0, 0.7), rows, rows))
    scores = torch.log_softmax(logits / torch.where(rows < 5, 1.0, 0.7)[:, None], -1)
    assert torch.equal(drawn.log_prob_B, scores.gather(1, drawn.token_B[:, None])[:, 0])
    assert torch.equal(drawn.token_B[:5], logits[:5].argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_probe_passes_at_this_models_shapes(kind):
    report = engine_of(tiny_model(kind), dtype=torch.bfloat16).probe()
    assert report.contract == "chunk64/cpu-e/bfloat16/1"
    assert any(name.startswith("moe(") for name in report.comparisons) == (kind == "qwen3_moe")
    assert sum(report.comparisons.values()) > 60
