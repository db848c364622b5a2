from __future__ import annotations

import json

import pytest
import torch

from verl_tim.models import ModelError, config_from_hf, load_model_config
from verl_tim.numerics.rope import RopeTable

from .tiny import KINDS, tiny_config, tiny_model


def _write(folder, **content):
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_reads_a_saved_model(kind, tmp_path):
    hf = tiny_config(kind)
    hf.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.architecture == hf.architectures[0]
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (99, 64, 3)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.head_dim == {"qwen3": 32}.get(kind, 16)
    assert config.eos_token_ids == (1,)
    assert (config.moe is not None) == (kind == "qwen3_moe")
    assert config == config_from_hf(hf)
    hash(config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_knows_which_linears_have_a_bias(kind):
    shapes = config_from_hf(tiny_config(kind)).probe_shapes
    assert shapes.biased == (shapes.linears[:1] if kind == "qwen2" else ())


def test_moe_layers_follow_the_config():
    config = config_from_hf(tiny_config("qwen3_moe"))
    assert config.moe.layers == {0, 2}
    assert [config.is_moe_layer(i) for i in range(3)] == [True, False, True]
    assert config_from_hf(tiny_config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[])).moe.layers == {1}


def test_eos_ids_of_the_generation_config_are_added(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}), encoding="utf-8")
    assert load_model_config(tmp_path).eos_token_ids == (1, 5)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_tables_are_those_of_transformers_in_float32(rope, kind):
    """Bit for bit, whatever dtype the model was cast to: the buffer is never read."""
    hf_model = tiny_model(kind, rope_parameters=ROPES[rope])
    position = torch.arange(300)
    cos, sin = hf_model.model.rotary_emb(torch.zeros(1, 300, 64), position[None])
    config = config_from_hf(hf_model.to(torch.bfloat16).config)
    got = RopeTable(config.rope.inverse_frequencies, config.rope.scaling, 1024, "cpu").at(position, 300)
    half = config.head_dim // 2
    assert torch.equal(got[0], cos[0, :, :half])
    assert torch.equal(got[1], sin[0, :, :half])
    assert config.rope.kind == rope


def test_a_meta_device_context_does_not_reach_the_table():
    with torch.device("meta"):
        assert config_from_hf(tiny_config("llama")).rope.inverse_frequencies[0] == 1.0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window=True"),
        ("qwen3", {"head_dim": 24}, "head_dim=24"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("qwen3", {"head_dim": 0}, "head_dim=0"),
        ("qwen3", {"head_dim": -16}, "head_dim=-16"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_parameters=.*frequencies"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters=.*frequencies"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "rope_parameters="),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}}, "rope_parameters="),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method='fp8'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts=0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ],
)
def test_refuses_what_it_cannot_serve_exactly(kind, changes, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(tiny_config(kind, **changes))


def test_refuses_another_head():
    config = tiny_config("qwen3")
    config.architectures = ["Qwen3ForSequenceClassification"]
    with pytest.raises(ModelError, match="expected Qwen3ForCausalLM"):
        config_from_hf(config)


def test_names_what_is_wrong_with_a_folder(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model_config(tmp_path)
    with pytest.raises(ModelError, match="has no model_type"):
        load_model_config(_write(tmp_path, hello=1))
    with pytest.raises(ModelError, match=r"model_type='gpt2' is not supported; supported: \['llama', 'qwen2'"):
        load_model_config(_write(tmp_path, model_type="gpt2"))
    with pytest.raises(ModelError, match="transformers cannot read it"):
        load_model_config(_write(tmp_path, model_type="qwen3", hidden_size="wide"))
    with pytest.raises(ModelError, match="transformers cannot read it"):
        load_model_config(_write(tmp_path, model_type="llama", num_attention_heads=0))
    with pytest.raises(ModelError, match=r"model_type=\['llama'\] is not supported"):
        load_model_config(_write(tmp_path, model_type=["llama"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"generation_config\.json: not valid JSON"),
        ("[]", r"generation_config\.json: holds no keys"),
        ('{"eos_token_id": "</s>"}', r"generation_config\.json: eos_token_id='</s>'"),
        ('{"eos_token_id": [1, null]}', r"generation_config\.json: eos_token_id=\[1, None\]"),
    ],
)
def test_names_what_is_wrong_with_a_generation_config(content, message, tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path)
