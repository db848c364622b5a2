"""What this package must know of a Hugging Face model, read once, frozen, and checked against what it can serve
exactly."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_tim.models.architecture import Architecture, architectures
from verl_tim.numerics.probe import ProbeShapes

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "max_position_embeddings")  # fmt: skip
_MOE_SIZES = ("num_experts", "moe_intermediate_size", "decoder_sparse_step")


class ModelError(ValueError):
    """A model folder or config that cannot be served. The message names the file or key and the remedy."""


@dataclass(frozen=True)
class RopeSpec:
    """Inverse frequencies (float32 values held as Python floats) and the factor on cos and sin."""

    kind: str
    inverse_frequencies: tuple[float, ...]
    scaling: float


@dataclass(frozen=True)
class MoEConfig:
    """Experts, experts per token, inner size of an expert, whether top-k weights are renormalised, sparse layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """The fields of an HF config that the engine and the trainer's table read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rope: RopeSpec
    rms_norm_eps: float
    tie_word_embeddings: bool
    moe: MoEConfig | None

    @property
    def arch(self) -> Architecture:
        return architectures()[self.architecture]

    @property
    def probe_shapes(self) -> ProbeShapes:
        """What `verl_tim.numerics.probe.probe` should check for this model."""
        heads, kv_heads, hidden = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden_size
        qkv = ((heads, kv_heads, kv_heads), hidden)
        linears: dict[tuple[tuple[int, ...], int], None] = {qkv: None, ((hidden,), heads): None}
        if any(not self.is_moe_layer(i) for i in range(self.num_layers)):
            linears[(self.intermediate_size, self.intermediate_size), hidden] = None
            linears[(hidden,), self.intermediate_size] = None
        moe = self.moe
        return ProbeShapes(
            linears=tuple(linears),
            hidden_size=hidden,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            widths=(hidden, self.head_dim) if self.arch.qk_norm else (hidden,),
            intermediate_size=self.intermediate_size if moe is None else moe.intermediate_size,
            moe=None if moe is None else (moe.num_experts, moe.top_k, moe.intermediate_size),
            biased=(qkv,) if self.arch.qkv_bias else (),
        )

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers


def _refuse(condition: bool, key: str, value: Any, remedy: str, *, file: str = "config.json") -> None:
    if condition:
        raise ModelError(f"{file}: {key}={value!r} is not supported; {remedy}")


def _refuse_no_sizes(hf: PretrainedConfig, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = getattr(hf, key)
        _refuse(not isinstance(value, int) or value < 1, key, value, "it must be a whole number above 0")


def _rope_spec(hf: PretrainedConfig, head_dim: int) -> RopeSpec:
    parameters = dict(hf.rope_parameters or {})
    kind = parameters.get("rope_type", "default")
    _refuse(kind not in _ROPE_TYPES, "rope_parameters.rope_type", kind, f"supported: {', '.join(_ROPE_TYPES)}")
    _refuse(
        parameters.get("partial_rotary_factor", 1.0) != 1.0,
        "rope_parameters.partial_rotary_factor",
        parameters.get("partial_rotary_factor"),
        "only rotation of the whole head is supported",
    )
    cpu = torch.device("cpu")
    remedy = "its numbers must give finite frequencies above 0"
    try:
        with cpu:  # an outer torch.device("meta") must not reach the table
            if kind == "default":
                # transformers: compute_default_rope_parameters, the same expression in every model file.
                exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(device=cpu, dtype=torch.float) / head_dim
                frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
            else:
                frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, cpu)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"config.json: rope_parameters={parameters!r} is not supported ({error}); {remedy}") from error
    usable = bool((frequencies.isfinite() & (frequencies > 0)).all()) and 0.0 < scaling < math.inf
    _refuse(not usable, "rope_parameters", parameters, remedy)
    return RopeSpec(kind, tuple(frequencies.to(torch.float32).tolist()), float(scaling))


def _moe_config(hf: PretrainedConfig) -> MoEConfig:
    _refuse_no_sizes(hf, _MOE_SIZES)
    step, dense = hf.decoder_sparse_step, set(hf.mlp_only_layers or ())
    layers = frozenset(i for i in range(hf.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    _refuse(
        not 1 <= hf.num_experts_per_tok <= hf.num_experts,
        "num_experts_per_tok",
        hf.num_experts_per_tok,
        f"it must lie between 1 and num_experts={hf.num_experts}",
    )
    return MoEConfig(hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, hf.norm_topk_prob, layers)


def _eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a sequence, by the file that names them: each a token id, a list of them or None."""
    ids: list[int] = []
    for file, value in values.items():
        tokens = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        usable = all(isinstance(token, int) for token in tokens)
        _refuse(not usable, "eos_token_id", value, "it must be a token id, or a list of them", file=file)
        for token in tokens:
            if token not in ids:
                ids.append(token)
    return tuple(ids)


def config_from_hf(hf: PretrainedConfig, *, generation_eos: Any = None) -> ModelConfig:
    """`ModelConfig` of a transformers config object. Raises `ModelError` naming the key that cannot be served."""
    names = list(getattr(hf, "architectures", None) or ())
    architecture = next((a for a in architectures().values() if a.model_type == hf.model_type), None)
    if architecture is None:
        raise ModelError(
            f"config.json: model_type={hf.model_type!r} (architectures={names}) is not supported; supported are "
            + ", ".join(f"{a.name} ({a.model_type})" for a in architectures().values())
        )
    _refuse(
        bool(names) and architecture.name not in names,
        "architectures",
        names,
        f"expected {architecture.name}, the causal language model",
    )
    quantised = getattr(hf, "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
    _refuse(
        quantised is not None,
        "quantization_config.quant_method",
        method,
        "give a checkpoint whose weights are not quantised",
    )
    _refuse_no_sizes(hf, _SIZES)
    eps = hf.rms_norm_eps
    _refuse(not 0.0 <= eps < math.inf, "rms_norm_eps", eps, "it must be finite and not negative")
    _refuse(hf.hidden_act != "silu", "hidden_act", hf.hidden_act, "supported: 'silu'")
    _refuse(bool(hf.attention_dropout), "attention_dropout", hf.attention_dropout, "set it to 0.0")
    _refuse(
        bool(getattr(hf, "use_sliding_window", False)), "use_sliding_window", True, "only full attention is supported"
    )
    # a config without that switch (Mistral's) means its window, and one with layer types means each of them
    window = None if hasattr(hf, "use_sliding_window") else getattr(hf, "sliding_window", None)
    _refuse(window is not None, "sliding_window", window, "only full attention is supported")
    other = sorted(set(getattr(hf, "layer_types", None) or ()) - {"full_attention"})
    _refuse(bool(other), "layer_types", other, "only full attention is supported")
    for key in ("attention_bias", "mlp_bias"):
        _refuse(bool(getattr(hf, key, False)), key, True, "only the architecture's usual biases are supported")
    head_dim = getattr(hf, "head_dim", None)
    head_dim = hf.hidden_size // hf.num_attention_heads if head_dim is None else head_dim
    _refuse(head_dim < 1 or head_dim % 16 != 0, "head_dim", head_dim, "it must be a multiple of 16")
    kv_heads = hf.num_attention_heads if hf.num_key_value_heads is None else hf.num_key_value_heads
    _refuse(
        kv_heads < 1 or hf.num_attention_heads % kv_heads != 0,
        "num_key_value_heads",
        kv_heads,
        f"it must divide num_attention_heads={hf.num_attention_heads}",
    )
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        eos_token_ids=_eos_ids({"config.json": hf.eos_token_id, "generation_config.json": generation_eos}),
        rope=_rope_spec(hf, head_dim),
        rms_norm_eps=eps,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        moe=_moe_config(hf) if architecture.moe else None,
    )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from error


def load_model_config(path: str | Path) -> ModelConfig:
    """Read ``config.json`` (and the eos ids of ``generation_config.json``) of a local Hugging Face folder.

    Raises `ModelError` when the folder or file is missing, is not a Hugging Face config, or cannot be served.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(folder)!r} does not exist; give a local Hugging Face model folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{str(folder)!r} has no config.json, so it is not a Hugging Face model folder")
    raw = _read_json(file)
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise ModelError(f"{file}: has no model_type, so it is not a Hugging Face model config")
    supported = {a.model_type for a in architectures().values()}
    if not isinstance(raw["model_type"], str) or raw["model_type"] not in supported:
        raise ModelError(f"{file}: model_type={raw['model_type']!r} is not supported; supported: {sorted(supported)}")
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (TypeError, ValueError, KeyError, ArithmeticError, OSError, StrictDataclassError) as error:
        raise ModelError(f"{file}: transformers cannot read it ({error})") from error
    generation_file = folder / "generation_config.json"
    generation_eos = None
    if generation_file.is_file():
        generation = _read_json(generation_file)
        if not isinstance(generation, dict):
            raise ModelError(f"{generation_file}: holds no keys; remove it, or write the model's generation config")
        generation_eos = generation.get("eos_token_id")
    return config_from_hf(hf, generation_eos=generation_eos)
