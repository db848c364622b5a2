"""Settings: what is accepted, what it resolves to, and that every refusal names key, value and remedy."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from omegaconf import OmegaConf

from verl_tim.correction import PRESETS, VERL_DEFAULTS, Band, ConfigError, RolloutCorrectionConfig

from .batches import settings_maps

build = RolloutCorrectionConfig.from_mapping
NEEDS_THRESHOLD = {name for name in PRESETS if "_sum_" in name}


def test_nothing_given_corrects_nothing() -> None:
    for config in (build(), build({}), build(None), build({"preset": "none"}), build(preset="recompute")):
        assert config.rollout_is is None
        assert config.rules == ()
        assert not config.enabled
        assert config == RolloutCorrectionConfig()


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        (2, 2.0),
        (2.0, 2.0),
        ("2.0", 2.0),
        ("0.5_5.0", Band(0.5, 5.0)),
        ("0.5_5", Band(0.5, 5.0)),
        ([0.5, 5], Band(0.5, 5.0)),
        ((0.5, 5), Band(0.5, 5.0)),
        ([None, 5], Band(None, 5.0)),
        (["0.5", "null"], Band(0.5, None)),
        ("1e-3_2", Band(0.001, 2.0)),
        (OmegaConf.create([0.5, 5]), Band(0.5, 5.0)),
    ],
)
def test_weight_thresholds(written: Any, resolved: Any) -> None:
    config = build({"rollout_is": "token", "rollout_is_threshold": written})
    assert config.rollout_is_threshold == resolved
    assert config.band == (resolved if isinstance(resolved, Band) else None)


@pytest.mark.parametrize(
    ("rules", "threshold", "bounds"),
    [
        ("token_k1", 2.0, [Band(0.5, 2.0)]),
        ("token_k1", 1, [Band(1.0, 1.0)]),
        ("token_k1", "2.0", [Band(0.5, 2.0)]),
        ("token_k1", [0.6, 1.4], [Band(0.6, 1.4)]),
        ("token_k1", [[0.6, 1.4]], [Band(0.6, 1.4)]),
        (["token_k1"], "0.6_1.4", [Band(0.6, 1.4)]),
        ("seq_sum_k1", [0.001, None], [Band(0.001, None)]),
        ("seq_sum_k1", "0.001_null", [Band(0.001, None)]),
        ("token_k3", 0.05, [0.05]),
        ("token_k3", [0.05], [0.05]),
        # one per rule: bands nest, and verl's text works
        ("token_k1,token_k3", [[0.6, 1.4], 0.05], [Band(0.6, 1.4), 0.05]),
        ("token_k1, token_k3", "0.6_1.4,0.05", [Band(0.6, 1.4), 0.05]),
        (["token_k1", "token_k3"], ["0.6_1.4", 0.05], [Band(0.6, 1.4), 0.05]),
        ("token_k1,token_k3", [2.0, 0.05], [Band(0.5, 2.0), 0.05]),
        ("token_k1,seq_mean_k1", [[0.6, 1.4], [0.9, None]], [Band(0.6, 1.4), Band(0.9, None)]),
        ("token_k1,seq_mean_k1", "1.5,2.0", [Band(1 / 1.5, 1.5), Band(0.5, 2.0)]),
        ("token_k3,seq_max_k2", [0.1, 0.2], [0.1, 0.2]),
        # one for all
        ("token_k3,seq_max_k2", 0.1, [0.1, 0.1]),
        ("token_k1,seq_mean_k1", "0.5_2", [Band(0.5, 2.0)] * 2),
        ("token_k1,seq_mean_k1", [[0.5, 2]], [Band(0.5, 2.0)] * 2),
        ("token_k1,seq_mean_k1", 2.0, [Band(0.5, 2.0)] * 2),
        ("token_k1,seq_mean_k1,seq_sum_k1", [0.5, 2], [Band(0.5, 2.0)] * 3),
        # verl drops repeats before it looks at thresholds
        ("token_k3,token_k3", 0.1, [0.1]),
        ("opsm,token_kpop", [0.5, 0.4], [0.5, 0.4]),
    ],
)
def test_rejection_thresholds(rules: Any, threshold: Any, bounds: list[Any]) -> None:
    config = build({"rollout_rs": rules, "rollout_rs_threshold": threshold})
    assert [rule.bound for rule in config.rules] == bounds
    assert config.rollout_rs_threshold == tuple(bounds)


RS = "rollout_rs_threshold"


@pytest.mark.parametrize(
    ("mapping", "key", "says"),
    [
        ({"denominater": "all"}, "denominater", "Did you mean 'denominator'"),
        ({"rollout_is": "tokens"}, "rollout_is", "Known values: null, token, sequence, sequence_mean"),
        ({"rollout_is": True}, "rollout_is", "Known values"),
        ({"loss_type": "vanilla"}, "loss_type", "ppo_clip, reinforce"),
        ({"loss_type": None}, "loss_type", "ppo_clip, reinforce"),
        ({"denominator": "valid"}, "denominator", "kept, all"),
        ({"baseline_scope": "none"}, "baseline_scope", "all, kept"),
        ({"rollout_rs_signal": "corr"}, "rollout_rs_signal", "r_corr, r_ppo"),
        ({"rollout_is_in": "clip"}, "rollout_is_in", "loss, ratio"),
        ({"bypass_mode": "true"}, "bypass_mode", "true or false"),
        ({"bypass_mode": 1}, "bypass_mode", "true or false"),
        ({"rollout_is_batch_normalize": None}, "rollout_is_batch_normalize", "true or false"),
        ({"preset": "token_tsi"}, "preset", "Did you mean 'token_tis'"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is_threshold", "[lo, hi]"),
        ({"preset": ["icepop"]}, "preset", "unknown preset"),
        ({"rollout_is_threshold": 10**400}, "rollout_is_threshold", "finite"),
        ({"rollout_is_threshold": 0}, "rollout_is_threshold", "positive"),
        ({"rollout_is_threshold": -1.0}, "rollout_is_threshold", "positive"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold", "finite"),
        ({"rollout_is_threshold": math.inf}, "rollout_is_threshold", "finite"),
        ({"rollout_is_threshold": "1e999"}, "rollout_is_threshold", "finite"),
        ({"rollout_is_threshold": True}, "rollout_is_threshold", "not a number"),
        ({"rollout_is_threshold": "two"}, "rollout_is_threshold", "not a number"),
        ({"rollout_is_threshold": "nan"}, "rollout_is_threshold", "not a number"),
        ({"rollout_is_threshold": [5, 0.5]}, "rollout_is_threshold", "lo <= hi"),
        ({"rollout_is_threshold": [None, None]}, "rollout_is_threshold", "at least one end"),
        ({"rollout_is_threshold": [0.5, 1, 5]}, "rollout_is_threshold", "pair"),
        ({"rollout_is_threshold": "0.5_1_5"}, "rollout_is_threshold", "pair"),
        ({"rollout_is_threshold": {"lo": 1}}, "rollout_is_threshold", "[lo, hi]"),
        ({"rollout_rs": "token_k4", RS: 1}, "rollout_rs", "token_k1"),
        ({"rollout_rs": "seq_max_k1", RS: 1}, "rollout_rs", "token_k1 for a band"),
        ({"rollout_rs": "", RS: 1}, "rollout_rs", "null to reject nothing"),
        ({"rollout_rs": [], RS: 1}, "rollout_rs", "null to reject nothing"),
        ({"rollout_rs": 3, RS: 1}, "rollout_rs", "Known rules"),
        ({"rollout_rs": "token_k3"}, RS, "rollout_rs_threshold=0.05"),
        ({"rollout_rs": "token_k1", RS: 0.5}, RS, "[0.606531, 1.64872]"),
        ({"rollout_rs": "token_k3", RS: [0.1, 0.2]}, RS, "not a band"),
        ({"rollout_rs": "token_k3", RS: "0.1_0.2"}, RS, "not a band"),
        ({"rollout_rs": "token_k3", RS: 0}, RS, "positive"),
        ({"rollout_rs": "token_k1,seq_mean_k1", RS: [0.5, 2.0]}, RS, "[[0.5, 2.0], [0.5, 2.0]]"),
        ({"rollout_rs": "token_k1,seq_mean_k1", RS: [1.5, 2.0]}, RS, "ambiguous"),
        ({"rollout_rs": "token_k1,token_k3,opsm", RS: [1.5, 2.0]}, RS, "2 thresholds for 3 rules"),
        ({"rollout_rs": "token_k3", RS: [0.1, 0.2, 0.3]}, RS, "3 thresholds for 1 rule"),
        ({"rollout_rs": "token_k1,token_k3", RS: 0.1}, RS, "below 1"),
        ({"rollout_rs": "token_k1,token_k3", RS: "0.5_2"}, RS, "not a band"),
        ({"rollout_rs": "token_k3", RS: None}, RS, "no default"),
        ({"rollout_is_in": "ratio"}, "rollout_is_in", "rollout_is: token"),
        ({"preset": "sequence_tis", "rollout_is_in": "ratio"}, "rollout_is_in", "rollout_is: token"),
        ({"preset": "icepop", "rollout_is_in": "ratio"}, "rollout_is_in", "not a band"),
        ({"preset": "token_tis_ratio", "bypass_mode": True}, "rollout_is_in", "bypass_mode: false"),
        ({"preset": "token_tis_ratio", "loss_type": "reinforce"}, "rollout_is_in", "loss_type: ppo_clip"),
        ({"preset": "token_tis_ratio", "rollout_is_batch_normalize": True}, "rollout_is_in", "normalize: false"),
        ({"old_forward": True}, "old_forward", "bypass_mode: true"),
        ({"baseline_scope": "kept", "bypass_mode": True}, "baseline_scope", "baseline_scope: all"),
        ({"baseline_scope": "kept", "rollout_rs_signal": "r_ppo"}, "baseline_scope", "r_corr"),
        ({"baseline_scope": "kept", "rollout_rs": "opsm", RS: 0.1}, "baseline_scope", "no opsm"),
    ],
)
def test_refusals_name_key_value_and_remedy(mapping: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(mapping)
    error = caught.value
    assert error.key == key
    assert f"algorithm.rollout_correction.{key}={error.value!r}" in str(error)
    assert says in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="a mapping"):
        build("token_tis")  # type: ignore[arg-type]
    for mistaken in ("icepop", ["icepop"], 3):
        with pytest.raises(ConfigError, match="a mapping"):
            RolloutCorrectionConfig.from_verl(mistaken)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="preset: icepop"):
        RolloutCorrectionConfig.from_verl("icepop")  # type: ignore[arg-type]
    for preset in ({}, {"preset": "icepop"}):
        for key in ("rollout_is", "rollout_is_threshold"):
            with pytest.raises(ConfigError, match=key):
                RolloutCorrectionConfig.from_verl({**preset, key: np.array([0.5, 2.0])})
    with pytest.raises(ConfigError, match="Name one preset"):
        build({"preset": "token_tis"}, preset="icepop")
    with pytest.raises(ConfigError, match="positive"):
        dataclasses.replace(build(preset="token_tis"), rollout_is_threshold=-1)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets(preset: str) -> None:
    if preset in NEEDS_THRESHOLD:
        with pytest.raises(ConfigError, match="rollout_rs_threshold="):
            build(preset=preset)
        return
    config = build(preset=preset)
    assert config.preset == preset
    assert build(config.to_mapping()) == config


def test_preset_values() -> None:
    band = Band(math.exp(-0.001), math.exp(0.001))
    got = {name: build(preset=name) for name in PRESETS if name not in NEEDS_THRESHOLD}
    assert got["bypass_ppo"].bypass_mode
    assert got["bypass_ppo"].rollout_is is None
    reinforce = got["bypass_reinforce"]
    assert (reinforce.loss_type, reinforce.rollout_is, reinforce.rollout_is_threshold) == ("reinforce", "token", 2.0)
    assert (got["token_tis"].rollout_is, got["sequence_tis"].rollout_is) == ("token", "sequence")
    assert got["icepop"].band == Band(0.5, 5.0)
    assert got["token_tis_ratio"].rollout_is_in == "ratio"
    for signal, short in (("r_corr", "corr"), ("r_ppo", "ppo")):
        mean_k1, mean_k3 = got[f"seq_reject_{short}_k1"], got[f"seq_reject_{short}_k3"]
        assert mean_k1.rollout_rs_signal == mean_k3.rollout_rs_signal == signal
        assert [(r.name, r.bound) for r in mean_k1.rules] == [("seq_mean_k1", band)]
        assert [(r.name, r.bound) for r in mean_k3.rules] == [("seq_mean_k3", 0.001)]
        sums = build({"preset": f"seq_reject_{short}_sum_k3", "rollout_rs_threshold": 0.7})
        assert [(r.name, r.bound) for r in sums.rules] == [("seq_sum_k3", 0.7)]
        assert sums.rollout_rs_signal == signal
        sums = build({"preset": f"seq_reject_{short}_sum_k1", "rollout_rs_threshold": 1.5})
        assert [(r.name, r.bound) for r in sums.rules] == [("seq_sum_k1", Band(1 / 1.5, 1.5))]
    for name, rule, bound in (("k1", "seq_mean_k1", band), ("k3", "seq_mean_k3", 0.001)):
        paper = got[f"paper_tis_seq_{name}"]
        assert (paper.rollout_is, paper.rollout_is_threshold, paper.rollout_rs_signal) == ("token", 2.0, "r_corr")
        assert [(r.name, r.bound) for r in paper.rules] == [(rule, bound)]
    assert got["paper_tis_seq_sum"].rules[0].bound == Band(0.001, None)


def test_keys_beside_a_preset_override_it_null_included() -> None:
    config = build({"preset": "paper_tis_seq_k1", "rollout_is": None, "denominator": "all"})
    assert config.rollout_is is None
    assert config.denominator == "all"
    assert config.rules[0].name == "seq_mean_k1"
    assert build({"preset": "paper_tis_seq_k1", "rollout_rs": None}).rules == ()
    assert config.origins["rollout_is"] == "given"
    assert config.origins["rollout_rs"] == "preset"
    assert config.origins["old_forward"] == "default"


def test_a_chosen_group_decides_no_value() -> None:
    """A preset's file spells every key out: what differs from it was given, and verl's defaults count."""
    file = build(preset="token_tis").to_mapping()
    config = RolloutCorrectionConfig.from_verl({**file, "rollout_is": None, "denominator": "all"}, group="token_tis")
    assert config == build({**file, "rollout_is": None, "denominator": "all"})
    assert (config.rollout_is, config.preset, config.group) == (None, None, "token_tis")
    origins = dict.fromkeys(file, "default") | {"rollout_is_threshold": "preset"}
    assert config.origins == origins | {"rollout_is": "given", "denominator": "given"}
    with pytest.raises(ConfigError, match="Choose correction=icepop instead"):
        RolloutCorrectionConfig.from_verl({"preset": "icepop"}, group="token_tis")


def test_a_file_of_the_users_own_may_name_a_preset() -> None:
    config = RolloutCorrectionConfig.from_verl({**VERL_DEFAULTS, "preset": "icepop"}, group="mine")
    assert config == build(preset="icepop")
    assert (config.preset, config.group) == ("icepop", None)


def test_null_of_our_keys_in_a_verl_config_is_not_given() -> None:
    ours = dict.fromkeys(set(RolloutCorrectionConfig.setting_names()) - set(VERL_DEFAULTS))
    config = RolloutCorrectionConfig.from_verl({**VERL_DEFAULTS, **ours, "preset": "seq_reject_ppo_k1"})
    assert config == build(preset="seq_reject_ppo_k1")
    assert config.origins["denominator"] == "default"


def test_in_a_verl_config_native_defaults_do_not_override_a_preset() -> None:
    native = {"_target_": "verl.whatever", **VERL_DEFAULTS}
    assert RolloutCorrectionConfig.from_verl(native) == build()
    config = RolloutCorrectionConfig.from_verl({**native, "preset": "paper_tis_seq_k1"})
    assert config == build(preset="paper_tis_seq_k1")
    config = RolloutCorrectionConfig.from_verl({**native, "preset": "paper_tis_seq_k1", "rollout_is_threshold": 3.0})
    assert config.rollout_is_threshold == 3.0
    # A key of ours is not always there, so its default does count.
    config = RolloutCorrectionConfig.from_verl({**native, "preset": "token_tis_ratio", "rollout_is_in": "loss"})
    assert config.rollout_is_in == "loss"
    # Declared with null, as in tim.yaml, it is not given.
    declared = {**dict.fromkeys(set(RolloutCorrectionConfig.setting_names()) - set(VERL_DEFAULTS)), "preset": None}
    assert RolloutCorrectionConfig.from_verl({**native, **declared}) == build()
    config = RolloutCorrectionConfig.from_verl({**native, **declared, "preset": "seq_reject_ppo_k3"})
    assert config == build(preset="seq_reject_ppo_k3")
    composed = OmegaConf.create({**native, "preset": "icepop", "rollout_rs": ["token_k1"], RS: [[0.5, 2]]})
    config = RolloutCorrectionConfig.from_verl(composed)
    assert config.band == Band(0.5, 5.0)
    assert config.rules[0].bound == Band(0.5, 2.0)
    assert RolloutCorrectionConfig.from_verl(None) == build()


def test_verl_defaults_are_those_of_the_installed_verl() -> None:
    spec = importlib.util.find_spec("verl")  # found, not imported: that takes seconds
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "trainer/config/algorithm/rollout_correction.yaml").read_text()
    assert OmegaConf.to_container(OmegaConf.create(text)) == dict(VERL_DEFAULTS)


def test_config_is_frozen_copyable_and_picklable() -> None:
    config = build(preset="paper_tis_seq_k3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout_is = None  # type: ignore[misc]
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other == config
        assert other.rules == config.rules


@settings(max_examples=40)
@given(mapping=settings_maps())
def test_to_mapping_round_trips(mapping: dict[str, Any]) -> None:
    config = build(mapping)
    plain = config.to_mapping()
    assert build(plain) == config
    assert build(plain).rules == config.rules
    assert OmegaConf.to_container(OmegaConf.create(plain)) == plain


def test_describe_shows_every_key_with_its_origin_and_the_resolved_band() -> None:
    text = build({"preset": "icepop", "rollout_rs": "seq_mean_k1,opsm", RS: [[0.999, None], 0.1]}).describe()
    lines = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert set(lines) == set(RolloutCorrectionConfig.setting_names())
    assert "preset icepop" in text.splitlines()[0]
    assert "[0.5, 5]" in lines["rollout_is_threshold"]
    assert "preset" in lines["rollout_is_threshold"]
    assert "given" in lines[RS]
    assert "seq_mean_k1: keep ratios in [0.999, null]; opsm <= 0.1" in lines[RS]
    assert "default" in lines["denominator"]


def test_settings_without_effect_are_named() -> None:
    assert build({"preset": "token_tis"}).unused_keys() == {}
    unused = build({"rollout_is_batch_normalize": True, "rollout_is_threshold": 3, "rollout_rs_signal": "r_ppo"})
    assert set(unused.unused_keys()) == {"rollout_is_batch_normalize", "rollout_is_threshold", "rollout_rs_signal"}
    assert "no effect: rollout_is is null" in unused.describe()
    assert set(build({"preset": "token_tis", "bypass_mode": True}).unused_keys()) == {"rollout_is"}
    nothing_is_dropped = {"denominator": "all", "baseline_scope": "kept"}
    assert set(build({"preset": "token_tis", **nothing_is_dropped}).unused_keys()) == set(nothing_is_dropped)
    assert build({"preset": "icepop", **nothing_is_dropped}).unused_keys() == {}
    assert build({"preset": "seq_reject_corr_k1", **nothing_is_dropped}).unused_keys() == {}
    logged_only = {"preset": "bypass_ppo", "rollout_is": "token", "rollout_is_threshold": [0.5, 5]}
    assert set(build({**logged_only, "denominator": "all"}).unused_keys()) == {"rollout_is", "denominator"}


def test_later_optimiser_steps_under_bypass_need_another_forward() -> None:
    reject = {"preset": "seq_reject_corr_k1", "bypass_mode": True}
    build(reject).check_schedule(1)
    with pytest.raises(ConfigError, match=r"old_forward: true, or rollout_rs_signal: r_ppo"):
        build(reject).check_schedule(2)
    build({**reject, "old_forward": True}).check_schedule(4)
    build({**reject, "rollout_rs_signal": "r_ppo"}).check_schedule(4)
    build({"preset": "seq_reject_corr_k1"}).check_schedule(4)
    build({"preset": "bypass_reinforce"}).check_schedule(4)
    build({"preset": "bypass_ppo", "rollout_rs": "opsm", RS: 0.1}).check_schedule(4)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({}, False),
        ({"preset": "paper_tis_seq_k1"}, False),
        ({"preset": "seq_reject_ppo_k1"}, True),
        ({"rollout_rs": "opsm", RS: 0.1}, True),
        ({"preset": "bypass_ppo"}, False),
        ({"preset": "icepop", "bypass_mode": True}, False),  # logged only
        ({"preset": "icepop", "bypass_mode": True, "loss_type": "reinforce"}, True),
        ({"preset": "seq_reject_corr_k1", "bypass_mode": True}, True),
        ({"preset": "seq_reject_corr_k1", "bypass_mode": True, "old_forward": True}, False),
    ],
)
def test_when_the_mask_depends_on_the_forward(mapping: dict[str, Any], expected: bool) -> None:
    assert build(mapping).mask_needs_forward is expected


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"preset": "none"}, False),
        ({"preset": "token_tis"}, True),
        ({"preset": "token_tis_ratio"}, False),
        ({"preset": "token_tis", "bypass_mode": True}, False),
        ({"preset": "bypass_reinforce"}, True),
        ({"preset": "token_tis", "loss_type": "reinforce"}, True),
    ],
)
def test_when_weights_multiply_the_loss(mapping: dict[str, Any], expected: bool) -> None:
    assert build(mapping).weights_multiply_loss is expected
