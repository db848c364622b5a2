"""Where the rollout's log-probs may stand for the trainer's, and each setting under which they may not."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from verl_tim.training.config import BACKEND_KEY, ConfigError, ReuseConfig, TimConfig
from verl_tim.training.correction_config import CORRECTION_KEY
from verl_tim.training.reuse import ENABLED_KEY
from verl_tim.training.reuse_checks import reuse_findings
from verl_tim.training.start_checks import RULES

GOOD = {
    ENABLED_KEY: True,
    BACKEND_KEY: "contract",
    "actor_rollout_ref.rollout.name": "vexact",
    "actor_rollout_ref.rollout.temperature": 0.6,
    "actor_rollout_ref.rollout.top_p": 0.9,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "algorithm.adv_estimator": "grpo",
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
}


def config_of(**changes):
    config = OmegaConf.create()
    for key, value in {**GOOD, **changes}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer.use_v1": False},
        # another optimiser step's ratio is the loss's own, and reads the old log-probs as they are
        {f"{CORRECTION_KEY}.rollout_rs": "seq_mean_k3", f"{CORRECTION_KEY}.rollout_rs_threshold": 0.01,
         f"{CORRECTION_KEY}.rollout_rs_signal": "r_ppo"},
        {f"{CORRECTION_KEY}.rollout_rs": "opsm", f"{CORRECTION_KEY}.rollout_rs_threshold": 0.01},
        # -A log p reads no old log-probs at all
        {f"{CORRECTION_KEY}.loss_type": "reinforce"},
        {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
    ],
)  # fmt: skip
def test_what_may_start(changes):
    assert list(reuse_findings(config_of(**changes))) == []


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"actor_rollout_ref.rollout.name": "stock"}, ENABLED_KEY, "name=stock differ"),
        ({"actor_rollout_ref.rollout.name": "vllm"}, ENABLED_KEY, "name=vllm differ"),
        ({BACKEND_KEY: "torch"}, ENABLED_KEY, "stock trainer"),
        ({"actor_rollout_ref.rollout.temperature": 0}, "actor_rollout_ref.rollout.temperature", "greedy"),
        ({"tim.gate.exact": False}, "tim.gate.exact", "rests on the gate"),
        ({"tim.gate.on_mismatch": "warn"}, "tim.gate.on_mismatch", "known to be wrong"),
        ({"trainer.v1.trainer_mode": "colocate_async"}, ENABLED_KEY, "older weights"),
        ({"skip.rollout_tq.enable": True}, "skip.rollout_tq.enable", "from a file"),
        ({"skip.rollout.enable": True}, "skip.rollout.enable", "from a file"),
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, "algorithm.adv_estimator", "over the vocabulary"),
        ({"actor_rollout_ref.actor.fsdp_config.router_replay.mode": "R2"},
         "actor_rollout_ref.actor.fsdp_config.router_replay.mode", "records routes"),
        ({f"{CORRECTION_KEY}.bypass_mode": True}, f"{CORRECTION_KEY}.bypass_mode", "choose one"),
        ({f"{CORRECTION_KEY}.preset": "bypass_reinforce"}, f"{CORRECTION_KEY}.bypass_mode", "choose one"),
        ({f"{CORRECTION_KEY}.preset": "token_tis"}, f"{CORRECTION_KEY}.rollout_is", "1 by construction"),
        ({f"{CORRECTION_KEY}.preset": "icepop"}, f"{CORRECTION_KEY}.rollout_is", "1 by construction"),
        ({f"{CORRECTION_KEY}.preset": "token_tis_ratio"}, f"{CORRECTION_KEY}.rollout_is", "1 by construction"),
        ({f"{CORRECTION_KEY}.preset": "seq_reject_corr_k1"}, f"{CORRECTION_KEY}.rollout_rs", "seq_mean_k1 reads"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, key, says):
    found = list(reuse_findings(config_of(**changes)))
    assert key in [finding.key for finding in found], found
    assert any(says in finding.problem for finding in found), found
    assert all(f"{ENABLED_KEY}=false" in finding.remedy for finding in found)
    assert list(reuse_findings(config_of(**{**changes, ENABLED_KEY: False}))) == []


def test_a_preset_of_the_ppo_ratio_needs_no_recomputation():
    assert list(reuse_findings(config_of(**{f"{CORRECTION_KEY}.preset": "seq_reject_ppo_k3"}))) == []


def test_the_start_up_checks_ask():
    assert "_reuse" in [rule.__name__ for rule in RULES]


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"enabled": "yes"}, r"reuse_rollout_log_probs\.enabled='yes'"),
        ({"audit_every": 0}, r"reuse_rollout_log_probs\.audit_every=0"),
        ({"audit_every": 2.5}, r"audit_every=2\.5"),
        ({"audit": 3}, r"unknown key tim\.reuse_rollout_log_probs\.audit"),
    ],
)
def test_values(group, says):
    with pytest.raises(ConfigError, match=says):
        TimConfig.of({"tim": {"reuse_rollout_log_probs": group}})


def test_the_group_is_read_and_off_by_default():
    assert TimConfig.of({"tim": {}}).reuse_rollout_log_probs == ReuseConfig(enabled=False, audit_every=10)
    given = {"enabled": True, "audit_every": 4}
    assert TimConfig.of({"tim": {"reuse_rollout_log_probs": given}}).reuse_rollout_log_probs == ReuseConfig(True, 4)
