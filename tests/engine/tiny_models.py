"""Small random models in Hugging Face format with peaked logits, written to a folder as a user would have them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 151  # no multiple of any padding
EOS = (1, 2)
MAX_LEN = 1024

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "eos_token_id": list(EOS),
}


def hf_model(kind: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A "qwen3" or "qwen3_moe" causal LM, float32, every weight random. `changes`: to the config."""
    if kind == "qwen3":
        config_type, model_type, own = transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}
    else:
        config_type, model_type = transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM
        own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    config = config_type(**{**_COMMON, **own, **changes}, architectures=[model_type.__name__])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_type(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.mul_(3.0)
            model.lm_head.weight.mul_(2.0 if config.tie_word_embeddings else 10.0)
    return model.eval()


def save(kind: str, folder: Path, seed: int = 0, **changes) -> Path:
    """Write the model (not its tokenizer, which the engine does not read) to ``folder``."""
    hf_model(kind, seed, **changes).save_pretrained(folder)
    return folder
