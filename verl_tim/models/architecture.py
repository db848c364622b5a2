"""What tells one supported architecture from another. All are pre-norm decoders with grouped-query attention, RoPE
and SwiGLU; each has its own file with its description and the trainer's table."""

from __future__ import annotations

from dataclasses import dataclass


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

ARCHITECTURES = {a.name: a for a in (QWEN3, QWEN3_MOE, QWEN2, LLAMA)}
