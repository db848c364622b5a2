"""What tells one supported architecture from another. All are pre-norm decoders with grouped-query attention, RoPE
and SwiGLU; `contract_layer` serves them all, on both sides, by these flags. `register` adds one (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_tim import extensions


@dataclass(frozen=True)
class Architecture:
    """name: the HF class; qk_norm: RMSNorm on each head of q and k; qkv_bias: bias on q, k, v; moe: sparse MLP."""

    name: str
    model_type: str
    qk_norm: bool
    qkv_bias: bool
    moe: bool


QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, qkv_bias=False, moe=False)
QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, qkv_bias=False, moe=True)
QWEN2 = Architecture("Qwen2ForCausalLM", "qwen2", qk_norm=False, qkv_bias=True, moe=False)
LLAMA = Architecture("LlamaForCausalLM", "llama", qk_norm=False, qkv_bias=False, moe=False)

_KNOWN = {a.name: a for a in (QWEN3, QWEN3_MOE, QWEN2, LLAMA)}


def register(architecture: Architecture) -> None:
    """Serve one more Hugging Face class, whose decoder layer is the one described above with these flags.

    Weights must have the names and modules of Llama's (`self_attn.{q,k,v,o}_proj`, `mlp.{gate,up,down}_proj`, the two
    norms). Whether the layer really is that one, `verl-tim verify` and `verl-tim verify --layers` tell.

    Raises:
        ValueError: the name or the model type is taken by another architecture.
    """
    for known in _KNOWN.values():
        taken = known.name == architecture.name or known.model_type == architecture.model_type
        if taken and known != architecture:
            raise ValueError(f"architecture {architecture} clashes with {known}: name and model_type must be its own")
    _KNOWN[architecture.name] = architecture


def architectures() -> Mapping[str, Architecture]:
    """Every architecture by name: this package's and those of installed extensions."""
    extensions.load()
    return _KNOWN
