"""Constants that sampling adds to the rollout's log-prob, and tokens that are not the ones sampled."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule


@rule(
    "exact.logprobs-mode",
    Severity.EXACTNESS,
    f"{ROLLOUT}.logprobs_mode",
    "engine_kwargs.<engine>.logprobs_mode",
    remedy=f"set {ROLLOUT}.logprobs_mode=processed_logprobs",
    reports=("verl#6240", "vime#64", "vime#70", "prime-rl#697"),
)
def logprobs_mode(view: View) -> Iterator[Finding]:
    """Raw log-probs are taken at temperature 1 while the trainer divides by the temperature: logits [2, 1, 0] at 0.5
    put -0.265 nats into d without any mismatch. The modes that return logits return no log-prob at all.
    """
    if view.rollout_is_ours:
        return  # always at the sampling temperature, over the full vocabulary
    key, value = view.engine_option("logprobs_mode")
    if value is None:
        key, value = f"{ROLLOUT}.logprobs_mode", view.get(f"{ROLLOUT}.logprobs_mode", "processed_logprobs")
    if "logits" in str(value):
        yield found(key, f"it is {value}, which are no log-probs")
    elif value == "raw_logprobs" and view.temperature != 1:
        yield found(key, f"it is {value}, and {ROLLOUT}.temperature is {view.temperature:g}")


@rule(
    "exact.sampling-support",
    Severity.EXACTNESS,
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.min_p",
    remedy=f"{ROLLOUT}.top_p=1, {ROLLOUT}.top_k=-1 and {ROLLOUT}.min_p=0 while training; validation may differ",
    reports=("trl#6789", "trl#7269", "vllm#49577", "ms-swift#8442"),
)
def support(view: View) -> Iterator[Finding]:
    """Cut sampling renormalises over the kept tokens: the recorded log-prob lacks log S, S the kept mass (0.896 on
    average at top_p 0.8), and the trainer's does not.
    """
    if not view.rollout_is_ours:
        yield from _cut(view)


@rule(
    "note.sampling-support",
    Severity.NOTE,
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.min_p",
    remedy=f"{ROLLOUT}.top_p=1, {ROLLOUT}.top_k=-1 and {ROLLOUT}.min_p=0 while training",
)
def support_of_ours(view: View) -> Iterator[Finding]:
    """vexact and stock record the full-vocabulary log-prob, so d stays what it is; but tokens are drawn from another
    distribution than the one that is trained.
    """
    if view.rollout_is_ours:
        yield from _cut(view)


def _cut(view: View) -> Iterator[Finding]:
    for name, whole, cuts in (
        ("top_p", 1.0, lambda value: value < 1),
        ("top_k", -1, lambda value: value > 0),
        ("min_p", 0.0, lambda value: value > 0),
    ):
        if cuts(view.number(f"{ROLLOUT}.{name}", whole)):
            yield found(f"{ROLLOUT}.{name}", f"it is {view.get(f'{ROLLOUT}.{name}')}")


@rule(
    "exact.repetition-penalty",
    Severity.EXACTNESS,
    f"{ROLLOUT}.repetition_penalty",
    remedy=f"set {ROLLOUT}.repetition_penalty=1.0",
)
def repetition_penalty(view: View) -> Iterator[Finding]:
    """The engine changes logits by what was already said; the trainer's log-prob knows no penalty."""
    key = f"{ROLLOUT}.repetition_penalty"
    if view.number(key, 1.0) != 1 and not view.rollout_is_ours:  # start.rollout refuses it for ours
        yield found(key, f"it is {view.number(key, 1.0):g}")


@rule(
    "exact.retokenisation",
    Severity.EXACTNESS,
    f"{ROLLOUT}.multi_turn.use_inference_chat_template",
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
    remedy=f"set {ROLLOUT}.multi_turn.use_inference_chat_template=false and "
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=strict",
    reports=("prime-rl#1525",),
)
def retokenisation(view: View) -> Iterator[Finding]:
    """A conversation that is rendered and tokenised again can come out as other tokens than were sampled: the trainer
    then scores something the rollout never drew.
    """
    where = f"{ROLLOUT}.multi_turn"
    if not view.get(f"{where}.enable", False):
        return
    if view.get(f"{where}.use_inference_chat_template", False):
        yield found(f"{where}.use_inference_chat_template", "it is true")
    if view.get(f"{where}.tokenization_sanity_check_mode", "strict") == "disable":
        yield found(f"{where}.tokenization_sanity_check_mode", "it is disable: nobody would notice")
