"""A tiny Hugging Face model folder with a tokenizer that verl's trainers accept, and a data set for it."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT = 128


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=" ",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def model_folder(folder: Path, kind: str = "qwen3", *, tied: bool = False, layers: int = 2, head_dim: int = 16) -> Path:
    """A random model with peaked logits (kind: qwen3 or qwen3_moe), saved in float32."""
    tokens = tokenizer()
    shape = {
        "vocab_size": 104,  # more than the tokenizer has, as real models do
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "qwen3_moe":
            config = transformers.Qwen3MoeConfig(
                num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, **shape
            )
            model = transformers.Qwen3MoeForCausalLM(config)
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(4.0)
    tokens.save_pretrained(folder)
    model.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id).save_pretrained(
        folder
    )
    return folder


def parquet(path: Path, rows: int, *, split: str = "train", seed: int = 0) -> Path:
    """Additions in verl's schema."""
    rng = random.Random(seed)

    def row(index: int) -> dict:
        a, b = rng.randint(0, 99), rng.randint(0, 999)
        return {
            "data_source": "tiny_add",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
        }

    pd.DataFrame([row(index) for index in range(rows)]).to_parquet(path)
    return path
