"""The correction as a run's config states it: read on the driver, told to the workers, read there.

`algorithm.rollout_correction` is the one source. verl's workers never see it, so the trainer writes what it resolves to
to `WORKER_KEY` before any worker starts; a worker that finds nothing there was not started by a trainer of verl_tim,
and keeps verl's own loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.correction import RolloutCorrectionConfig

CORRECTION_KEY = "algorithm.rollout_correction"
WORKER_KEY = "actor_rollout_ref.actor.policy_loss.rollout_correction"
LOSS_MODE_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
AGGREGATION_KEY = "actor_rollout_ref.actor.loss_agg_mode"
SCALE_FACTOR_KEY = "actor_rollout_ref.actor.loss_scale_factor"

# verl's loss modes that are computed here: vanilla is PPO's clip (or what loss_type says), gpg is REINFORCE.
# `bypass_mode` is verl's own dispatcher on loss_type.
OWN_LOSS_MODES = ("vanilla", "gpg", "bypass_mode")
# verl's other modes that apply the mask and weights they are handed (core_algos.py, all of them read).
PASSED_THROUGH = ("gspo", "sapo", "geo_mean", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro")
# Of these, the ones that are means over sequences whatever `loss_agg_mode` says: geo_mean takes torch.mean over rows,
# sapo has "seq-mean-token-mean" written out.
SEQUENCE_LOSS_MODES = ("geo_mean", "sapo")

# Estimators that verl's compute_advantage can run on a part of the rows (`baseline`); remax has no group, pass@k needs
# two rows in each, gdpo and the optimal token baselines need what only a whole batch has.
KEPT_BASELINES = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"),
)
# Of these, the ones that whiten; verl's masked_whiten takes no batch of fewer than two tokens.
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")


def of_mapping(mapping: Mapping[str, Any] | None, loss_mode: str, group: str | None = None) -> RolloutCorrectionConfig:
    """The correction that a mapping of settings and verl's loss mode ask for together.

    Args:
        group: the chosen option of the config group `correction=`, for the origins.

    Raises:
        ConfigError: of `verl_tim.correction`: a setting that is unknown or cannot take effect.
    """
    correction = RolloutCorrectionConfig.from_verl(mapping, group=group)
    if loss_mode == "gpg" and correction.loss_type != "reinforce":
        origins = {**correction.origins, "loss_type": "loss_mode=gpg"}
        correction = dataclasses.replace(correction, loss_type="reinforce", origins=origins)
    return correction


def of_run(config: DictConfig) -> RolloutCorrectionConfig:
    """The correction of a whole run config.

    Raises:
        ConfigError: as `of_mapping`.
    """
    return of_mapping(
        _plain(config, CORRECTION_KEY),
        str(OmegaConf.select(config, LOSS_MODE_KEY) or "vanilla"),
        OmegaConf.select(config, "tim.choices.correction"),
    )


def of_worker(actor_config: Any) -> RolloutCorrectionConfig | None:
    """The correction that the trainer told a worker (verl's `ActorConfig`); None if it told nothing.

    Where the key is absent, verl puts a dataclass of its own there (workers/config/actor.py:101).
    """
    told = actor_config.policy_loss.rollout_correction
    if told is None or dataclasses.is_dataclass(told):
        return None
    return of_mapping(told, str(actor_config.policy_loss.loss_mode))


def install(config: DictConfig) -> RolloutCorrectionConfig:
    """Resolve the correction, print it, and write it where verl's trainers and the workers read it.

    verl's trainers look at `bypass_mode` of `CORRECTION_KEY`, which a preset sets without being written there. A null
    `loss_scale_factor` becomes the response length: in the worker it would be each micro-batch's own width.

    Raises:
        ConfigError: as `of_run`.
    """
    correction = of_run(config)
    print(correction.describe(), flush=True)
    resolved = {"preset": correction.preset, **correction.to_mapping()}
    with open_dict(config):
        for key in (CORRECTION_KEY, WORKER_KEY):
            OmegaConf.update(config, key, resolved, merge=False, force_add=True)
        normalised = OmegaConf.select(config, AGGREGATION_KEY) == "seq-mean-token-sum-norm"
        if normalised and OmegaConf.select(config, SCALE_FACTOR_KEY) is None:
            OmegaConf.update(config, SCALE_FACTOR_KEY, config.data.max_response_length, force_add=True)
    return correction


def is_installed(rollout_correction: Any) -> bool:
    """Whether `install` has written this group: it spells every key out, and verl has no key of that name."""
    return rollout_correction is not None and rollout_correction.get("baseline_scope") is not None


def is_plain(correction: RolloutCorrectionConfig, loss_mode: str) -> bool:
    """Whether verl's own loss would be right: nothing is corrected, and the loss is the one that verl's mode names."""
    nothing = dataclasses.replace(correction, loss_type="ppo_clip") == RolloutCorrectionConfig()
    return nothing and (correction.loss_type == "ppo_clip" or loss_mode == "gpg")


def optimizer_steps(config: DictConfig, rows: int | None = None) -> int:
    """Optimiser steps on one rollout batch: mini-batches times epochs, as verl's trainers cut it.

    Args:
        rows: of a batch at hand, where an agent may have given several outputs to a prompt; None: as configured.
    """
    actor, n = config.actor_rollout_ref.actor, int(config.actor_rollout_ref.rollout.n)
    rows = int(config.data.train_batch_size) * n if rows is None else rows
    return -(-rows // (int(actor.ppo_mini_batch_size) * n)) * int(actor.get("ppo_epochs", 1))


def clip_range(actor: Any) -> tuple[float, float]:
    """PPO's clip below and above 1, from an actor's config."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return (
        float(actor.clip_ratio if low is None else low),
        float(actor.clip_ratio if high is None else high),
    )


def _plain(config: DictConfig, key: str) -> Mapping[str, Any] | None:
    group = OmegaConf.select(config, key)
    return OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else group  # type: ignore[return-value]
