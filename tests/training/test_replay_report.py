"""Reports of ranks and mini-batches become the metrics of a step."""

from __future__ import annotations

import math

import pytest
import torch

from verl_tim.replay import Agreement
from verl_tim.training.replay_report import Gap, ReplayReport, replay_metrics


def test_ranks_and_phases():
    nothing = Agreement(pairs=10, live=2)
    reports = [
        ReplayReport("old", Agreement(10, 2, 1, 1.5, 3), nothing, host_bytes=0, live=Gap(2, 0.4, 0.3, 0.1)),
        ReplayReport("old", Agreement(30, 2, 0, 0.5, 1), nothing, replayed=Gap(4, 0.4, 0.2, 0.2)),
        ReplayReport("update", Agreement(40, 20, 0, 10, 4), nothing, host_bytes=2_000_000),
    ]
    found = replay_metrics(reports)
    assert found["tim/replay_pairs"] == 40
    assert found["tim/replay_live_pairs"] == 4
    assert found["tim/replay_flip_rate_before"] == 0.1
    assert found["tim/replay_order_mismatch_before"] == 1 / 40
    assert found["tim/replay_expert_mismatch_before"] == 2 / 40
    assert found["tim/replay_flip_rate_policy"] == 0.5
    assert found["tim/replay_flip_rate_after"] == 0
    assert found["tim/replay_host_mb"] == 2
    assert found["tim/replay_d_abs_mean_before"] == 0.2
    assert found["tim/replay_d_abs_mean_after"] == 0.1
    assert found["tim/replay_d_abs_max_before"] == 0.3
    assert found["tim/replay_k3_after"] == 0.05
    # r2 replays nothing in the forward of the old log-probs
    found = replay_metrics(reports[2:])
    assert found["tim/replay_flip_rate_before"] == found["tim/replay_flip_rate_policy"] == 0.5
    assert "tim/replay_probed_tokens" not in found
    assert replay_metrics([]) == {}


def test_the_gap_of_known_log_probs():
    train = torch.tensor([[-1.0, -2.0, -9.0, float("-inf")]])
    rollout = torch.tensor([[-1.5, -1.0, -9.0, -1.0]])
    gap = Gap.of(train, rollout, torch.tensor([[1, 1, 0, 1]]))
    assert (gap.tokens, gap.abs_sum, gap.abs_max) == (2, 1.5, 1.0)
    assert gap.k3 == pytest.approx(math.expm1(0.5) - 0.5 + math.expm1(-1.0) + 1.0)
    assert Gap.of(train, rollout, torch.zeros(1, 4)) == Gap()
    both = gap + Gap(1, 2.0, 2.0, 0.5)
    assert (both.tokens, both.abs_sum, both.abs_max) == (3, 3.5, 2.0)
