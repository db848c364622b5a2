"""Start-up checks of the correction: what is unknown, contradictory, or would not reach the worker's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.correction import ConfigError, RolloutCorrectionConfig
from verl_tim.training.config import EXTERNAL_LIB, EXTERNAL_LIBS, reader
from verl_tim.training.correction_config import (
    AGGREGATION_KEY,
    CORRECTION_KEY,
    KEPT_BASELINES,
    LOSS_MODE_KEY,
    OWN_LOSS_MODES,
    PASSED_THROUGH,
    SCALE_FACTOR_KEY,
    SEQUENCE_LOSS_MODES,
    WORKER_KEY,
    is_plain,
    of_run,
    optimizer_steps,
)
from verl_tim.training.finding import Finding

_Get = Callable[..., Any]

_ACTOR = "actor_rollout_ref.actor"
# What decides how many optimiser steps a batch takes.
_SCHEDULE_KEYS = (
    *(f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs"),
    *("actor_rollout_ref.rollout.n", "data.train_batch_size"),
)


def correction_findings(config: DictConfig) -> list[Finding]:
    """Every setting of a run config under which the correction could not do what it says."""
    get = reader(config)
    try:
        correction = of_run(config)
    except ConfigError as error:
        return [Finding(f"{CORRECTION_KEY}.{error.key}", f"{error.value!r}: {error.problem}", error.remedy)]
    loss_mode = str(get(LOSS_MODE_KEY, "vanilla"))
    found = [
        *loss_mode_findings(get, correction, loss_mode),
        *_loss_numbers(get, loss_mode),
        *_worker_copy(config, get),
    ]
    if not is_plain(correction, loss_mode):
        found += [*_reaches_the_loss(get), *log_prob_findings(get, correction), *schedule_findings(config, correction)]
        found += [*_baseline(get, correction)]
    return found


def loss_mode_findings(get: _Get, correction: RolloutCorrectionConfig, loss_mode: str) -> Iterator[Finding]:
    """A loss mode that ignores what the correction says, or reads it otherwise."""
    if loss_mode == "bypass_mode" and not correction.bypass_mode:
        yield Finding(
            LOSS_MODE_KEY,
            f"bypass_mode takes old log-probs for the rollout's, which they are not: {CORRECTION_KEY}.bypass_mode is "
            "off",
            f"Set {LOSS_MODE_KEY}=vanilla, or {CORRECTION_KEY}.bypass_mode=true",
        )
    if loss_mode in OWN_LOSS_MODES:
        return
    if loss_mode not in PASSED_THROUGH:
        if correction.enabled:
            yield Finding(
                LOSS_MODE_KEY,
                f"{loss_mode} is a loss that may ignore the correction's weights and mask",
                f"Choose one of {', '.join((*OWN_LOSS_MODES, *PASSED_THROUGH))}, or correction=none",
            )
        return
    for key, value, wrong in (
        ("loss_type", "reinforce", correction.loss_type == "reinforce"),
        ("rollout_is_in", "ratio", correction.rollout_is_in == "ratio"),
    ):
        if wrong:
            yield Finding(
                f"{CORRECTION_KEY}.{key}",
                f"{value} has no effect on verl's loss {loss_mode}, which keeps its own form",
                f"Set {LOSS_MODE_KEY}=vanilla, or leave {CORRECTION_KEY}.{key} at its default",
            )
    aggregation = str(get(AGGREGATION_KEY, "token-mean"))
    if correction.denominator == "all" and "seq-mean-token-mean" in (
        aggregation,
        _aggregation_of(loss_mode, aggregation),
    ):
        yield Finding(
            f"{CORRECTION_KEY}.denominator",
            f"all has no effect on the mean over a sequence's tokens inside verl's loss {loss_mode}",
            f"Set it to kept, or choose another {AGGREGATION_KEY}",
        )
    terms = get("actor_rollout_ref.actor.entropy_coeff", 0) != 0 or get("actor_rollout_ref.actor.use_kl_loss", False)
    if loss_mode in SEQUENCE_LOSS_MODES and not aggregation.startswith("seq-") and terms:
        yield Finding(
            AGGREGATION_KEY,
            f"it is {aggregation}, and {loss_mode} is a mean over sequences whatever it says: entropy and KL terms "
            "would have another denominator",
            "Set it to seq-mean-token-mean",
        )


def _loss_numbers(get: _Get, loss_mode: str) -> Iterator[Finding]:
    """What the loss would refuse in the worker, at the first mini-batch."""
    if loss_mode in OWN_LOSS_MODES:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = get(f"{_ACTOR}.{name}", 0.0)
            if not (_is_number(value) and value >= 0):
                yield Finding(f"{_ACTOR}.{name}", f"it is {_shown(value)}", "Set it to a number of at least 0")
        value = get(f"{_ACTOR}.clip_ratio_c")
        if value is not None and not (_is_number(value) and value > 1):
            yield Finding(
                f"{_ACTOR}.clip_ratio_c",
                f"it is {_shown(value)}, and PPO's dual clip takes a bound above 1",
                "Set it to a number above 1 (verl's default is 3.0), or to null for no dual clip",
            )
    value = get(SCALE_FACTOR_KEY)
    normalised = get(AGGREGATION_KEY) == "seq-mean-token-sum-norm"
    if normalised and value is not None and not (_is_number(value) and value > 0):
        yield Finding(
            SCALE_FACTOR_KEY,
            f"it is {_shown(value)}, and the loss is divided by it",
            "Set it to a positive number, or to null for data.max_response_length",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _aggregation_of(loss_mode: str, aggregation: str) -> str:
    return "seq-mean-token-mean" if loss_mode in SEQUENCE_LOSS_MODES else aggregation


def _worker_copy(config: DictConfig, get: _Get) -> Iterator[Finding]:
    """Somebody wrote the workers' copy by hand; the trainer would write over it."""
    copy = get(WORKER_KEY)
    original = get(CORRECTION_KEY)
    if copy is None or "loss_type" not in copy:
        return
    for name in sorted(set(copy) | set(original or {})):
        ours = None if original is None else original.get(name)
        if name != "_target_" and copy.get(name) != ours:
            yield Finding(
                f"{WORKER_KEY}.{name}",
                f"it is {copy.get(name)}, and {CORRECTION_KEY}.{name}, which the worker is told, is {ours}",
                f"Set {CORRECTION_KEY} and leave {WORKER_KEY} out",
            )


def _reaches_the_loss(get: _Get) -> Iterator[Finding]:
    library = get("actor_rollout_ref.model.external_lib")
    if library not in EXTERNAL_LIBS:
        yield Finding(
            "actor_rollout_ref.model.external_lib",
            f"{CORRECTION_KEY} corrects something, and without this module's engine verl's worker would not",
            f"Set it to {EXTERNAL_LIB}",
        )
    strategy = get("actor_rollout_ref.actor.strategy")
    if strategy is not None and strategy not in ("fsdp", "fsdp2"):
        yield Finding(
            "actor_rollout_ref.actor.strategy",
            f"it is {strategy}, and the correction is in verl_tim's FSDP engine",
            "Set it to fsdp2",
        )
    if get("distillation.enabled", False):
        yield Finding(
            "distillation.enabled",
            f"its loss does not go through {CORRECTION_KEY}",
            "Set it to false, or correction=none",
        )


def log_prob_findings(get: _Get, correction: RolloutCorrectionConfig) -> Iterator[Finding]:
    """A correction without the rollout's log-probs."""
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    if correction.enabled and not get(key, False):
        yield Finding(key, f"{CORRECTION_KEY} needs the rollout's log-probs", "Set it to true")


def schedule_findings(config: DictConfig, correction: RolloutCorrectionConfig) -> Iterator[Finding]:
    """Rejection that would see real drift in later optimiser steps, and sizes from which no steps can be counted."""
    sizes = {key: OmegaConf.select(config, key) for key in _SCHEDULE_KEYS}
    wrong = {key: value for key, value in sizes.items() if not (_is_number(value) and value >= 1)}
    for key, value in wrong.items():
        yield Finding(key, f"it is {_shown(value)}", "Set it to a whole number of at least 1")
    if wrong:
        return
    try:
        correction.check_schedule(optimizer_steps(config))
    except ConfigError as error:
        yield Finding(f"{CORRECTION_KEY}.{error.key}", f"{error.value!r}: {error.problem}", error.remedy)


def _baseline(get: _Get, correction: RolloutCorrectionConfig) -> Iterator[Finding]:
    estimator = str(get("algorithm.adv_estimator", "gae"))
    if correction.rollout_is is not None and "optimal_token_baseline" in estimator:
        yield Finding(
            "algorithm.adv_estimator",
            f"{estimator} would weigh its baseline by importance weights, which are computed in the worker, after it",
            f"Choose another estimator, or {CORRECTION_KEY}.rollout_is=null",
        )
    if correction.baseline_scope != "kept":
        return
    if estimator not in KEPT_BASELINES:
        yield Finding(
            f"{CORRECTION_KEY}.baseline_scope",
            f"kept is not defined for algorithm.adv_estimator={estimator}",
            f"Set it to all, or choose one of {', '.join(KEPT_BASELINES)}",
        )
    if get("algorithm.use_pf_ppo", False):
        yield Finding(
            f"{CORRECTION_KEY}.baseline_scope",
            "kept computes advantages twice, and algorithm.use_pf_ppo draws rows anew each time",
            f"Set {CORRECTION_KEY}.baseline_scope=all, or algorithm.use_pf_ppo=false",
        )
