"""Tiny random Hugging Face models with peaked logits, and a small paged runner over `EngineModel` for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

from verl_tim.models import EngineModel, build_model, config_from_hf
from verl_tim.numerics import PagedBatch, SamplingTensors
from verl_tim.numerics.contract import ROW_FLOOR, ceil_to

VOCAB = 99
_MODELS = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}
KINDS = tuple(_MODELS)
DTYPES = (torch.float32, torch.bfloat16)


def tiny_config(kind: str, **changes):
    """A transformers config of hidden size 64 and three layers."""
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    config_type, model_type, own = _MODELS[kind]
    return config_type(**{**base, **own, **changes}, architectures=[model_type.__name__])


def tiny_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, head_scale: float = 9.0, **changes):
    """A random model whose every weight matters (norms and biases too) and whose logits are peaked."""
    config = tiny_config(kind, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _MODELS[kind][1](config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif name.endswith("bias"):
                    parameter.normal_()
                else:
                    parameter.mul_(3.0)
            model.lm_head.weight.mul_(head_scale if not config.tie_word_embeddings else 2.0)
    return model.to(dtype).eval()


def engine_of(hf_model, *, dtype: torch.dtype, numerics: str = "contract") -> EngineModel:
    """An `EngineModel` with the weights of a Hugging Face model."""
    model = build_model(config_from_hf(hf_model.config), dtype=dtype, device="cpu", numerics=numerics)
    model.load_weights(hf_model.state_dict().items())
    return model


def perturb(hf_model, scale: float = 0.02, seed: int = 1) -> None:
    """A stand-in for an optimiser step: every weight moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std().clamp(min=0.1)
            parameter.add_((scale * noise).to(parameter.dtype))


def sampling(temperature: Tensor, seeds: Tensor, positions: Tensor) -> SamplingTensors:
    rows = temperature.shape[0]
    return SamplingTensors(
        temperature.to(torch.float32), torch.full((rows,), -1), torch.ones(rows), torch.zeros(rows), seeds, positions
    )


@dataclass
class Sequence:
    """A sequence under way: `tokens` (prompt + drawn), how many are in the cache, its pages, and the recorded log-
    probs."""

    tokens: list[int]
    prompt_len: int
    seed: int
    temperature: float
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_probs: list[float] = field(default_factory=list)

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) - self.prompt_len


class PagedRunner:
    """Owns KV pages and runs steps of any mixture of sequences; pages are handed out in a shuffled order."""

    def __init__(self, model: EngineModel, *, page_size: int, num_pages: int, seed: int = 0) -> None:
        c = model.config
        self.model, self.page_size = model, page_size
        shape = (c.num_layers, num_pages + 1, page_size, c.num_kv_heads, c.head_dim)
        # Stale values of earlier owners: page 0 alone must be finite.
        self.k_pages = torch.full(shape, torch.nan, dtype=model.dtype)
        self.v_pages = torch.full(shape, torch.nan, dtype=model.dtype)
        self.k_pages[:, 0] = self.v_pages[:, 0] = 0.0
        self.free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self.free)

    def release(self, sequence: Sequence) -> None:
        """Give the pages back (finish or preemption): everything must be computed again."""
        self.free.extend(sequence.pages)
        sequence.pages.clear()
        sequence.cached = 0

    def step(self, work: list[tuple[Sequence, int]]) -> Tensor:
        """Run `count` new rows of each sequence; returns the hidden states of all rows, padding cut off."""
        rows = sum(count for _, count in work)
        padded = ceil_to(rows, ROW_FLOOR)
        ids, position, slot = (torch.zeros(padded, dtype=torch.int64) for _ in range(3))
        start = [0]
        for sequence, count in work:
            a, b = start[-1], start[-1] + count
            begin, end = sequence.cached, sequence.cached + count
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free.pop())
            ids[a:b] = torch.tensor(sequence.tokens[begin:end])
            position[a:b] = torch.arange(begin, end)
            pages = torch.tensor(sequence.pages)
            slot[a:b] = pages[position[a:b] // self.page_size] * self.page_size + position[a:b] % self.page_size
            sequence.cached = end
            start.append(b)
        width = max(len(sequence.pages) for sequence, _ in work)
        table = torch.tensor([sequence.pages + [0] * (width - len(sequence.pages)) for sequence, _ in work])
        context = torch.tensor([sequence.cached for sequence, _ in work])
        batch = PagedBatch(torch.tensor(start), context, table, slot, position)
        return self.model.forward(ids, batch, self.k_pages, self.v_pages)[:rows]

    def draw(self, work: list[tuple[Sequence, int]]) -> None:
        """One step; sequences whose last known token was in it draw the next one and record its log-prob."""
        hidden = self.step(work)
        last = torch.tensor([count for _, count in work]).cumsum(0) - 1
        drawing = [i for i, (sequence, _) in enumerate(work) if sequence.cached == len(sequence.tokens)]
        if not drawing:
            return
        members = [work[i][0] for i in drawing]
        logits = self.model.logits(hidden[last[torch.tensor(drawing)]])
        params = sampling(
            torch.tensor([s.temperature for s in members]),
            torch.tensor([s.seed for s in members]),
            torch.tensor([len(s.tokens) for s in members]),
        )
        sampled = self.model.sample(logits, params)
        top = torch.softmax(logits / params.temperature_B[:, None], -1).amax(-1)
        for i, sequence in enumerate(members):
            sequence.tokens.append(int(sampled.token_B[i]))
            sequence.log_probs.append(float(sampled.log_prob_B[i]))
            sequence.top_probs.append(float(top[i]))


def rollout(
    model: EngineModel,
    *,
    prompts: int,
    new_tokens: int,
    temperature: float,
    page_size: int = 5,
    preempt: bool = True,
    seed: int = 0,
) -> list[Sequence]:
    """Sample a batch the way an engine does: mixed lengths, chunked prefill beside decodes, shuffled rows,
    preemption."""
    rng = random.Random(seed)
    length = [rng.randint(1, 90) for _ in range(prompts)]
    longest = max(length) + new_tokens
    runner = PagedRunner(model, page_size=page_size, num_pages=prompts * -(-longest // page_size), seed=seed)
    waiting = [
        Sequence([rng.randrange(VOCAB) for _ in range(n)], n, 1000 + i, temperature) for i, n in enumerate(length)
    ]
    everyone, running = list(waiting), []
    while waiting or running:
        for _ in range(min(rng.randint(0, 5), len(waiting))):
            running.append(waiting.pop())
        if not running:
            continue
        rng.shuffle(running)
        work = []
        for sequence in running:
            missing = len(sequence.tokens) - sequence.cached
            work.append((sequence, missing if missing == 1 else rng.randint(1, missing)))
        runner.draw(work)
        for sequence in [s for s in running if s.num_drawn >= new_tokens]:
            running.remove(sequence)
            runner.release(sequence)
        if preempt and running and rng.random() < 0.15:
            victim = running.pop(rng.randrange(len(running)))
            runner.release(victim)
            waiting.append(victim)
    return everyone
