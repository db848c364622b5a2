"""Scores of a small model as reinforcement learning will see them: sampled or greedy answers, read by the verifier."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_tim.tasks.catalog import Task
from verl_tim.tasks.dataset import prompt_messages
from verl_tim.tasks.problems import Problem
from verl_tim.tasks.verifier import extract_answer, verify

MAX_ANSWER_TOKENS = 32
"""Room for an answer where nothing says more (`warmup.answer_room`)."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of the prompts, exactly as verl builds them (chat template with the generation prompt, bare style)."""
    conversations = [prompt_messages(question) for question in questions]
    rendered = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    *,
    temperature: float,
    seed: int,
    max_tokens: int = MAX_ANSWER_TOKENS,
) -> list[list[int]]:
    """Token ids of one answer per question, end of turn included where it was reached; temperature 0 is greedy.

    From a bf16 copy of the model, on its device, because a rollout engine samples in bf16: what is measured is what RL
    starts from.
    """
    batch = tokenizer.pad({"input_ids": prompt_ids(tokenizer, questions)}, padding_side="left", return_tensors="pt")
    batch = batch.to(model.device)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    sampler = copy.deepcopy(model).bfloat16().eval()
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = sampler.generate(**batch, **how, max_new_tokens=max_tokens)
    answers = output[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def mean_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    max_tokens: int = MAX_ANSWER_TOKENS,
) -> float:
    """The verifier's mean score of one answer per problem (see generate_answers)."""
    answers = generate_answers(
        model,
        tokenizer,
        [problem.question for problem in problems],
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
    )
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    scores = [
        verify(task, extract_answer(text), {"answer": problem.answer, "metadata": problem.metadata})
        for text, problem in zip(texts, problems, strict=True)
    ]
    return sum(scores) / len(scores)
