"""Metrics of the loss's own ratio, merged over the micro-batches of a step."""

from __future__ import annotations

import functools
import math
import operator

import pytest
import torch

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.loss_ratio import LossRatioSums

CLIP = (0.2, 0.3)


def some(rows=12, width=9):
    generator = torch.Generator().manual_seed(1)
    reference = -torch.rand(rows, width, generator=generator)
    log_prob = reference + 0.4 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).clone()
    return log_prob, reference, mask, advantages


def test_parts_merge_to_the_whole_and_to_the_batch_metrics():
    fields = some()
    whole = LossRatioSums.of(*fields, CLIP).metrics()
    parts = [LossRatioSums.of(*(x[rows] for x in fields), CLIP) for rows in (slice(0, 1), slice(1, 7), slice(7, 12))]
    merged = functools.reduce(operator.add, parts, LossRatioSums()).metrics()
    assert merged == pytest.approx(whole, rel=1e-12)
    log_prob, reference, mask, advantages = fields
    expected = mismatch_metrics(
        old_log_probs=reference, rollout_log_probs=reference, response_mask=mask, advantages=advantages,
        log_prob=log_prob, clip_ratio_low=CLIP[0], clip_ratio_high=CLIP[1],
    )  # fmt: skip
    assert whole == {name: pytest.approx(expected[name], rel=1e-9) for name in whole}
    assert whole.keys() == {
        "tim/ppo_k1", "tim/ppo_k2", "tim/ppo_k3", "tim/clipped_share_pos_adv", "tim/clipped_share_neg_adv"
    }  # fmt: skip
    assert 0 < whole["tim/clipped_share_pos_adv"] < 1


def test_by_hand():
    log_prob = torch.tensor([[math.log(1.5), 0.0, math.log(0.5), 0.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    sums = LossRatioSums.of(log_prob, torch.zeros(1, 4), torch.ones(1, 4), advantages, (0.2, 0.2))
    assert sums.metrics()["tim/clipped_share_pos_adv"] == 0.5
    assert sums.metrics()["tim/clipped_share_neg_adv"] == 0.5
    # the clip binds for an advantage of the other sign only
    turned = LossRatioSums.of(log_prob, torch.zeros(1, 4), torch.ones(1, 4), -advantages, (0.2, 0.2))
    assert turned.metrics()["tim/clipped_share_pos_adv"] == turned.metrics()["tim/clipped_share_neg_adv"] == 0.0


def test_nothing_has_no_metrics():
    nan = torch.full((2, 3), torch.nan)
    ones = torch.ones(2, 3)
    assert LossRatioSums().metrics() == {}
    assert LossRatioSums.of(ones, ones, torch.zeros(2, 3), ones, CLIP).metrics() == {}
    assert LossRatioSums.of(nan, ones, ones, ones, CLIP).metrics() == {}
    assert LossRatioSums.of(ones, ones, ones, nan, CLIP).metrics() == {}
    one = LossRatioSums.of(ones[:1, :1], ones[:1, :1], ones[:1, :1], ones[:1, :1], CLIP).metrics()
    assert one == {"tim/ppo_k1": 0.0, "tim/ppo_k2": 0.0, "tim/ppo_k3": 0.0, "tim/clipped_share_pos_adv": 0.0}
