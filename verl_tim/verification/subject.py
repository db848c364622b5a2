"""The two sides under test: rollout engines and verl's trainer, over one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.gate import BitReport, compare_bits
from verl_tim.engine.config import EngineConfig
from verl_tim.engine.core import RequestOutput, SamplingParams
from verl_tim.engine.crew import Crew, Split
from verl_tim.engine.engine import Engine
from verl_tim.engine.parallel_engine import check_split, start_engine
from verl_tim.models import load_model_config
from verl_tim.training.in_process import InProcessTrainer, ScoredSequence
from verl_tim.verification.replay import response_logits

# AdamW moves every weight by about its learning rate, and a logit by as many weights as the model is wide: a rate that
# suits the narrow models of tests makes a wide one certain of every token, and log-probs that are all 0 show nothing.
_LR, _LR_WIDTH = 1e-3, 64


class UpdateError(RuntimeError):
    """An optimiser step of the trainer that cannot have changed the weights."""


@dataclass(frozen=True)
class Prompt:
    """One request: its id, prompt token ids and sampling parameters."""

    request_id: str
    token_P: np.ndarray
    params: SamplingParams

    def answered(self, output: RequestOutput) -> ScoredSequence:
        return ScoredSequence(self.token_P, np.asarray(output.token_ids, dtype=np.int64))


@dataclass
class Subject:
    """One checkpoint, seen by a rollout engine and by verl's trainer.

    Args:
        model_path: folder of a Hugging Face model.
        dtype: compute dtype of both sides.
        attention: attention contract of both sides (`numerics.attention.resolve_attention`).
        rollout: "vexact" (contract numerics) or "stock".
        trainer_numerics: "contract", or "stock" for verl's own forward.
        requests: requests per scenario.
        response_tokens: most tokens per response.
        seed: of prompts and draws.
        prompts: token ids to draw prompts from; None makes random ones of mixed length.
        tensor_parallel, pipeline_parallel: how the rollout engines are split; `close` ends their processes.

    Raises:
        EngineConfigError: the model cannot be split so.
    """

    model_path: str
    dtype: str = "bfloat16"
    attention: str = "auto"
    rollout: str = "vexact"
    trainer_numerics: str = "contract"
    requests: int = 24
    response_tokens: int = 48
    seed: int = 0
    prompts: Sequence[np.ndarray] | None = None
    weight_version: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    _crew: Crew | None = field(default=None, repr=False)
    _engines: list[Engine] = field(default_factory=list, repr=False)
    _weights: list[tuple[str, Tensor]] | None = field(default=None, repr=False)  # of the last update

    def __post_init__(self) -> None:
        check_split(self.model_path, self.tensor_parallel, self.pipeline_parallel)
        width = load_model_config(self.model_path).hidden_size
        self.trainer = InProcessTrainer(
            self.model_path,
            dtype=self.dtype,
            numerics=self.trainer_numerics,
            attention=self.attention,
            lr=_LR * min(1.0, _LR_WIDTH / width),
        )
        probe = self.whole_engine()
        self.max_model_len, self.vocab_size = probe.max_model_len, probe.vocab_size
        self.close_engines()
        self.rng = np.random.default_rng(self.seed)

    @property
    def exact(self) -> bool:
        """Whether the two sides must agree bit for bit."""
        return self.rollout == "vexact" and self.trainer_numerics == "contract"

    def engine(self, **settings: Any) -> Engine:
        """A fresh rollout engine that holds the trainer's weights of now, until `close_engines`.

        Args:
            settings: fields of `EngineConfig`.
        """
        config: dict[str, Any] = {
            "model_path": self.model_path,
            "dtype": self.dtype,
            "device": "cuda" if torch.cuda.is_available() else "cpu",  # where verl puts the trainer
            "numerics": "contract" if self.rollout == "vexact" else "stock",
            "attention": self.attention,
            "kv_cache_tokens": 65536,
            "seed": self.seed,
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
        }
        made = EngineConfig(**{**config, **settings})
        if made.num_ranks > 1 and self._crew is None:
            self._crew = Crew(Split.of(made))
        engine = start_engine(made, crew=self._crew)
        self._engines.append(engine)
        if self._weights is not None:
            engine.update_weights(self._weights, self.weight_version)
        return engine

    def whole_engine(self, **settings: Any) -> Engine:
        """As :meth:`engine`, on one rank: its model may be run by itself."""
        return self.engine(**{**settings, "tensor_parallel_size": 1, "pipeline_parallel_size": 1})

    def replayed_by(self, engine: Engine) -> Engine:
        """An engine with the weights of now whose model may be run by itself: `engine` unless it is split."""
        return engine if engine.config.num_ranks == 1 else self.whole_engine()

    def close_engines(self) -> None:
        """Give back what the engines made so far hold of the device: of a large model it has room for a few."""
        while self._engines:
            self._engines.pop().close()

    def close(self) -> None:
        """End the engines, and the processes of split ones."""
        self.close_engines()
        if self._crew is not None:
            self._crew.close()

    def update(self, outputs: Sequence[tuple[Prompt, RequestOutput]]) -> list[tuple[str, Tensor]]:
        """One optimiser step of the trainer on what was drawn; the new weights, and the version moves on.

        The step is a REINFORCE step with random advantages: what matters here is that every weight changes.

        Raises:
            UpdateError: the gradient's norm is 0 or not finite.
        """
        advantages = self.rng.standard_normal(len(outputs)).tolist()
        norm = self.trainer.update([prompt.answered(output) for prompt, output in outputs], advantages)
        if not np.isfinite(norm) or norm == 0.0:
            raise UpdateError(f"the trainer's update has gradient norm {norm}: no weight can have changed")
        weights = [(name, tensor.clone()) for name, tensor in self.trainer.weights()]
        self._weights = weights
        self.weight_version += 1
        return weights

    def draw_prompts(self, count: int, *, tag: str, params: dict[str, Any] | None = None) -> list[Prompt]:
        """`count` prompts of mixed length with sampling parameters `params`; max_tokens varies where not given."""
        made = []
        for index in range(count):
            if self.prompts is not None:
                tokens = np.asarray(self.prompts[int(self.rng.integers(len(self.prompts)))], dtype=np.int64)
            else:
                longest = max(2, min(64, self.max_model_len - self.response_tokens))
                length = 1 + int(longest * self.rng.random() ** 2)
                tokens = self.rng.integers(0, self.vocab_size, length, dtype=np.int64)
            tokens = tokens[-max(1, self.max_model_len - self.response_tokens) :]
            fields: dict[str, Any] = {
                "max_tokens": max(1, self.response_tokens - int(self.rng.integers(0, self.response_tokens // 2 + 1))),
                "ignore_eos": True,
            }
            made.append(Prompt(f"{tag}-{index}", tokens, SamplingParams(**{**fields, **(params or {})})))
        return made

    def generate(self, engine: Engine, prompts: Sequence[Prompt]) -> list[tuple[Prompt, RequestOutput]]:
        """Run the prompts to their end in one engine, in the order given."""
        for prompt in prompts:
            engine.add(prompt.request_id, prompt.token_P, prompt.params)
        outputs = run_out(engine)
        return [(prompt, outputs[prompt.request_id]) for prompt in prompts]

    def spread(self) -> dict[str, float]:
        """How peaked the model's distributions are, at temperature 1 over a few fresh responses.

        Parity of flat distributions shows little.

        Returns:
            mean_top_probability, and log_prob_std in nats over the drawn tokens.
        """
        engine = self.whole_engine()
        drawn = self.generate(engine, self.draw_prompts(8, tag="spread"))
        top = [
            response_logits(engine.model, p.token_P, p.answered(o).response_R).softmax(-1).amax(-1) for p, o in drawn
        ]
        engine.close()
        recorded = torch.tensor([value for _, output in drawn for value in output.log_probs])
        return {
            "mean_top_probability": round(float(torch.cat(top).mean()), 4),
            "log_prob_std": round(float(recorded.std(correction=0)), 4),
        }

    def score(self, drawn: Sequence[tuple[Prompt, RequestOutput]], **layout: Any) -> list[Tensor]:
        """The trainer's log-probs of what was drawn, each at its own sampling temperature (1 where that is 0)."""
        scored: dict[str, Tensor] = {}
        for temperature in sorted({trainer_temperature(prompt) for prompt, _ in drawn}):
            part = [(p, o) for p, o in drawn if trainer_temperature(p) == temperature]
            rows = self.trainer.log_probs([p.answered(o) for p, o in part], temperature=temperature, **layout)
            scored.update({prompt.request_id: row for (prompt, _), row in zip(part, rows, strict=True)})
        return [scored[prompt.request_id] for prompt, _ in drawn]


def run_out(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left, and check the engine's accounts; what ended meanwhile, by request."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    engine.audit()
    return outputs


def trainer_temperature(prompt: Prompt) -> float:
    """The temperature under which the recorded log-prob of a request is defined: greedy requests record it at 1."""
    return prompt.params.temperature or 1.0


def padded(rows: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Rows of numbers to one fp32 (B, T) tensor and its bool mask."""
    tensors = [torch.as_tensor(np.asarray(row, dtype=np.float32)) for row in rows]
    width = max((len(row) for row in tensors), default=0)
    values_BT = torch.zeros(len(tensors), width)
    mask_BT = torch.zeros(len(tensors), width, dtype=torch.bool)
    for index, row in enumerate(tensors):
        values_BT[index, : len(row)] = row
        mask_BT[index, : len(row)] = True
    return values_BT, mask_BT


def compare(drawn: Sequence[tuple[Prompt, RequestOutput]], scored: Sequence[Tensor]) -> BitReport:
    """The recorded log-probs against the trainer's, by fp32 bit pattern."""
    rollout_BT, mask_BT = padded(output.log_probs for _, output in drawn)
    train_BT, train_mask_BT = padded(row.numpy() for row in scored)
    if not torch.equal(mask_BT, train_mask_BT):
        raise RuntimeError("trainer and rollout scored different numbers of tokens")
    return compare_bits(train_BT, rollout_BT, mask_BT)
