"""Random models in the shape of published ones: for parity, speed and memory, not for learning.

Nothing is downloaded. The weights are random at Hugging Face's scale, and the final norm is scaled so that the logits
are peaked, as those of a trained model are: parity of flat distributions shows little.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.tokenizer import build_tokenizer

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
_MOE: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    """Fields of a transformers config; `family` is the first part of its classes' names."""
    return {
        "family": "Qwen3Moe" if "num_experts" in more else "Qwen3",
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, False),
    "qwen3-30b-a3b": _shape(2048, 6144, 48, 32, 4, False, moe_intermediate_size=768, **_MOE),
    # heads of 64, biases and no norm of queries and keys
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, True, family="Qwen2", head_dim=64, max_position_embeddings=32768),
    # heads of 64, another vocabulary, frequencies of RoPE scaled
    "llama-3.2-1b": _shape(
        2048, 8192, 16, 32, 8, True, family="Llama", head_dim=64, vocab_size=128256, rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
"""Sources: config.json of Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -30B-A3B, Qwen/Qwen2.5-0.5B, meta-llama/Llama-3.2-1B."""

LOGIT_STD = 10.0  # of the random logits; the most probable of 151,936 tokens then has about half of the mass
_INITIAL_STD = 0.02


def hf_config(shape: str, *, layers: int | None = None) -> Any:
    """The transformers config of a shape; `layers` cuts its depth. Raises `InputError` for an unknown shape."""
    import transformers

    if shape not in SHAPES:
        raise InputError(f"shape {shape!r} is unknown; choose one of {', '.join(SHAPES)}")
    fields = dict(SHAPES[shape])
    if layers is not None:
        if not 1 <= layers <= fields["num_hidden_layers"]:
            raise InputError(f"layers={layers}: {shape} has {fields['num_hidden_layers']}; choose 1 to that")
        fields["num_hidden_layers"] = layers
    family = fields.pop("family")
    if "rope_parameters" in fields:
        del fields["rope_theta"]  # it is among them
    config = getattr(transformers, f"{family}Config")(**fields, initializer_range=_INITIAL_STD)
    config.architectures = [f"{family}ForCausalLM"]
    return config


def random_model(
    shape: str, *, layers: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:  # fmt: skip
    """A random Hugging Face model of that shape with peaked logits, made on the device."""
    import transformers

    config = hf_config(shape, layers=layers)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, config.architectures[0])(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # which are 1 and 0 at the start, and would not be missed
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.model.norm.weight.mul_(LOGIT_STD / (_INITIAL_STD * math.sqrt(config.hidden_size)))
    return model


def save_random_model(
    shape: str, folder: Path, *, layers: int | None = None, device: torch.device | str = "cpu", seed: int = 0
) -> Path:
    """Write such a model in bfloat16 to a new folder, with the small models' tokenizer, filled up to the model's rows.

    Filled up, since vLLM draws from the tokenizer's tokens only, and a trainer normalises over all rows: with 512 of
    151,936 tokens every log-prob was off by some 14 nats.

    Raises:
        InputError: the folder exists and is not empty, or the shape is unknown.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a new folder")
    model = random_model(shape, layers=layers, device=device, dtype=torch.bfloat16, seed=seed)
    tokens = build_tokenizer(model_max_length=model.config.max_position_embeddings, vocab_size=model.config.vocab_size)
    model.config.eos_token_id, model.config.pad_token_id = tokens.eos_token_id, tokens.pad_token_id
    model.generation_config.eos_token_id = tokens.eos_token_id
    model.generation_config.pad_token_id = tokens.pad_token_id
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder
