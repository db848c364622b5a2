"""Small Hugging Face models with experts, and routes for them."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from torch import Tensor, nn

EXPERTS, TOP_K, LAYERS = 8, 2, 3

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}


def config(kind: str = "qwen3_moe", **changes):
    if kind == "mixtral":
        return transformers.MixtralConfig(
            **{**_SHAPE, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, **changes}
        )
    if kind == "deepseek_v3":
        mla = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        own = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_group": 2, "topk_group": 2}
        dense = {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 4}
        return transformers.DeepseekV3Config(**{**_SHAPE, **mla, **own, **dense, **changes})
    if kind == "glm4_moe":
        own = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_group": 2, "topk_group": 2}
        dense = {"first_k_dense_replace": 1, "moe_intermediate_size": 16}
        return transformers.Glm4MoeConfig(**{**_SHAPE, **own, **dense, **changes})
    sparse = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return transformers.Qwen3MoeConfig(**{**_SHAPE, **sparse, **changes})


def model(kind: str = "qwen3_moe", *, seed: int = 0, **changes) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(config(kind, **changes))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0, 0.3)
    return made.train()


def tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 61, (1, rows), generator=torch.Generator().manual_seed(seed))


def routes(rows: int, layers: int, seed: int = 0, *, experts: int = EXPERTS, top_k: int = TOP_K) -> np.ndarray:
    """int16 [rows, layers, k], distinct ids in no order."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, layers, experts)), -1)[..., :top_k].astype(np.int16)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same_bits(a: Tensor, b: Tensor) -> bool:
    assert a.dtype == b.dtype == torch.float32
    assert bool(torch.isfinite(a).all())
    return torch.equal(a.detach().contiguous().view(torch.int32), b.detach().contiguous().view(torch.int32))
