"""The correction group: a file per preset, every key spelled out, and what verl's worker needs beside it."""

from importlib import resources

import pytest
import yaml
from omegaconf import OmegaConf

from verl_tim.correction import PRESETS, VERL_DEFAULTS, ConfigError, RolloutCorrectionConfig
from verl_tim.launch import prepare
from verl_tim.launch.checks import correction as check
from verl_tim.launch.checks.verl_config import check_verl_tim
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.recipes import CONFIGS_PACKAGE, find_recipe, group_options
from verl_tim.training.correction_config import of_run

NODE = "algorithm.rollout_correction"
THRESHOLD = f"{NODE}.rollout_rs_threshold"
# The presets whose threshold the user gives, and one that fits.
GIVEN = {
    "seq_reject_corr_sum_k1": "[0.5,2.0]",
    "seq_reject_corr_sum_k3": "0.05",
    "seq_reject_ppo_sum_k1": "[0.5,2.0]",
    "seq_reject_ppo_sum_k3": "0.05",
    "paper_tis_seq_sum_k3": "0.05",
}


@pytest.fixture(scope="module")
def composed():
    """Composes cpu_grpo with overrides, resolved; Hydra is initialised once."""
    recipe = find_recipe("cpu_grpo")
    with hydra_for(recipe):

        def make(*overrides):
            config = compose_config(recipe, ["actor_rollout_ref.model.path=MODEL", *overrides])
            prepare.absolute_paths(config)
            prepare.resolve(config)
            return config

        yield make


def test_there_is_one_file_per_preset():
    assert group_options()["correction"] == sorted(PRESETS)
    without = [name for name, keys in PRESETS.items() if keys.get("rollout_rs") and "rollout_rs_threshold" not in keys]
    assert without == list(GIVEN)


@pytest.mark.parametrize("name", PRESETS)
def test_file_spells_every_key_out_and_says_what_it_is_for(name):
    text = resources.files(CONFIGS_PACKAGE).joinpath("correction", f"{name}.yaml").read_text()
    assert set(yaml.safe_load(text)["algorithm"]["rollout_correction"]) == set(RolloutCorrectionConfig.setting_names())
    package, what, *rest = text.splitlines()
    assert package == "# @package _global_"
    assert what.startswith("# ")
    assert not rest[0].startswith("#")


@pytest.mark.parametrize("name", PRESETS)
def test_file_is_the_preset_in_verls_config(composed, name):
    from verl.utils.config import omega_conf_to_dataclass

    extra = {"rollout_rs_threshold": OmegaConf.create(f"v: {GIVEN[name]}").v} if name in GIVEN else {}
    config = composed(f"correction={name}", *(f"{THRESHOLD}={GIVEN[name]}" for _ in extra))
    expected = RolloutCorrectionConfig.from_mapping({"preset": name, **extra})
    assert RolloutCorrectionConfig.from_verl(config.algorithm.rollout_correction) == expected
    # the worker's copy, as verl's actor config hands it to the loss
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert RolloutCorrectionConfig.from_verl(actor.policy_loss.rollout_correction) == expected
    assert actor.policy_loss.loss_mode == ("bypass_mode" if expected.bypass_mode else "vanilla")
    assert config.actor_rollout_ref.rollout.calculate_log_probs is True
    assert list(check.check(config)) == []
    said = [finding for finding in check_verl_tim(config) if "model.path" not in finding.key]
    assert said == []


@pytest.mark.parametrize("name", GIVEN)
def test_without_its_threshold_it_is_refused_with_key_and_remedy(composed, name):
    config = composed(f"correction={name}")
    with pytest.raises(ConfigError):
        RolloutCorrectionConfig.from_verl(config.algorithm.rollout_correction)
    (finding,) = check.check(config)
    assert finding.key == THRESHOLD
    assert f"{THRESHOLD}={GIVEN[name]}" in finding.remedy


@pytest.mark.parametrize(
    ("name", "key", "written", "value"),
    [
        ("token_tis", "rollout_is_threshold", "3", 3.0),
        ("token_tis", "rollout_is_threshold", "[0.5,3]", (0.5, 3.0)),
        ("token_tis", "rollout_is_threshold", '"0.5_3"', (0.5, 3.0)),
        ("icepop", "rollout_is_threshold", "3", 3.0),
        ("token_tis", "rollout_is", "null", None),  # verl's default, and meant all the same
        ("paper_tis_seq_k1", "rollout_rs", "null", None),
        ("paper_tis_seq_k1", "rollout_rs_threshold", "[null,1.5]", ((None, 1.5),)),
        ("paper_tis_seq_k3", "rollout_rs_threshold", "0.01", (0.01,)),
        ("seq_reject_ppo_k1", "rollout_rs_signal", "r_corr", "r_corr"),
        ("bypass_ppo", "loss_type", "reinforce", "reinforce"),
        ("bypass_reinforce", "old_forward", "true", True),
        ("token_tis_ratio", "rollout_is_in", "loss", "loss"),
        ("none", "denominator", "all", "all"),
        ("recompute", "baseline_scope", "kept", "kept"),
        ("sequence_tis", "rollout_is_batch_normalize", "true", True),
    ],
)
def test_a_key_on_top_wins_and_is_the_only_one_called_given(composed, name, key, written, value):
    correction = of_run(composed(f"correction={name}", f"{NODE}.{key}={written}"))
    assert getattr(correction, key) == value
    assert correction.group == name
    assert f"(preset {name})" in correction.describe()
    assert [k for k, origin in correction.origins.items() if origin == "given"] == [key]
    assert {k for k, origin in correction.origins.items() if origin == "preset"} == set(PRESETS[name]) - {key}


def test_two_rules_with_nested_bounds(composed):
    correction = of_run(
        composed(
            "correction=token_tis",
            f"{NODE}.rollout_rs=[token_k1,seq_mean_k3]",
            f"{THRESHOLD}=[[0.6,1.4],0.05]",
        )
    )
    assert [(rule.name, rule.bound) for rule in correction.rules] == [("token_k1", (0.6, 1.4)), ("seq_mean_k3", 0.05)]


def test_what_is_shown_is_what_verls_loss_mode_makes_of_it(composed):
    gpg = "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"
    shown = of_run(composed("correction=token_tis", gpg))
    assert shown.loss_type == "reinforce"
    assert shown.origins["loss_type"] == "loss_mode=gpg"
    (finding,) = check.check(composed("correction=token_tis_ratio", gpg))
    assert finding.key == f"{NODE}.rollout_is_in"
    assert "loss_type=reinforce" in finding.problem


def test_a_preset_key_beside_the_group_is_refused(composed):
    (finding,) = check.check(composed("correction=none", f"++{NODE}.preset=icepop"))
    assert finding.key == f"{NODE}.preset"
    assert "correction=icepop" in finding.remedy


def test_the_seven_native_keys_are_verls(composed):
    """`none` changes nothing of what a plain verl config says."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlsOwn

    node = OmegaConf.to_container(composed("correction=none").algorithm.rollout_correction)
    assert {key: node[key] for key in VERL_DEFAULTS} == dict(VERL_DEFAULTS)
    assert {field for field in VerlsOwn.__dataclass_fields__ if field in VERL_DEFAULTS} == set(VERL_DEFAULTS)
