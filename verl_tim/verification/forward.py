"""One sequence through one side, with everything that its taps see: what `verify --layers` lays side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from verl_tim.engine.engine import Engine
from verl_tim.models.taps import record
from verl_tim.numerics.head import head_logits
from verl_tim.training.in_process import InProcessTrainer, ScoredSequence
from verl_tim.verification.hf_taps import LOGITS, record_hf
from verl_tim.verification.replay import response_hidden, response_log_probs

LOG_PROB = "log_prob"
FINAL = "model.norm"


@dataclass(frozen=True)
class Forward:
    """Taps of one sequence in forward order: hidden states (tokens, features), `lm_head` the logits (response,
    vocabulary), `log_prob` float32 (response, 1)."""

    taps: dict[str, Tensor]

    @property
    def log_prob_R(self) -> Tensor:
        return self.taps[LOG_PROB][:, 0]


def engine_forward(engine: Engine, sequence: ScoredSequence, temperature: float = 1.0) -> Forward:
    """A rollout engine's model over the whole sequence, by one prefill."""
    length = tokens_of(sequence)
    with record() as taps:
        hidden_RD = response_hidden(engine.model, sequence.prompt_P, sequence.response_R)
    kept = {name: x[:length].cpu() for name, x in taps.items()}  # the engine pads its rows
    kept[LOGITS] = engine.model.logits(hidden_RD)[:, : engine.vocab_size].cpu()
    kept[LOG_PROB] = response_log_probs(engine.model, hidden_RD, sequence.response_R, temperature)[:, None]
    return Forward(kept)


def trainer_forward(trainer: InProcessTrainer, sequence: ScoredSequence, temperature: float = 1.0) -> Forward:
    """verl's trainer over the sequence; contract numerics by its own taps, stock by hooks on the Hugging Face model.

    The contract's logits never leave its head: those given here are its rule applied to the same hidden states and
    weight, the log-probs are the trainer's own.
    """
    taps, log_prob_R = record_trainer(trainer, sequence, temperature)
    kept = {name: x[: tokens_of(sequence)].cpu() for name, x in taps.items()}  # the contract pads its rows
    rows = response_rows(sequence)
    if trainer.numerics == "contract":
        kept[LOGITS] = contract_logits(trainer, taps[FINAL][rows]).cpu()
    else:
        kept[LOGITS] = kept.pop(LOGITS)[rows]
    kept[LOG_PROB] = log_prob_R[:, None]
    return Forward(kept)


def record_trainer(
    trainer: InProcessTrainer,
    sequence: ScoredSequence,
    temperature: float,
    wanted: Callable[[str], bool] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """(taps by name, float32 log-probs (R,)) of one sequence through the trainer."""
    recorder = record(wanted) if trainer.numerics == "contract" else record_hf(trainer.engine.module, wanted)
    with recorder as taps:
        (log_prob_R,) = trainer.log_probs([sequence], temperature=temperature)
    return dict(taps), log_prob_R


def contract_logits(trainer: InProcessTrainer, hidden_RD: Tensor) -> Tensor:
    """float32 (R, vocabulary): the contract head's logits of chosen rows under the trainer's weights."""
    weight_VD = trainer.head_weight().to(hidden_RD.dtype)
    return head_logits(hidden_RD, weight_VD)[:, : weight_VD.shape[0]]


def tokens_of(sequence: ScoredSequence) -> int:
    """Length of prompt and response together."""
    return len(sequence.prompt_P) + len(sequence.response_R)


def response_rows(sequence: ScoredSequence) -> slice:
    """Rows whose result the response's tokens are drawn from."""
    first = len(sequence.prompt_P) - 1
    return slice(first, first + len(sequence.response_R))
