"""Bands written as underscore numbers are found in the raw text, and nothing else is."""

from __future__ import annotations

import pytest
import yaml
from omegaconf import OmegaConf

from verl_tim.correction import ConfigError, find_in_overrides, find_in_yaml, refuse_underscore_numbers

BAD = ["0.5_5", "1_5", "0_5", ".5_5", "5_", "+0.5_5", "0.5_5e1"]
GOOD = ['"0.5_5"', "'0.5_5'", "0.5_5.0", "[0.5, 5]", "2.0", "null", "${other}", "0.6_1.4,0.05"]
KEY = "algorithm.rollout_correction.rollout_is_threshold"


def test_this_is_what_yaml_does_to_it() -> None:
    assert yaml.safe_load("a: 0.5_5") == {"a": 0.55}
    assert OmegaConf.create("a: 0.5_5") == {"a": 0.55}


@pytest.mark.parametrize("value", BAD)
def test_found_in_yaml(value: str) -> None:
    text = f"algorithm:\n  rollout_correction:\n    # a band\n    rollout_is_threshold: {value}\n"
    (found,) = find_in_yaml(text, "run.yaml")
    assert (found.key, found.text, found.where) == ("rollout_is_threshold", value, "run.yaml:4")
    with pytest.raises(ConfigError, match=r"run\.yaml:4.*in quotes"):
        refuse_underscore_numbers([found])


@pytest.mark.parametrize("value", GOOD)
def test_not_found_in_yaml(value: str) -> None:
    assert find_in_yaml(f"rollout_is_threshold: {value}\nrollout_rs_threshold: {value}") == []


def test_nested_lists_dotted_keys_anchors_and_several_documents() -> None:
    text = (
        "rollout_rs_threshold: [[0.6_1, 1.4], 0.05]\n---\na.rollout_rs_threshold: &b\n  - 1_5\nrollout_is_threshold: *b"
    )
    assert [(f.key, f.text) for f in find_in_yaml(text)] == [
        ("rollout_rs_threshold", "0.6_1"),
        ("rollout_rs_threshold", "1_5"),
        ("rollout_is_threshold", "1_5"),
    ]


def test_other_keys_may_use_underscores() -> None:
    assert find_in_yaml("trainer:\n  total_training_steps: 1_000\n") == []
    assert find_in_overrides(["trainer.total_training_steps=1_000", "data.max_response_length=8_192"]) == []
    refuse_underscore_numbers([])


@pytest.mark.parametrize("value", [*BAD, "[0.5_5,2]", "[[0.5_5,2],0.1]"])
@pytest.mark.parametrize("lead", ["", "+", "++"])
def test_found_in_overrides(value: str, lead: str) -> None:
    (found,) = find_in_overrides(["trainer.seed=1_0", f"{lead}{KEY}={value}"])
    assert found.key == "rollout_is_threshold"
    assert found.text in value
    with pytest.raises(ConfigError, match="override"):
        refuse_underscore_numbers([found])


def test_found_in_override_of_the_whole_group() -> None:
    override = "algorithm.rollout_correction={rollout_is:token,rollout_is_threshold:0.5_5}"
    assert [f.key for f in find_in_overrides([override])] == ["rollout_is_threshold"]


@pytest.mark.parametrize("value", ['"0.5_5"', "'0.5_5'", "0.5_5.0", "[0.5,5]", "2.0", "null", '"0.6_1.4,0.05"'])
def test_not_found_in_overrides(value: str) -> None:
    assert find_in_overrides([f"{KEY}={value}"]) == []


def test_the_two_parsers_agree_with_hydra() -> None:
    """What the check lets through reaches the config as text, what it refuses would have arrived as a number."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for value in ("0.5_5", "1_5"):
        assert isinstance(parser.parse_override(f"{KEY}={value}").value(), int | float)
        assert find_in_overrides([f"{KEY}={value}"])
    for value in ('"0.5_5"', "0.5_5.0"):
        assert not isinstance(parser.parse_override(f"{KEY}={value}").value(), int | float)
        assert not find_in_overrides([f"{KEY}={value}"])
