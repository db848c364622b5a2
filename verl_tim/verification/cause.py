"""Why two log-probs differ: the weights, the first op where forwards part, the temperature, or the record itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_tim.diagnosis.bits import ulp_distance
from verl_tim.engine.core import RequestOutput
from verl_tim.engine.engine import Engine
from verl_tim.models.taps import record
from verl_tim.models.weights import weight_checksum
from verl_tim.verification.replay import response_hidden, response_log_probs
from verl_tim.verification.subject import Prompt, Subject, trainer_temperature

_TEMPERATURES = (1.0, 0.6, 1.3)


def name_cause(subject: Subject, engine: Engine, prompt: Prompt, output: RequestOutput, token: int) -> str:
    """Where rollout and trainer part for one response token, in words.

    Args:
        engine: the engine that drew it, still holding the weights it drew with.
        token: index of the response token.
    """
    weights = _differing_weights(subject, engine)
    if weights:
        return weights
    sequence = prompt.answered(output)
    temperature = trainer_temperature(prompt)
    with record() as train_taps:
        train_R = subject.trainer.log_probs([sequence], temperature=temperature)[0]
    whole: Any = subject.replayed_by(engine).model
    with record() as engine_taps:
        hidden_RD = response_hidden(whole, prompt.token_P, sequence.response_R)
    replay_R = response_log_probs(whole, hidden_RD, sequence.response_R, temperature)
    parted = first_parting(engine_taps, train_taps)
    if parted:
        return parted
    recorded = torch.tensor(output.log_probs[token], dtype=torch.float32)
    for other in (t for t in _TEMPERATURES if t != temperature):
        at_other = subject.trainer.log_probs([sequence], temperature=other)[0][token]
        if _same(recorded, at_other):
            return (
                f"temperature: the rollout recorded its log-prob at T={other:g}, "
                f"the request was drawn at T={temperature:g}"
            )
    if _same(replay_R[token], train_R[token]):
        return (
            "record: every op of a replayed forward agrees with the trainer, and so does its log-prob; the recorded "
            "value was changed when the token was drawn or after (sampling, KV cache, scheduling, transport)"
        )
    return "head: the hidden states agree and the log-probs do not (lm_head, log-sum-exp)"


def first_parting(engine_taps: dict[str, Tensor], train_taps: dict[str, Tensor]) -> str | None:
    """The first tap, in forward order, whose bits differ on the rows both sides have; None if all agree.

    Raises:
        RuntimeError: the two sides did not record the same taps, so nothing would be proven.
    """
    if not train_taps or engine_taps.keys() != train_taps.keys():
        only = sorted(engine_taps.keys() ^ train_taps.keys())
        raise RuntimeError(f"the two forwards did not record the same taps: {only or 'none recorded'}")
    for name, engine_TX in engine_taps.items():
        rows = min(len(engine_TX), len(train_taps[name]))
        a, b = engine_TX[:rows].float(), train_taps[name][:rows].float()
        differing = a.view(torch.int32) != b.view(torch.int32)
        if bool(differing.any()):
            row = int(differing.any(1).nonzero()[0])
            relative = float(((a - b).abs() / b.abs().clamp_min(1e-12))[differing].max())
            return (
                f"{name}: first op whose bits differ, from position {row}; "
                f"{int(differing.sum()):,} of {a.numel():,} elements, max relative difference {relative:.2g}, "
                f"max {int(ulp_distance(a[differing], b[differing]).max()):,} fp32 ulp"
            )
    return None


def _differing_weights(subject: Subject, engine: Engine) -> str | None:
    tied = engine.model.config.tie_word_embeddings
    stream = ((name, tensor) for name, tensor in subject.trainer.weights() if not (tied and name == "lm_head.weight"))
    expected, held = weight_checksum(stream, engine.model.dtype), engine.weight_checksum()
    if expected == held:
        return None
    return (
        f"weights: the rollout says version {engine.weight_version} but holds other weights than the trainer "
        f"(checksum {held[:12]} against {expected[:12]}): a weight update did not reach it"
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))
