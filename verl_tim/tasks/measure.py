"""What a small model's distributions look like: how peaked, how spread, how its experts are used."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_tim.tasks.problems import Problem
from verl_tim.tasks.sampling import MAX_ANSWER_TOKENS, generate_answers, prompt_ids


@torch.no_grad()
def logit_statistics(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    seed: int,
    max_tokens: int = MAX_ANSWER_TOKENS,
) -> dict[str, float]:
    """Over the tokens of one answer per problem sampled at temperature 1: mean probability of the most likely token,
    and mean and standard deviation of the log-probability of the sampled one (nats)."""
    questions = [problem.question for problem in problems]
    answers = generate_answers(model, tokenizer, questions, temperature=1.0, seed=seed, max_tokens=max_tokens)
    prompts = prompt_ids(tokenizer, questions)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    # padding on the right is never seen under causal attention
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(model.device)
    scorer = copy.deepcopy(model).bfloat16().eval()
    log_probs_BTV = scorer(**batch, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    target_BT = batch["input_ids"][:, 1:]
    answer_BT = torch.zeros_like(target_BT, dtype=torch.bool)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        answer_BT[index, len(prompt) - 1 : len(row) - 1] = True
    top_probs = log_probs_BTV.max(-1).values.exp()[answer_BT]
    log_probs = log_probs_BTV.gather(-1, target_BT[..., None])[..., 0][answer_BT]
    return {
        "mean_top_probability": top_probs.mean().item(),
        "mean_log_prob": log_probs.mean().item(),
        "std_log_prob": log_probs.std(correction=0).item(),
        "mean_answer_tokens": log_probs.numel() / len(problems),
    }


@torch.no_grad()
def router_statistics(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> dict[str, Any] | None:
    """Share of tokens routed to each expert, per layer, over the prompts; an even router gives 1 / experts. None for
    a dense model."""
    experts = getattr(model.config, "num_experts", None)
    if experts is None:
        return None
    batch = tokenizer.pad(
        {"input_ids": prompt_ids(tokenizer, [problem.question for problem in problems])}, return_tensors="pt"
    ).to(model.device)
    output = model.model(**batch, output_router_logits=True, use_cache=False)
    kept_T = batch["attention_mask"].flatten().bool()
    shares = []
    for logits_TE in output.router_logits:
        chosen = logits_TE[kept_T].topk(model.config.num_experts_per_tok, dim=-1).indices
        shares.append((torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()).tolist())
    return {"expert_share_per_layer": shares, "least": min(map(min, shares)), "most": max(map(max, shares))}
