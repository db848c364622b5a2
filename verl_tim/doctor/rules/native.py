"""verl's own correction (0.9.1), in configs that use nothing of verl_tim: what it does not do, or does otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.correction import VERL_DEFAULTS
from verl_tim.doctor.rule import ACTOR, MODEL, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.config import EXTERNAL_LIB
from verl_tim.training.correction_checks import log_prob_findings, loss_mode_findings, schedule_findings
from verl_tim.training.correction_config import (
    AGGREGATION_KEY,
    CORRECTION_KEY,
    LOSS_MODE_KEY,
    SCALE_FACTOR_KEY,
    WORKER_KEY,
)
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule

_OURS = f"with verl_tim (a tim: group, {MODEL}.external_lib={EXTERNAL_LIB})"


@rule(
    "correction.log-probs-missing",
    Severity.CORRECTION,
    "actor_rollout_ref.rollout.calculate_log_probs",
    remedy="set it to true",
    reports=("verl#6158", "verl#3996", "verl#6963", "verl#6616"),
)
def log_probs_missing(view: View) -> Iterator[Finding]:
    """Without the rollout's log-probs in the batch verl skips the correction and says nothing."""
    if view.native and view.correction is not None:
        yield from log_prob_findings(view.get, view.correction)


@rule(
    "correction.loss-ignores-it",
    Severity.CORRECTION,
    LOSS_MODE_KEY,
    remedy="choose a loss_mode that takes weights and mask",
)
def loss_ignores_it(view: View) -> Iterator[Finding]:
    """verl hands weights and mask to the policy loss, and not every loss reads them."""
    bypass_by_hand = view.loss_mode == "bypass_mode"  # the next two rules
    if view.native and view.correction is not None and not bypass_by_hand:
        yield from loss_mode_findings(view.get, view.correction, view.loss_mode)


@rule(
    "correction.bypass-in-the-driver-only",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.bypass_mode",
    LOSS_MODE_KEY,
    WORKER_KEY,
    remedy=f"set {LOSS_MODE_KEY}=bypass_mode and +{WORKER_KEY}=${{{CORRECTION_KEY}}}, or run it {_OURS}",
)
def bypass_in_the_driver_only(view: View) -> Iterator[Finding]:
    """The actor's config is frozen before verl's trainer sets the bypass loss (engine_workers.py:643): the rollout's
    log-probs become the old ones, and the worker computes plain PPO without weights, rejection or REINFORCE.
    """
    correction = view.correction
    if view.native and correction is not None and correction.bypass_mode and view.loss_mode != "bypass_mode":
        yield found(f"{CORRECTION_KEY}.bypass_mode", f"it is true, and the worker's loss_mode is {view.loss_mode}")


@rule(
    "correction.worker-default",
    Severity.CORRECTION,
    WORKER_KEY,
    remedy=f"+{WORKER_KEY}=${{{CORRECTION_KEY}}}",
)
def worker_default(view: View) -> Iterator[Finding]:
    """Where the worker is told no correction, verl's actor config fills in one of its own: a sequence weight, whatever
    algorithm.rollout_correction says.
    """
    if view.native and view.loss_mode == "bypass_mode" and view.get(WORKER_KEY) is None:
        yield found(WORKER_KEY, "it is absent, so the worker's correction is rollout_is=sequence")


@rule(
    "correction.bypass-loss-without-bypass",
    Severity.CORRECTION,
    LOSS_MODE_KEY,
    remedy=f"set {LOSS_MODE_KEY}=vanilla, or {CORRECTION_KEY}.bypass_mode=true",
    reports=("verl#4070",),
)
def bypass_loss_without_bypass(view: View) -> Iterator[Finding]:
    """The bypass loss takes old log-probs for the rollout's; under recomputation they are the trainer's, and the
    weights would measure nothing.
    """
    if view.native and view.correction is not None and view.loss_mode == "bypass_mode":
        yield from loss_mode_findings(view.get, view.correction, view.loss_mode)


@rule(
    "correction.drift-rejected",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_rs",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    remedy="one optimiser step per batch, or recomputation",
)
def drift_rejected(view: View) -> Iterator[Finding]:
    """In bypass the worker compares its current weights with the rollout: from the second optimiser step on, rejection
    throws away what the policy has learnt, not what mismatches.
    """
    sized = all(view.whole(key, 0) > 0 for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
    if view.native and view.correction is not None and sized:
        yield from schedule_findings(view.config, view.correction)


@rule(
    "correction.key-ignored",
    Severity.CORRECTION,
    CORRECTION_KEY,
    remedy=f"run it {_OURS}, or take the key out",
)
def key_ignored(view: View) -> Iterator[Finding]:
    """verl reads seven keys of this group and passes over all others without a word; the keys that verl_tim adds are
    read by verl_tim only.
    """
    if not view.native:
        return
    for name, value in view.group(CORRECTION_KEY).items():
        if name not in VERL_DEFAULTS and name != "_target_" and value is not None:
            yield found(f"{CORRECTION_KEY}.{name}", f"it is {value}, and verl has no key of this name")


@rule(
    "correction.k1-band-inverted",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_rs",
    remedy=f"give the band of 1/r, [1/hi, 1/lo]; or run it {_OURS}",
)
def k1_band_inverted(view: View) -> Iterator[Finding]:
    """verl compares -log r with log lo and log hi, so a K1 band acts on 1/r: [0.5, 5] keeps ratios from 0.2 to 2."""
    if view.native and view.correction is not None:
        for one in view.correction.rules:
            bound = one.bound
            if one.estimator == "k1" and isinstance(bound, tuple) and not _symmetric(bound):
                yield found(f"{CORRECTION_KEY}.rollout_rs", f"{one.name} with the band {bound}")


def _symmetric(band: tuple[float | None, float | None]) -> bool:
    lower, upper = band
    return lower is not None and upper is not None and abs(lower * upper - 1) < 1e-9


@rule(
    "correction.denominators",
    Severity.CORRECTION,
    f"{CORRECTION_KEY}.rollout_rs",
    AGGREGATION_KEY,
    remedy=f"run it {_OURS}: {CORRECTION_KEY}.denominator says what is divided by",
    reports=("verl#3915",),
)
def denominators(view: View) -> Iterator[Finding]:
    """verl counts tokens and sequences before it rejects, and its sequence means divide by the configured batch:
    rejecting half of a batch halves the learning rate, and fully rejected rows pull the mean to zero.
    """
    if view.native and view.correction is not None and view.correction.rules:
        yield found(f"{CORRECTION_KEY}.rollout_rs", f"rejection with loss_agg_mode={view.get(AGGREGATION_KEY)}")


@rule(
    "stops.whitening-empty",
    Severity.STOPS,
    "algorithm.adv_estimator",
    f"{CORRECTION_KEY}.rollout_rs",
    remedy=f"algorithm.adv_estimator=grpo, or run it {_OURS}",
    reports=("verl#3984",),
)
def whitening_empty(view: View) -> Iterator[Finding]:
    """verl whitens over kept tokens, and raises when rejection leaves none or one of them."""
    estimator = str(view.get("algorithm.adv_estimator", "gae"))
    whitens = estimator.startswith("reinforce_plus_plus") or estimator == "gae"
    if view.native and view.correction is not None and view.correction.rules and whitens:
        yield found("algorithm.adv_estimator", f"it is {estimator}, with rejection")


@rule(
    "correction.reward-rejected",
    Severity.CORRECTION,
    "algorithm.adv_estimator",
    f"{CORRECTION_KEY}.rollout_rs",
    remedy=f"sequence rules (seq_*), algorithm.adv_estimator=grpo, or run it {_OURS}",
    reports=("verl#6362",),
)
def reward_rejected(view: View) -> Iterator[Finding]:
    """The outcome reward sits on the last token. Where verl rejects that token, REINFORCE++ loses the row's reward,
    and a conversation of several outputs its advantage.
    """
    estimator = str(view.get("algorithm.adv_estimator", "gae"))
    if not (view.native and view.correction is not None and estimator.startswith("reinforce_plus_plus")):
        return
    names = [one.name for one in view.correction.rules if one.name.startswith("token_")]
    if names:
        yield found(f"{CORRECTION_KEY}.rollout_rs", f"{', '.join(names)} with {estimator}")


@rule(
    "correction.geometric-zero",
    Severity.CORRECTION,
    LOSS_MODE_KEY,
    f"{CORRECTION_KEY}.rollout_is_threshold",
    remedy=f"a cap instead of a band, another loss_mode, or run it {_OURS}",
)
def geometric_zero(view: View) -> Iterator[Finding]:
    """A band zeroes a token's weight, and verl's geometric mean takes the zero as 1e-10: one token in ten brings the
    sequence's loss from -1 to -0.1.
    """
    if view.native and view.correction is not None and view.correction.band and view.loss_mode == "geo_mean":
        yield found(LOSS_MODE_KEY, f"it is geo_mean with the band {view.correction.band}")


@rule(
    "correction.scale-factor",
    Severity.CORRECTION,
    SCALE_FACTOR_KEY,
    AGGREGATION_KEY,
    remedy=f"set {SCALE_FACTOR_KEY} to data.max_response_length",
)
def scale_factor(view: View) -> Iterator[Finding]:
    """Left null, the divisor is the width of the micro-batch at hand, which V1 pads to its longest answer: the same
    row weighs more or less by its company.
    """
    if view.native and view.get(AGGREGATION_KEY) == "seq-mean-token-sum-norm" and view.get(SCALE_FACTOR_KEY) is None:
        yield found(SCALE_FACTOR_KEY, "it is null with loss_agg_mode=seq-mean-token-sum-norm")


@rule(
    "note.mismatch-metric",
    Severity.NOTE,
    "trainer",
    remedy="add a tim: group: tim/delta_abs_* are in nats, in every mode",
    reports=("verl#5859", "verl#7196"),
)
def mismatch_metric(view: View) -> Iterator[Finding]:
    """verl's rollout_probs_diff is in probability space, where 3 nats at p = e^-5 show as 0.0064, and it is absent in
    bypass, where the old log-probs are the rollout's.
    """
    if view.native and view.get("actor_rollout_ref.rollout.calculate_log_probs", False):
        bypass = view.correction is not None and view.correction.bypass_mode
        yield found(
            "trainer", "the mismatch is not measured" if bypass else "the mismatch is measured in probabilities"
        )
