"""The supervised phase that turns a random small model into a base model worth training with RL.

Two stages, as a large model's pre-training leaves two things behind, abilities and habits:

1. **work**: worked solutions of training problems (one line per step, the answer last), until the model works
problems out.
2. **habit**: most solutions now break off after their first line, as much of scraped text does. Nothing in them is
wrong, they are
   unfinished, and the model takes up the habit: it *can* solve the problems and mostly does not.

What RL then has to find is that finishing the work pays. So the score before RL is set by the share of finished
solutions and not by a lucky moment of stopping, the greedy answer is nearly always unfinished (validation has room
to rise), and every group of samples holds both kinds (the advantage has a signal). Answers get longer as the reward
rises.

Both stages draw from the training pool only (`problems.pool_of`): validation problems stay unseen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from verl_tim.tasks.catalog import Task
from verl_tim.tasks.problems import Problem, stream_pool
from verl_tim.tasks.sampling import MAX_ANSWER_TOKENS, mean_score, prompt_ids
from verl_tim.tasks.worked import worked_solution


@dataclass(frozen=True)
class WarmupConfig:
    """Settings of the two stages.

    Attributes:
        batch_size: solutions per optimiser step.
        muon_lr, adam_lr: peak learning rates of the work stage: Muon for the matrices, AdamW for embeddings, norms,
        experts. check_every: steps between two measurements of the sampled score in the work stage.
        able_score: sampled score of finished work at which the learning rate begins to fall.
        cooldown_steps: steps of that fall; the work stage ends with it.
        max_work_steps: steps of the work stage before the fall, at most.
        min_work_score: sampled score below which the work stage has failed.
        finished_share: share of finished solutions in the habit stage.
        habit_steps, habit_lr: its length and AdamW's peak learning rate, falling to zero.
        score_low, score_high: the window the sampled score must land in at the end.
        score_problems: problems of a measurement in the work stage.
        measured_problems: problems of each measurement after the habit stage.
        router_loss: weight of the load-balancing loss (MoE).
    """

    batch_size: int = 64
    muon_lr: float = 0.03
    adam_lr: float = 8e-3
    check_every: int = 50
    able_score: float = 0.4
    cooldown_steps: int = 100
    max_work_steps: int = 1500
    min_work_score: float = 0.7
    finished_share: float = 0.3
    habit_steps: int = 80
    habit_lr: float = 1e-3
    score_low: float = 0.15
    score_high: float = 0.40
    score_problems: int = 256
    measured_problems: int = 512
    router_loss: float = 0.4


_WARMUP_STEPS = 30
_LEAST_LR_SHARE = 0.05
_SPARE_TOKENS = 8


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    difficulty: dict[str, Any],
    config: WarmupConfig,
    *,
    seed: int,
    progress: bool = True,
) -> dict[str, Any]:
    """Train `model` in place; returns what was measured on the way.

    On the model's device. A function of its arguments on one kind of machine and number of threads: nothing depends on
    time.

    Raises:
        RuntimeError: the model did not learn to work the problems out, or the final score missed its window.
    """
    run = _Warmup(model, tokenizer, task, difficulty, config, seed, progress)
    try:
        work = run.work_stage()
        habit = run.habit_stage()
    finally:
        run.bar.close()
    return {"work": work, "habit": habit}


class _Warmup:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        difficulty: dict[str, Any],
        config: WarmupConfig,
        seed: int,
        progress: bool,
    ) -> None:
        self.model, self.tokenizer, self.task, self.config, self.seed = model, tokenizer, task, config, seed
        self.problems: Iterator[Problem] = stream_pool(task, difficulty, seed, "train")
        self.probe = list(islice(stream_pool(task, difficulty, seed + 1, "train"), config.measured_problems))
        self.answer_tokens = answer_room(tokenizer, task, self.probe)
        self.random = random.Random(seed)
        self.bar = tqdm(
            desc=f"warm up on {task.name}",
            unit="step",
            disable=not progress,
            total=config.cooldown_steps + config.habit_steps,
        )

    def work_stage(self) -> dict[str, Any]:
        config = self.config
        optimizers = [*_work_optimizers(self.model, config)]
        score, plain_steps = 0.0, 0
        while score < config.able_score:
            if plain_steps >= config.max_work_steps:
                raise RuntimeError(
                    f"the model scores {score:.2f} on {self.task.name} after {plain_steps} supervised steps, less than "
                    f"{config.able_score}: choose an easier difficulty or a larger shape"
                )
            for step in range(plain_steps, plain_steps + config.check_every):
                self._step(optimizers, min(1.0, (step + 1) / _WARMUP_STEPS), finished_share=1.0)
            plain_steps += config.check_every
            self.bar.total += config.check_every
            score = self._score("work", config.score_problems)
        for step in range(config.cooldown_steps):
            self._step(optimizers, max(_LEAST_LR_SHARE, 1 - step / config.cooldown_steps), finished_share=1.0)
        score = self._score("work", config.score_problems)
        if score < config.min_work_score:
            raise RuntimeError(
                f"the model scores {score:.2f} on {self.task.name} after its work stage, less than "
                f"{config.min_work_score}"
            )
        return {"steps": plain_steps + config.cooldown_steps, "sampled_score": score}

    def habit_stage(self) -> dict[str, Any]:
        config = self.config
        optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=config.habit_lr, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        for step in range(config.habit_steps):
            self._step(optimizers, 1 - step / config.habit_steps, finished_share=config.finished_share)
        score = self._score("habit", config.measured_problems)
        if not config.score_low <= score <= config.score_high:
            raise RuntimeError(
                f"the warmed-up model scores {score:.3f} on {self.task.name}, outside [{config.score_low}, "
                f"{config.score_high}]: "
                "problems of at least three terms are needed, so that work can be left unfinished"
            )
        return {"steps": config.habit_steps, "finished_share": config.finished_share, "sampled_score": score}

    def _score(self, stage: str, problems: int) -> float:
        score = mean_score(
            self.model,
            self.tokenizer,
            self.task,
            self.probe[:problems],
            seed=self.seed,
            max_tokens=self.answer_tokens,
        )
        self.bar.set_postfix(stage=stage, score=f"{score:.2f}")
        return score

    def _step(self, optimizers: Sequence[torch.optim.Optimizer], lr_share: float, *, finished_share: float) -> None:
        loss = self._loss(list(islice(self.problems, self.config.batch_size)), finished_share)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_share * optimizer.defaults["lr"]
            optimizer.step()
        self.bar.update()

    def _loss(self, problems: Sequence[Problem], finished_share: float) -> torch.Tensor:
        prompts = prompt_ids(self.tokenizer, [problem.question for problem in problems])
        solutions = []
        for problem in problems:
            text = "\n".join(self._shown(problem, finished_share))
            solutions.append([*self.tokenizer.encode(text), self.tokenizer.eos_token_id])

        # Every prompt begins with the same tokens (a third to half of it). They are run once and their keys and
        # values, gradients included, are shared by all rows.
        shared = _common_prefix_length(prompts)
        cache = DynamicCache(config=self.model.config)
        body, device = self.model.model, self.model.device
        prefix = body(
            input_ids=torch.tensor([prompts[0][:shared]], device=device),
            past_key_values=cache,
            use_cache=True,
            **self._router_flag(),
        )
        cache.batch_repeat_interleave(len(problems))
        rows = [prompt[shared:] + solution for prompt, solution in zip(prompts, solutions, strict=True)]
        width = max(map(len, rows))
        input_BT = torch.full((len(rows), width - 1), self.tokenizer.pad_token_id)
        target_BT = torch.full((len(rows), width - 1), -100)
        for index, (row, solution) in enumerate(zip(rows, solutions, strict=True)):
            input_BT[index, : len(row) - 1] = torch.tensor(row[:-1])
            target_BT[index, len(row) - 1 - len(solution) : len(row) - 1] = torch.tensor(solution)
        input_BT, target_BT = input_BT.to(device), target_BT.to(device)
        # causal attention, padding on the right: no row sees padding, so no mask is needed
        output = body(input_ids=input_BT, past_key_values=cache, use_cache=True, **self._router_flag())
        taught_BT = target_BT != -100
        logits_ND = self.model.lm_head(output.last_hidden_state[taught_BT])
        loss = functional.cross_entropy(logits_ND, target_BT[taught_BT])
        return loss + self._router_loss(prefix, output, len(rows))

    def _shown(self, problem: Problem, finished_share: float) -> list[str]:
        lines = worked_solution(self.task, problem)
        return lines if self.random.random() < finished_share else lines[:1]

    def _router_flag(self) -> dict[str, bool]:
        return {"output_router_logits": True} if _is_moe(self.model) else {}

    def _router_loss(self, prefix: Any, output: Any, rows: int) -> torch.Tensor | float:
        if not _is_moe(self.model):
            return 0.0
        config = self.model.config
        # the prefix was run once and stands for as many tokens as there are rows
        router_logits = tuple(
            torch.cat([prefix_PE.repeat(rows, 1), own_TE])
            for prefix_PE, own_TE in zip(prefix.router_logits, output.router_logits, strict=True)
        )
        balance = load_balancing_loss_func(cast(Any, router_logits), config.num_experts, config.num_experts_per_tok)
        return self.config.router_loss * balance


def answer_room(tokenizer: PreTrainedTokenizerBase, task: Task, problems: Sequence[Problem]) -> int:
    """Tokens that an answer is given: the longest worked solution and a few more, at least `MAX_ANSWER_TOKENS`."""
    longest = max(len(tokenizer.encode("\n".join(worked_solution(task, problem)))) for problem in problems)
    return max(MAX_ANSWER_TOKENS, longest + _SPARE_TOKENS)


def _is_moe(model: PreTrainedModel) -> bool:
    return getattr(model.config, "num_experts", None) is not None


def _work_optimizers(model: PreTrainedModel, config: WarmupConfig) -> Iterator[torch.optim.Optimizer]:
    # Muon learns these tasks in about half the steps of AdamW. It takes matrices; embeddings, norms, routers and
    # stacked experts stay AdamW's.
    not_for_muon = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.endswith(not_for_muon)]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    yield torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01)
    yield torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)


def _common_prefix_length(rows: Sequence[Sequence[int]]) -> int:
    # zip ends with the shortest row; one token of it is left for the rows' own part
    length = 0
    for tokens in zip(*(row[:-1] for row in rows), strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length
