"""Random models in published shapes, shrunk here so that making one takes a moment."""

from __future__ import annotations

import pytest
import torch

from verl_tim.tasks import random_model
from verl_tim.tasks.errors import InputError

TINY = {"vocab_size": 640, "head_dim": 16}


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch):
    dense = {**random_model._shape(64, 96, 3, 4, 2, True), **TINY}
    moe = {**random_model._shape(64, 96, 3, 4, 2, False, moe_intermediate_size=32, **random_model._MOE), **TINY}
    narrow = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, **TINY}
    others = {name: {**random_model.SHAPES[name], **narrow} for name in ("qwen2.5-0.5b", "llama-3.2-1b")}
    monkeypatch.setattr(random_model, "SHAPES", {"dense": dense, "moe": {**moe, "num_experts": 8}, **others})


@pytest.mark.parametrize("shape", ["dense", "moe", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_logits_are_peaked_and_the_seed_decides_them(shape):
    first, again, other = (random_model.random_model(shape, layers=2, seed=seed) for seed in (1, 1, 2))
    assert len(first.model.layers) == 2
    token = torch.arange(640)[None]
    with torch.no_grad():
        logits = first(token).logits
        assert torch.equal(again(token).logits, logits)
        assert not torch.equal(other(token).logits, logits)
    assert 0.7 * random_model.LOGIT_STD < float(logits.std()) < 1.3 * random_model.LOGIT_STD


@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "llama-3.2-1b"])
def test_other_families_are_published_shapes_that_the_contract_covers(tmp_path, shape):
    from verl_tim.models import load_model_config

    config = load_model_config(str(random_model.save_random_model(shape, tmp_path / "model", layers=1)))
    assert (config.num_layers, config.hidden_size) == (1, 64)
    model = random_model.random_model(shape, layers=1)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(".bias")]
    assert len(biases) == (3 if shape.startswith("qwen2") else 0)
    assert all(bias.std() > 0.05 for bias in biases)


def test_the_folder_is_a_checkpoint_that_the_contract_covers(tmp_path):
    from verl_tim.models import load_model_config

    folder = random_model.save_random_model("moe", tmp_path / "moe", layers=1)
    config = load_model_config(str(folder))
    assert (config.num_layers, config.hidden_size) == (1, 64)
    assert config.moe is not None
    assert config.moe.num_experts == 8
    with pytest.raises(InputError, match="is not empty"):
        random_model.save_random_model("moe", folder)


def test_the_tokenizer_has_as_many_tokens_as_the_model_has_rows(tmp_path):
    """vLLM may draw from the tokenizer's tokens only (vllm_async_server.py:503); the trainer normalises over all."""
    from verl_tim.tasks.tokenizer import load_tokenizer

    folder = random_model.save_random_model("dense", tmp_path / "dense", layers=1)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 640
    assert tokenizer.decode([639]) == "<639>"


@pytest.mark.parametrize(
    ("shape", "layers", "message"), [("gpt", None, "choose one of dense, moe, "), ("dense", 4, "has 3")]
)
def test_what_does_not_exist_is_refused(shape, layers, message):
    with pytest.raises(InputError, match=message):
        random_model.hf_config(shape, layers=layers)
