"""Responses of one checkpoint with what the rollout recorded for each token, and how the trainer scores them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.engine.core import SamplingParams
from verl_tim.engine.engine import Engine
from verl_tim.numerics import Sampled, SamplingTensors
from verl_tim.training.in_process import InProcessTrainer, ScoredSequence
from verl_tim.verification.forward import FINAL, contract_logits, record_trainer, response_rows
from verl_tim.verification.hf_taps import LOGITS

ROWS_AT_ONCE = 256  # of logits, whose rows are as long as the vocabulary


@dataclass(frozen=True)
class Top2:
    """The two likeliest tokens of each response token's distribution: ids int64 (R, 2), log-probs float32 (R, 2)."""

    id_R2: Tensor
    log_prob_R2: Tensor


@dataclass(frozen=True)
class Answer:
    """One response as a rollout drew it.

    Attributes:
        tokens: prompt and response.
        log_prob_R: float32, recorded when the token was drawn.
        top: the rollout's two likeliest tokens at each step.
        temperature: what the log-probs are at (1 for greedy).
    """

    tokens: ScoredSequence
    log_prob_R: Tensor
    top: Top2
    temperature: float


def engine_answers(
    engine: Engine, prompts: Sequence[np.ndarray], *, temperature: float, max_tokens: int, seed: int
) -> list[Answer]:
    """Responses of our engine, all prompts in one batch, in the order given.

    Raises:
        RequestError: a prompt that leaves no room for a response (names the request).
    """
    scored_at = temperature or 1.0
    with _watched_draws(engine, scored_at) as seen:
        for number, prompt_P in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number)
            engine.add(str(number), prompt_P, params)
        outputs = {}
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id] = output
    answers = []
    for number, prompt_P in enumerate(prompts):
        output = outputs[str(number)]
        rows = [seen[seed + number, len(prompt_P) + at] for at in range(len(output.token_ids))]
        answers.append(
            Answer(
                ScoredSequence(np.asarray(prompt_P, np.int64), np.asarray(output.token_ids, np.int64)),
                torch.tensor(output.log_probs, dtype=torch.float32),
                Top2(torch.stack([ids for ids, _ in rows]), torch.stack([values for _, values in rows])),
                scored_at,
            )
        )
    return answers


@contextmanager
def _watched_draws(engine: Engine, temperature: float) -> Iterator[dict[tuple[int, int], tuple[Tensor, Tensor]]]:
    """Two likeliest tokens of every draw, by (seed of the request, position of the token)."""
    model: Any = engine.model
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    original = model.draw

    def draw(hidden_BD: Tensor, params: SamplingTensors) -> Sampled:
        ids, values = (x.cpu() for x in top2(model.logits(hidden_BD)[:, : engine.vocab_size], temperature))
        keys = zip(params.seed_B.tolist(), params.position_B.tolist(), strict=True)
        # a token that is drawn again after a preemption is drawn from the same distribution
        seen.update({key: (ids[row], values[row]) for row, key in enumerate(keys)})
        return original(hidden_BD, params)

    model.draw = draw
    try:
        yield seen
    finally:
        del model.draw


def top2(logits_TV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(ids int64 (T, 2), log-probs float32 (T, 2)) of logits, the likeliest first; ties to the lower id."""
    z_TV = logits_TV.to(torch.float32) / temperature
    # topk promises no order among ties, and a tie is where a flip begins
    first_T1 = z_TV.argmax(-1, keepdim=True)
    second_T1 = z_TV.scatter(1, first_T1, -torch.inf).argmax(-1, keepdim=True)
    id_T2 = torch.cat([first_T1, second_T1], 1)
    return id_T2, z_TV.gather(1, id_T2) - z_TV.logsumexp(-1, keepdim=True)


def trainer_scores(trainer: InProcessTrainer, answer: Answer) -> tuple[Tensor, Top2]:
    """(float32 (R,) log-probs of the response, the trainer's two likeliest tokens) of one response, on the CPU.

    The log-probs are verl's own; the two likeliest tokens are read from the logits (contract: from its head's rule).
    """
    wanted = FINAL if trainer.numerics == "contract" else LOGITS
    taps, log_prob_R = record_trainer(trainer, answer.tokens, answer.temperature, lambda name: name == wanted)
    rows_RX = taps[wanted][response_rows(answer.tokens)]
    parts = []
    for part in rows_RX.split(ROWS_AT_ONCE):
        logits = contract_logits(trainer, part) if trainer.numerics == "contract" else part
        parts.append(top2(logits, answer.temperature))
    ids, values = (torch.cat([part[at].cpu() for part in parts]) for at in range(2))
    return log_prob_R, Top2(ids, values)
