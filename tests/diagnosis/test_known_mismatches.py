"""Mismatches of known size and shape, put into one batch: each is revealed by the metrics that are there for it, and by
those alone."""

from __future__ import annotations

import pytest
import torch

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.metrics import choice_metrics

ROWS, WIDTH = 64, 200


@pytest.fixture(scope="module")
def batch():
    """Rollout log-probs, mask, advantages (+1 and -1 by rows) and a generator-made order of the rows' lengths."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(WIDTH).unsqueeze(0) < lengths
    advantages = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0).unsqueeze(1).expand(ROWS, WIDTH)
    return rollout, mask, advantages.clone(), lengths


def of(batch, delta, **more):
    rollout, mask, advantages, _ = batch
    return mismatch_metrics(
        old_log_probs=rollout + delta, rollout_log_probs=rollout, response_mask=mask, advantages=advantages, **more
    )


def close(value):
    return pytest.approx(value, abs=1e-6)


def test_none(batch):
    found = of(batch, torch.zeros(ROWS, WIDTH))
    assert found["tim/exact_fraction"] == 1.0
    assert found["tim/delta_abs_max"] == found["tim/contribution_skew"] == found["tim/seq_delta_sum_max"] == 0.0


def test_an_offset(batch):
    _, _, _, lengths = batch
    found = of(batch, torch.full((ROWS, WIDTH), 0.02))
    for name in ("delta_mean", "delta_abs_mean", "delta_abs_p50", "delta_abs_p99", "delta_abs_max"):
        assert found[f"tim/{name}"] == close(0.02)
    assert found["tim/delta_std"] == close(0.0)
    assert found["tim/delta_gt_0.01"] == 1.0
    assert found["tim/delta_gt_0.1"] == 0.0
    assert found["tim/exact_fraction"] == 0.0
    # small in a token, and all of it adds up over a sequence
    assert found["tim/seq_delta_sum_max"] == close(0.02 * int(lengths.max()))
    assert found["tim/seq_delta_cancel"] == close(1.0)
    assert found["tim/k1"] == close(-0.02)


def test_a_heavy_tail(batch):
    _, mask, _, _ = batch
    delta = torch.zeros(ROWS, WIDTH)
    at = mask.nonzero()[::250]  # 0.4 % of the tokens
    delta[at[:, 0], at[:, 1]] = -4.0
    found, share = of(batch, delta), len(at) / int(mask.sum())
    assert found["tim/delta_abs_p99"] == 0.0, "a percentile does not see it"
    assert found["tim/delta_abs_max"] == close(4.0)
    assert found["tim/delta_gt_1"] == pytest.approx(share)
    assert found["tim/exact_fraction"] == pytest.approx(1 - share)
    assert found["tim/delta_abs_mean"] == close(4 * share)
    assert found["tim/k3"] > 3 * found["tim/delta_abs_mean"] / 4, "K3 grows with the size, beyond K1"


def test_one_sign_of_the_advantage(batch):
    """A drift of negative rows alone: the signed mean halves it, the skew shows it whole."""
    _, _, advantages, _ = batch
    found = of(batch, torch.where(advantages < 0, 0.1, 0.0))
    assert found["tim/delta_mean_neg_adv"] == close(0.1)
    assert found["tim/delta_mean_pos_adv"] == close(0.0)
    assert found["tim/delta_adv_pearson"] == close(-1.0)
    assert found["tim/delta_adv_spearman"] == close(-1.0)
    excess = float(torch.expm1(torch.tensor(0.1, dtype=torch.float64)))
    assert found["tim/contribution_neg_rollout"] == close(excess)
    assert found["tim/contribution_pos_rollout"] == found["tim/contribution_neg_train"] == close(0.0)
    assert found["tim/contribution_skew"] == close(excess)
    # the same size on both signs bends nothing
    even = of(batch, torch.full((ROWS, WIDTH), 0.1))
    assert even["tim/contribution_skew"] == close(0.0)
    assert "tim/delta_adv_pearson" not in even


def test_a_clip_that_only_the_mismatch_makes(batch):
    _, _, advantages, _ = batch
    found = of(batch, torch.where(advantages > 0, 0.3, 0.0), log_prob=batch[0] + torch.where(advantages > 0, 0.3, 0.0))
    assert found["tim/clip_mismatch_only"] == pytest.approx(found["tim/token_share_pos_adv"])
    assert found["tim/clip_both"] == found["tim/clip_masked_by_mismatch"] == 0.0
    assert found["tim/ppo_k1"] == found["tim/ppo_k3"] == 0.0, "the loss's own ratio is blind to it"


def test_drift_with_position(batch):
    _, _, _, lengths = batch
    place = torch.arange(WIDTH) / lengths
    found = of(batch, 0.1 * place.double())
    tenths = [found[f"tim/delta_abs_mean_by_position_{tenth}"] for tenth in range(10)]
    assert tenths == sorted(tenths)
    assert tenths == pytest.approx([0.01 * tenth + 0.005 for tenth in range(10)], abs=2e-3)
    assert found["tim/delta_adv_pearson"] == pytest.approx(0, abs=0.05)


def test_drift_with_length(batch):
    _, _, _, lengths = batch
    found = of(batch, (lengths / WIDTH).double().expand(ROWS, WIDTH))
    bins = [found[f"tim/delta_abs_mean_by_length_{tenth}"] for tenth in range(10) if _has(found, tenth)]
    assert bins == sorted(bins)
    assert len(bins) >= 7
    tenths = [found[f"tim/delta_abs_mean_by_position_{tenth}"] for tenth in range(10)]
    assert max(tenths) - min(tenths) < 0.02


def _has(found, tenth):
    return f"tim/delta_abs_mean_by_length_{tenth}" in found


def test_one_turn_of_a_conversation(batch):
    rollout, _, _, _ = batch
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[:, 90:110] = False
    delta = torch.zeros(ROWS, WIDTH)
    delta[:, 110:] = 0.05
    found = mismatch_metrics(old_log_probs=rollout + delta, rollout_log_probs=rollout, response_mask=mask)
    assert found["tim/delta_abs_mean_by_turn_1"] == close(0.0)
    assert found["tim/delta_abs_mean_by_turn_2"] == close(0.05)


def test_stale_rows(batch):
    delta = torch.zeros(ROWS, WIDTH)
    delta[:16] = 0.2
    versions = torch.full((ROWS, WIDTH), 9)
    versions[:16] = 7
    found = of(batch, delta, weight_versions=versions, current_version=9)
    assert found["tim/staleness_max"] == 2
    assert found["tim/delta_abs_mean_by_version_lag_2"] == close(0.2)
    assert found["tim/delta_abs_mean_by_version_lag_0"] == close(0.0)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5])
def test_router_and_top1_flips(share):
    generator = torch.Generator().manual_seed(3)
    tokens = (8, 400)
    routes = torch.rand(*tokens, 3, 16, generator=generator).argsort(-1)[..., :4].to(torch.int16)
    other = routes.clone()
    flipped = torch.rand(*tokens, generator=generator) < share
    # layer 1 loses its last expert to one that it had not chosen
    spare = torch.tensor([min(set(range(16)) - set(ids)) for ids in routes[..., 1, :].reshape(-1, 4).tolist()])
    other[..., 1, 3] = torch.where(flipped, spare.view(tokens).to(torch.int16), other[..., 1, 3])
    top1 = torch.randint(0, 50, tokens, generator=generator)
    found = choice_metrics(
        torch.ones(tokens, dtype=torch.bool),
        rollout_top1=top1,
        train_top1=torch.where(flipped, top1 + 1, top1),
        rollout_routes=routes,
        train_routes=other,
    )
    exact = float(flipped.double().mean())
    assert found["tim/top1_flip_rate"] == pytest.approx(exact)
    assert found["tim/router_flip_rate"] == pytest.approx(exact / 3)
    assert found["tim/router_flip_rate/layer_1"] == pytest.approx(exact)
    assert found["tim/router_flip_rate/layer_0"] == found["tim/router_order_mismatch"] == 0.0
    assert found["tim/router_expert_mismatch/layer_1"] == pytest.approx(exact / 4)


def test_spearman_of_a_sample_is_close_to_that_of_all():
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(100, 3000, generator=generator)
    delta = 0.1 * advantages + 0.2 * torch.randn(100, 3000, generator=generator)
    fields = {
        "old_log_probs": delta, "rollout_log_probs": torch.zeros(100, 3000), "response_mask": torch.ones(100, 3000),
        "advantages": advantages,
    }  # fmt: skip
    whole, sampled = mismatch_metrics(**fields), mismatch_metrics(**fields, spearman_sample=100_000)
    assert sampled["tim/delta_adv_spearman"] != whole["tim/delta_adv_spearman"]
    assert sampled.pop("tim/delta_adv_spearman") == pytest.approx(whole.pop("tim/delta_adv_spearman"), abs=0.01)
    assert sampled == whole
    assert mismatch_metrics(**fields, spearman_sample=300_000)["tim/delta_abs_max"] == whole["tim/delta_abs_max"]
