"""Shapes of the small models: real Qwen3 and Qwen3-MoE, only narrow and shallow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.tokenizer import VOCAB_SIZE

MAX_POSITION_EMBEDDINGS = 1024

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        # transformers' 0.02 suits a hidden size in the thousands; narrow models learn several times faster from
        # 1/sqrt(hidden)-like
        "initializer_range": 0.08,
    }
)

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": MappingProxyType({**_COMMON, "intermediate_size": 192}),
        "qwen3_moe": MappingProxyType(
            {
                **_COMMON,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        ),
    }
)

_CLASSES: Mapping[str, tuple[type[Qwen3Config] | type[Qwen3MoeConfig], type[PreTrainedModel]]] = MappingProxyType(
    {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
)


def resolve_shape(kind: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration values of a kind, `overrides` on top. Raises InputError for an unknown kind or value name."""
    if kind not in SHAPES:
        raise InputError(f"kind: unknown model kind {kind!r}; known kinds: {', '.join(sorted(SHAPES))}")
    shape = {**SHAPES[kind], **(overrides or {})}
    unknown = sorted(set(shape) - set(SHAPES[kind]))
    if unknown:
        raise InputError(f"shape: {kind} has no {', '.join(unknown)}; it has {', '.join(sorted(SHAPES[kind]))}")
    if shape["vocab_size"] != VOCAB_SIZE:
        raise InputError(f"shape: vocab_size is the tokenizer's, {VOCAB_SIZE}")
    return shape


def config_of(kind: str, shape: Mapping[str, Any], **token_ids: int) -> Qwen3Config | Qwen3MoeConfig:
    """transformers' config of a resolved shape."""
    fields: dict[str, Any] = {**shape, **token_ids}
    return _CLASSES[kind][0](**fields, bos_token_id=None, dtype=torch.float32)


def init_model(
    kind: str, shape: Mapping[str, Any], *, eos_token_id: int, pad_token_id: int, seed: int
) -> PreTrainedModel:
    """A freshly initialised fp32 model, a function of its arguments; the global random state is left as it was."""
    model_class = _CLASSES[kind][1]
    config = config_of(kind, shape, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.generation_config.eos_token_id = eos_token_id
    model.generation_config.pad_token_id = pad_token_id
    return model
