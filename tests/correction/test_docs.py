"""The examples of docs/correction.md run and print what the page says; its tables name what exists."""

from __future__ import annotations

import doctest
from pathlib import Path

import torch

from verl_tim.correction import PRESETS, RULE_NAMES, RolloutCorrectionConfig, policy_loss

PAGE = Path(__file__).parents[2] / "docs" / "correction.md"


def test_examples() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_every_setting_preset_and_rule_is_documented() -> None:
    text = PAGE.read_text()
    for name in (*RolloutCorrectionConfig.setting_names(), *PRESETS, *RULE_NAMES):
        assert f"`{name}`" in text, name


def test_every_metric_is_documented() -> None:
    text = PAGE.read_text()
    ones = {
        n: torch.ones(2, 3) for n in ("rollout_log_probs", "old_log_probs", "log_prob", "advantages", "response_mask")
    }
    for threshold in (2.0, [0.5, 2.0]):
        config = RolloutCorrectionConfig.from_mapping(
            {
                "rollout_is": "token",
                "rollout_is_threshold": threshold,
                "rollout_is_batch_normalize": True,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 2.0,
            }
        )
        _, metrics = policy_loss(config, **ones)
        for metric in metrics:
            name = metric.removeprefix("rollout_corr/").replace("token_k1", "<rule>")
            assert f"`{name}`" in text, name
