"""Random models with peaked logits: parity is too easy where every token is equally likely."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_tim.tasks.architectures import init_model, resolve_shape
from verl_tim.tasks.tokenizer import build_tokenizer

KINDS = ("qwen3", "qwen3_moe")

# Scales a random head so that the mean top probability is above 0.5 and the log-prob spread above 1 nat, as in trained
# models.
PEAK = 10.0


def make_random_model(kind: str, folder: Path, *, seed: int = 0, peak: float = PEAK, **shape_changes: int) -> Path:
    """Write a random Qwen3 or Qwen3-MoE and its tokenizer to `folder` in Hugging Face format; the folder.

    Args:
        kind: "qwen3" or "qwen3_moe".
        peak: what the head is scaled by.
        shape_changes: fields of the architecture's config, such as hidden_size.
    """
    tokenizer = build_tokenizer(model_max_length=512)
    changes = {"tie_word_embeddings": False, "hidden_size": 64, "max_position_embeddings": 512, **shape_changes}
    shape = resolve_shape(kind, changes)
    model = init_model(kind, shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(peak)  # type: ignore[union-attr, operator]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
