"""docs/diagnosis.md says of every metric of a step what it is, and of none that there is not."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import torch

from verl_tim.diagnosis.estimators import RatioSums, trainer_self_delta
from verl_tim.diagnosis.loss_ratio import LossRatioSums
from verl_tim.diagnosis.metrics import mismatch_metrics

DOCS = Path(__file__).parents[2] / "docs" / "diagnosis.md"
# written by the trainer's side of this package, beside the metrics of a batch
OF_THE_STEP = {"sampled_share", "response_at_limit", "baseline_factor_max"}


def described():
    """Patterns of the table of metrics: `a_{b,c}_*` stands for two."""
    section = DOCS.read_text(encoding="utf-8").split("### Every metric")[1].split("\n## ")[0]
    patterns = set()
    for row in re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            parts = [
                part[1:-1].split(",") if part[0] == "{" else [part] for part in re.findall(r"\{[^}]*}|[^{]+", name)
            ]
            patterns |= {"".join(words) for words in product(*parts)}
    per_layer = {f"{name}/layer_*" for name in patterns if re.fullmatch("router_(flip|expert|order).*", name)}
    return patterns - {"/layer_*", "tim/..."} | per_layer


def logged():
    """Names of everything that a batch can have: two turns, two versions, routes, clamped and broken values."""
    noise = torch.Generator().manual_seed(0)
    shape = (8, 30)
    old = -torch.rand(shape, generator=noise)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 14] = False
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0] * 2)[:, None].expand(shape)
    routes = torch.tensor([0, 1]).expand(*shape, 2, 2)
    metrics = mismatch_metrics(
        old_log_probs=old,
        rollout_log_probs=old - 0.1 * torch.rand(shape, generator=noise),
        response_mask=mask,
        advantages=advantages,
        log_prob=old + 0.1,
        rollout_top1=torch.zeros(shape, dtype=torch.int64),
        train_top1=torch.zeros(shape, dtype=torch.int64),
        rollout_routes=routes,
        train_routes=routes.flip(-1),
        kept_mask=mask,
        weight_versions=torch.arange(8)[:, None].expand(shape),
        current_version=7,
    )
    metrics |= (
        LossRatioSums.of(old, old, mask, advantages, (0.2, 0.2)).metrics() | RatioSums.of(old, old, mask).metrics()
    )
    metrics |= trainer_self_delta(old, old, mask)
    return {name.removeprefix("tim/") for name in metrics} | OF_THE_STEP


def test_every_metric_is_described():
    patterns = described()
    missing = sorted(name for name in logged() if not any(fnmatchcase(name, pattern) for pattern in patterns))
    assert missing == []


def test_every_description_is_of_a_metric():
    names = logged()
    assert sorted(pattern for pattern in described() if not any(fnmatchcase(name, pattern) for name in names)) == []
