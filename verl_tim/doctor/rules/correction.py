"""The correction, whoever computes it: what it is told and cannot do, and what it does twice."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.correction.thresholds import Band
from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.correction_config import CORRECTION_KEY, LOSS_MODE_KEY, optimizer_steps
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule


@rule(
    "correction.band-read-as-number",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_is_threshold",
    f"{CORRECTION_KEY}.rollout_rs_threshold",
    remedy="write a band as [lo, hi] or in quotes",
    at_start=True,
)
def band_read_as_number(view: View) -> Iterator[Finding]:
    """YAML reads the unquoted 0.5_5 as the number 0.55: a band from 0.5 to 5 becomes a cap below 1, and nothing shows
    what was written once it is parsed. Looked for in the text of the config and of the overrides.
    """
    for number in view.underscore_numbers:
        error = number.error()
        yield Finding(f"{CORRECTION_KEY}.{error.key}", f"{error.value}: {error.problem}", error.remedy)


@rule(
    "correction.threshold-below-one",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_is_threshold",
    remedy="give a cap of at least 1, such as 2, or a band [lo, hi]",
)
def threshold_below_one(view: View) -> Iterator[Finding]:
    """A cap below 1 truncates tokens that do not mismatch at all (weight 1), so that every loss is scaled down alike
    and nothing is corrected. It is what is left of a band that YAML read as a number.
    """
    correction = view.correction
    if correction is None or correction.rollout_is is None or correction.weights_are_logged_only:
        return
    cap = correction.rollout_is_threshold
    if not isinstance(cap, Band) and cap is not None and cap < 1:
        yield found(f"{CORRECTION_KEY}.rollout_is_threshold", f"it is {cap:g}")


@rule(
    "correction.sequence-ratio-twice",
    Severity.CORRECTION,
    LOSS_MODE_KEY,
    f"{CORRECTION_KEY}.rollout_is",
    remedy=f"choose {CORRECTION_KEY}.rollout_is=token, or another loss_mode",
)
def sequence_ratio_twice(view: View) -> Iterator[Finding]:
    """GSPO's own ratio is one per sequence; a sequence weight beside it corrects the same gap a second time."""
    correction = view.correction
    if correction is None or not correction.weights_multiply_loss or view.get(LOSS_MODE_KEY) != "gspo":
        return
    if correction.rollout_is in ("sequence", "sequence_mean"):
        yield found(LOSS_MODE_KEY, f"gspo beside {CORRECTION_KEY}.rollout_is={correction.rollout_is}")


@rule(
    "note.unused-setting",
    Severity.NOTE,
    CORRECTION_KEY,
    remedy="remove it, or change what it says",
)
def unused_setting(view: View) -> Iterator[Finding]:
    """A setting that another setting keeps from acting; the reason is in the finding."""
    correction = view.correction
    if correction is None:
        return
    for key, reason in correction.unused_keys().items():
        yield found(f"{CORRECTION_KEY}.{key}", f"has no effect: {reason}")
    # A resolved correction holds one bound per rule, so a threshold without a rule is seen only as it was written.
    threshold = f"{CORRECTION_KEY}.rollout_rs_threshold"
    if not correction.rules and view.get(threshold) is not None:
        yield found(threshold, "has no effect: rollout_rs is null")


@rule(
    "note.weights-hold-drift",
    Severity.NOTE,
    f"{CORRECTION_KEY}.rollout_is",
    remedy=f"set {CORRECTION_KEY}.old_forward=true, take one optimiser step per batch, or keep it if drift is to be "
    "weighed, too",
)
def weights_hold_drift(view: View) -> Iterator[Finding]:
    """Under bypass the weights are the current policy over the rollout: of a batch's optimiser steps only the first
    sees the mismatch alone, and the later ones weigh how far the policy has moved, too.
    """
    correction = view.correction
    if correction is None or not (correction.mismatch_needs_forward and correction.weights_multiply_loss):
        return
    sizes = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n")
    if any(view.whole(key, 0) < 1 for key in sizes):
        return  # start.correction speaks of these
    steps = optimizer_steps(view.config)
    if steps > 1:
        yield found(f"{CORRECTION_KEY}.rollout_is", f"it is {correction.rollout_is} with {steps} optimiser steps")


@rule(
    "correction.padding-rejects-all",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_rs",
    f"{MODEL}.path",
    remedy="rollout=vexact; or a model whose head has as many rows as its tokenizer has tokens",
)
def padding_rejects_all(view: View) -> Iterator[Finding]:
    """The constant that vLLM's masked vocabulary rows add to every token can push every sequence over a rejection
    bound: three GRPO steps ran so with zero gradient and no warning.
    """
    if view.on_vllm and view.unused_logits is not None and view.correction is not None and view.correction.rules:
        tokens, rows = view.unused_logits
        names = ", ".join(one.name for one in view.correction.rules)
        yield found(f"{CORRECTION_KEY}.rollout_rs", f"{names} with {rows - tokens} head rows beyond the tokenizer")


@rule(
    "waste.nothing-to-correct",
    Severity.WASTE,
    CORRECTION_KEY,
    remedy="correction=none",
)
def nothing_to_correct(view: View) -> Iterator[Finding]:
    """Where rollout and trainer agree bit for bit every weight is 1 and nothing is rejected. Rules on the PPO ratio
    and bypass act all the same.
    """
    correction = view.correction
    if not view.zero_mismatch or correction is None or correction.bypass_mode:
        return
    if correction.rollout_is is not None or (correction.rules and correction.rollout_rs_signal == "r_corr"):
        yield found(CORRECTION_KEY, "it corrects, and this rollout and trainer do not differ")


@rule(
    "note.nothing-corrected",
    Severity.NOTE,
    CORRECTION_KEY,
    remedy="correction=token_tis to begin with; or rollout=vexact trainer=contract",
)
def nothing_corrected(view: View) -> Iterator[Finding]:
    """The two sides differ and nothing is done about it. Right for measuring the mismatch, and how a collapse begins
    otherwise.
    """
    if not view.zero_mismatch and view.correction is not None and not view.correction.enabled:
        yield found(CORRECTION_KEY, "nothing is corrected")
