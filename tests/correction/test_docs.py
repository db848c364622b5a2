"""The examples of docs/correction.md run and print what the page says; its tables name what exists."""

from __future__ import annotations

import doctest
import itertools
import re
from pathlib import Path

import torch
import yaml

from verl_tim.correction import PRESETS, RULE_NAMES, VERL_DEFAULTS, RolloutCorrectionConfig, policy_loss

PAGE = Path(__file__).parents[2] / "docs" / "correction.md"


def test_examples() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_every_setting_preset_and_rule_is_documented() -> None:
    text = PAGE.read_text()
    for name in (*RolloutCorrectionConfig.setting_names(), *PRESETS, *RULE_NAMES):
        assert f"`{name}`" in text, name


def test_what_is_printed_at_the_start_is_what_the_page_shows() -> None:
    text = PAGE.read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    node = yaml.safe_load(example)["algorithm"]["rollout_correction"]
    config = RolloutCorrectionConfig.from_verl({**VERL_DEFAULTS, **node})
    for line in config.describe().splitlines()[:4]:
        assert f"    {line}\n" in text, line


def test_every_choice_that_the_pages_name_exists() -> None:
    root = PAGE.parents[1]
    for page in (root / "README.md", *PAGE.parent.glob("*.md")):
        chosen = re.findall(r"\bcorrection=([a-z]\w+)", page.read_text())
        # a page may write a file of the group itself; calibrated_NAME is what `verl-tim calibrate` writes
        own = set(re.findall(r"^`correction/(\w+)\.yaml`$", page.read_text(), flags=re.MULTILINE))
        assert {name for name in chosen if not name.startswith("calibrated_")} <= set(PRESETS) | own, page
    table = (PAGE.parent / "configuration.md").read_text()
    section = table[table.index("## The correction group") : table.index("## A recipe of your own")]
    named = set(re.findall(r"`([a-z0-9_]+)`", section))
    for word in re.findall(r"`([a-z0-9_]*\{[^`]+)`", section):
        named |= set(_expanded(word))
    assert set(PRESETS) <= named


def _expanded(word: str) -> list[str]:
    """`a_{b,c}_{d,e}` as the shell reads it."""
    parts = [part.split(",") for part in re.split(r"\{([^}]+)\}", word)]
    return ["".join(choice) for choice in itertools.product(*parts)]


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
