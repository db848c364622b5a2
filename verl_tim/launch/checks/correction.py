"""`algorithm.rollout_correction`: keys, values, and combinations that cannot take effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.errors import Finding
from verl_tim.launch.recipes import closest

KEY = "algorithm.rollout_correction"


def check(config: DictConfig) -> Iterator[Finding]:
    """Unknown keys, each with the nearest known one; then the first value that the correction refuses."""
    from verl_tim.correction import ConfigError, RolloutCorrectionConfig

    known = [*RolloutCorrectionConfig.setting_names(), "preset"]
    unknown = [str(key) for key in _node(config) if key not in known and key != "_target_"]
    for key in unknown:
        yield Finding(
            f"{KEY}.{key}", "is not a key of the correction", closest(key, known) + f"known: {', '.join(known)}"
        )
    if unknown:
        return
    try:
        resolved(config)
    except ConfigError as error:
        yield Finding(f"{KEY}.{error.key}", f"is {error.value!r}: {error.problem}", error.remedy)


def resolved(config: DictConfig) -> Any:
    """The run's `RolloutCorrectionConfig` as its trainer resolves it, verl's loss mode included.

    Raises:
        verl_tim.correction.ConfigError: a key, a value or a combination that cannot be used.
    """
    from verl_tim.training.correction_config import of_run

    return of_run(config)


def notes(config: DictConfig) -> Iterator[Finding]:
    """What can run and is hardly meant; for a config in which no check of values found anything."""
    from verl_tim.training.correction_config import optimizer_steps

    correction = resolved(config)
    yield from unused(correction)
    # the resolved correction holds one bound per rule, so a threshold without a rule is seen only as it was written
    if not correction.rules and _node(config).get("rollout_rs_threshold") is not None:
        yield Finding(
            f"{KEY}.rollout_rs_threshold", "has no effect: rollout_rs is null", "remove it, or change what it says"
        )
    steps = optimizer_steps(config)
    if correction.mismatch_needs_forward and correction.weights_multiply_loss and steps > 1:
        yield Finding(
            f"{KEY}.rollout_is",
            f"weighs by the current policy over the rollout, and of {steps} optimiser steps per batch only the first "
            "sees the mismatch alone",
            f"set {KEY}.old_forward=true, take one optimiser step per batch, or keep it if drift is to be weighed, too",
        )
    yield from sequence_ratio_twice(config, correction)


def unused(correction: Any) -> Iterator[Finding]:
    """Settings of a `RolloutCorrectionConfig` that another one keeps from acting."""
    for key, reason in correction.unused_keys().items():
        yield Finding(f"{KEY}.{key}", f"has no effect: {reason}", "remove it, or change what it says")


def sequence_ratio_twice(config: DictConfig, correction: Any) -> Iterator[Finding]:
    """GSPO's ratio per sequence, and a sequence weight beside it."""
    from verl_tim.training.correction_config import LOSS_MODE_KEY

    sequence_weight = correction.rollout_is in ("sequence", "sequence_mean") and correction.weights_multiply_loss
    if OmegaConf.select(config, LOSS_MODE_KEY) == "gspo" and sequence_weight:
        yield Finding(
            LOSS_MODE_KEY,
            f"gspo has a ratio per sequence, and {KEY}.rollout_is={correction.rollout_is} weighs each sequence again",
            f"choose {KEY}.rollout_is=token, or another loss_mode",
        )


def _node(config: DictConfig) -> Mapping[str, Any]:
    node = OmegaConf.select(config, KEY)
    if node is None:
        return {}
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return plain
