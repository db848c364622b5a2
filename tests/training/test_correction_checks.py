"""Start-up checks of the correction: what cannot take effect is named, with key and remedy; what can is left alone."""

from __future__ import annotations

import copy

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_tim.correction import PRESETS
from verl_tim.training.correction_checks import correction_findings
from verl_tim.training.correction_config import (
    CORRECTION_KEY,
    WORKER_KEY,
    install,
    is_installed,
    of_run,
    of_worker,
    optimizer_steps,
)

RC = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
BYPASS = {f"{RC}.bypass_mode": "true"}
TIS = {f"{RC}.rollout_is": "token"}
REJECT = {f"{RC}.rollout_rs": "seq_mean_k3", f"{RC}.rollout_rs_threshold": "0.1"}


@pytest.fixture(scope="module")
def config_of():
    """verl's own config with a few keys on top; composed once, since that takes a second."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose(
            "ppo_trainer",
            overrides=[
                "algorithm.adv_estimator=grpo",
                "data.train_batch_size=8",
                "data.max_response_length=24",
                "actor_rollout_ref.model.external_lib=verl_tim.training.external",
                f"{ACTOR}.strategy=fsdp2",
                f"{ACTOR}.ppo_mini_batch_size=8",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.rollout.name=vexact",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
            ],
        )

    def make(overrides):
        config = copy.deepcopy(composed)
        for key, value in overrides.items():
            OmegaConf.update(config, key, yaml.safe_load(value), merge=False, force_add=True)
        return config

    return make


@pytest.mark.parametrize("name", [name for name in PRESETS if "_sum" not in name or name == "paper_tis_seq_sum"])
def test_every_preset_can_start(config_of, name):
    assert correction_findings(config_of({f"{RC}.preset": name})) == []


@pytest.mark.parametrize("loss_mode", ["gpg", "gspo", "sapo", "geo_mean", "cispo", "dppo_tv", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("mode", [TIS, {**BYPASS, **REJECT}])
def test_verls_other_losses_can_start(config_of, loss_mode, mode):
    assert correction_findings(config_of({f"{ACTOR}.policy_loss.loss_mode": loss_mode, **mode})) == []


def test_verls_own_name_for_bypass_is_understood(config_of):
    assert correction_findings(config_of({f"{ACTOR}.policy_loss.loss_mode": "bypass_mode", **BYPASS})) == []


REFUSED = [
    ({f"{RC}.rollout_is": "tokens"}, f"{RC}.rollout_is", "token, sequence"),
    ({f"{RC}.rollout_iss": "token"}, f"{RC}.rollout_iss", "rollout_is"),
    ({f"{RC}.preset": "paper"}, f"{RC}.preset", "unknown preset"),
    ({f"{RC}.preset": "seq_reject_corr_sum_k3"}, f"{RC}.rollout_rs_threshold", "threshold"),
    ({f"{RC}.baseline_scope": "kept", **BYPASS}, f"{RC}.baseline_scope", "recomputation"),
    ({f"{RC}.rollout_is_in": "ratio", f"{ACTOR}.policy_loss.loss_mode": "gpg", **TIS}, f"{RC}.rollout_is_in", "loss"),
    ({f"{ACTOR}.ppo_mini_batch_size": "4", **REJECT, **BYPASS}, f"{RC}.rollout_rs_signal", "2 optimiser steps"),
    ({f"{ACTOR}.ppo_epochs": "3", **REJECT, **BYPASS},
     f"{RC}.rollout_rs_signal", "3 optimiser steps"),
    ({"actor_rollout_ref.rollout.calculate_log_probs": "false", **TIS},
     "actor_rollout_ref.rollout.calculate_log_probs", "true"),
    ({"actor_rollout_ref.model.external_lib": "null", **TIS}, "actor_rollout_ref.model.external_lib", "external"),
    ({f"{ACTOR}.strategy": "megatron", **TIS}, f"{ACTOR}.strategy", "fsdp2"),
    ({"distillation.enabled": "true", **TIS}, "distillation.enabled", "false"),
    ({f"{ACTOR}.policy_loss.loss_mode": "mine", **TIS}, f"{ACTOR}.policy_loss.loss_mode", "may ignore"),
    ({f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"}, f"{ACTOR}.policy_loss.loss_mode", "which they are not"),
    ({f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{RC}.loss_type": "reinforce"}, f"{RC}.loss_type", "no effect"),
    ({f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{RC}.rollout_is_in": "ratio", **TIS},
     f"{RC}.rollout_is_in", "no effect"),
    ({f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
      f"{RC}.denominator": "all"}, f"{RC}.denominator", "no effect"),
    ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean", f"{ACTOR}.use_kl_loss": "true"},
     f"{ACTOR}.loss_agg_mode", "denominator"),
    ({f"{RC}.baseline_scope": "kept", "algorithm.adv_estimator": "remax"}, f"{RC}.baseline_scope", "remax"),
    ({f"{RC}.baseline_scope": "kept", "algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": "true"},
     f"{RC}.baseline_scope", "use_pf_ppo"),
    ({"algorithm.adv_estimator": "optimal_token_baseline", **TIS}, "algorithm.adv_estimator", "rollout_is=null"),
    ({f"{RC}.preset": "[icepop]"}, f"{RC}.preset", "unknown preset"),
    ({f"{ACTOR}.clip_ratio": "-0.5"}, f"{ACTOR}.clip_ratio", "at least 0"),
    ({f"{ACTOR}.clip_ratio_low": ".nan"}, f"{ACTOR}.clip_ratio_low", "at least 0"),
    ({f"{ACTOR}.clip_ratio_high": "much"}, f"{ACTOR}.clip_ratio_high", "at least 0"),
    ({f"{ACTOR}.clip_ratio_c": "0.5"}, f"{ACTOR}.clip_ratio_c", "null for no dual clip"),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": "0"},
     f"{ACTOR}.loss_scale_factor", "null for data.max_response_length"),
    ({f"{ACTOR}.ppo_mini_batch_size": "null", **TIS}, f"{ACTOR}.ppo_mini_batch_size", "it is null"),
    ({f"{ACTOR}.ppo_mini_batch_size": "0", **TIS}, f"{ACTOR}.ppo_mini_batch_size", "at least 1"),
    ({WORKER_KEY: "{rollout_is: sequence, loss_type: ppo_clip}", **TIS}, f"{WORKER_KEY}.rollout_is", "leave"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "says"), REFUSED)
def test_what_cannot_take_effect_is_refused(config_of, overrides, key, says):
    found = {finding.key: finding for finding in correction_findings(config_of(overrides))}
    assert key in found, list(map(str, found.values()))
    assert says in f"{found[key].problem} {found[key].remedy}"


def test_without_correction_nothing_is_asked_for(config_of):
    plain = {
        "actor_rollout_ref.rollout.calculate_log_probs": "false",
        "actor_rollout_ref.model.external_lib": "null",
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.policy_loss.loss_mode": "mine",
        "trainer.v1.trainer_mode": "separate_async",
    }
    assert correction_findings(config_of(plain)) == []


def test_open_numbers_of_the_loss_can_start(config_of):
    """null stands for clip_ratio on either side, for no dual clip, and for the response length."""
    open_numbers = {
        f"{ACTOR}.clip_ratio_low": "null",
        f"{ACTOR}.clip_ratio_high": "null",
        f"{ACTOR}.clip_ratio_c": "null",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": "null",
    }
    assert correction_findings(config_of({**open_numbers, **TIS})) == []


# ------------------------------------------------------------------------------------------------------------- install


def test_install_writes_what_verl_and_the_workers_read(config_of, capsys):
    config = config_of({f"{RC}.preset": "bypass_reinforce", f"{RC}.denominator": "all"})
    correction = install(config)
    assert (correction.bypass_mode, correction.loss_type, correction.denominator) == (True, "reinforce", "all")
    # verl's trainers look at this key to decide whether to score the batch again
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert OmegaConf.select(config, WORKER_KEY) == OmegaConf.select(config, CORRECTION_KEY)
    assert is_installed(config.algorithm.rollout_correction)
    assert of_run(config) == correction
    assert correction_findings(config) == []
    printed = capsys.readouterr().out
    assert "preset bypass_reinforce" in printed
    assert any(line.split()[:3] == ["denominator", "all", "given"] for line in printed.splitlines())
    assert any(line.split()[:3] == ["bypass_mode", "true", "preset"] for line in printed.splitlines())


@pytest.mark.parametrize("name", [name for name in PRESETS if "_sum_" not in name])
def test_the_worker_is_told_what_the_trainer_resolved(config_of, name):
    from verl.utils.config import omega_conf_to_dataclass

    config = config_of({f"{RC}.preset": name})
    correction = install(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert of_worker(actor) == correction
    # a second reading of what was written changes nothing
    assert install(config) == correction


def test_a_worker_without_a_trainer_of_ours_is_told_nothing(config_of):
    from verl.utils.config import omega_conf_to_dataclass

    assert of_worker(omega_conf_to_dataclass(config_of({}).actor_rollout_ref.actor)) is None
    assert not is_installed(config_of({}).algorithm.rollout_correction)


def test_gpg_is_reinforce(config_of, capsys):
    correction = install(config_of({f"{ACTOR}.policy_loss.loss_mode": "gpg"}))
    assert correction.loss_type == "reinforce"
    assert "loss_mode=gpg" in capsys.readouterr().out


def test_more_rows_are_more_optimiser_steps(config_of):
    config = config_of({f"{ACTOR}.ppo_epochs": "3", "actor_rollout_ref.rollout.n": "4"})
    assert optimizer_steps(config) == 3
    assert optimizer_steps(config, rows=32) == 3
    assert optimizer_steps(config, rows=33) == 6


def test_the_scale_factor_becomes_the_response_length(config_of):
    norm = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
    config = config_of(norm)
    install(config)
    assert config.actor_rollout_ref.actor.loss_scale_factor == 24
    config = config_of({**norm, f"{ACTOR}.loss_scale_factor": "100"})
    install(config)
    assert config.actor_rollout_ref.actor.loss_scale_factor == 100
    config = config_of({})
    install(config)
    assert config.actor_rollout_ref.actor.loss_scale_factor is None


def test_verls_own_correction_steps_aside_for_an_installed_one(config_of):
    import verl.trainer.ppo.v1.trainer_base as v1
    from verl.trainer.ppo import rollout_corr_helper as native

    assert v1.compute_rollout_correction_and_add_to_batch is native.compute_rollout_correction_and_add_to_batch
    config = config_of(TIS)
    install(config)
    batch = object()
    assert native.compute_rollout_correction_and_add_to_batch(batch, config.algorithm.rollout_correction) == (batch, {})
    with pytest.raises(AttributeError):  # verl's own goes on to read the batch
        native.compute_rollout_correction_and_add_to_batch(batch, config_of(TIS).algorithm.rollout_correction)
