"""Bad calls are refused by name; sums merge; nothing waits for the device before the metrics are read."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import verl_tim.correction
from verl_tim.correction import (
    MISMATCH_METRICS,
    LossCounts,
    MetricSums,
    RolloutCorrectionConfig,
    baseline_mask,
    correct,
    discounted_returns,
    gradient_scale,
    group_statistics,
    loss_numerator,
    policy_loss,
    policy_terms,
)
from verl_tim.correction.mismatch import record_mismatch
from verl_tim.correction.tokens import prepare_tokens

build = RolloutCorrectionConfig.from_mapping
ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("mapping", "absent", "says"),
    [
        ({}, "old_log_probs", "old_log_probs is absent"),
        ({"preset": "bypass_ppo"}, "log_prob", "log_prob is absent"),
        ({"preset": "seq_reject_ppo_k1"}, "log_prob", "rollout_rs_signal=r_ppo"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": 0.1}, "log_prob", "the rule opsm"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": 0.1}, "advantages", "mean advantage"),
    ],
)
def test_an_absent_tensor_is_named(mapping: dict[str, Any], absent: str, says: str) -> None:
    inputs = dict.fromkeys(("old_log_probs", "rollout_log_probs", "response_mask", "log_prob", "advantages"), ONES)
    correct(build(mapping), **inputs)
    with pytest.raises(ValueError, match=says):
        correct(build(mapping), **(inputs | {absent: None}))


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs", "log_prob", "advantages"])
@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (2,), (1, 3), (2, 3, 1)])
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...]) -> None:
    inputs = dict.fromkeys(("old_log_probs", "rollout_log_probs", "response_mask", "log_prob", "advantages"), ONES)
    with pytest.raises(ValueError, match=rf"{name} has shape"):
        policy_loss(build(), **(inputs | {name: torch.ones(shape)}))


def test_other_bad_calls() -> None:
    inputs = dict.fromkeys(("old_log_probs", "rollout_log_probs", "response_mask", "log_prob", "advantages"), ONES)
    with pytest.raises(ValueError, match=r"response_mask must be \(batch, tokens\)"):
        correct(build(), old_log_probs=ONES[0], response_mask=ONES[0])
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm"):
        policy_loss(build(), **inputs, loss_agg_mode="mean")
    with pytest.raises(ValueError, match="loss_scale_factor=0"):
        policy_loss(build(), **inputs, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=0)
    with pytest.raises(ValueError, match=r"clip_ratio_c=1\.0"):
        policy_loss(build(), **inputs, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="clip_ratio_low=-0"):
        policy_loss(build(), **inputs, clip_ratio_low=-0.1)
    with pytest.raises(ValueError, match="old_forward_log_probs belongs to bypass"):
        correct(build(), **inputs, old_forward_log_probs=ONES)
    with pytest.raises(ValueError, match="baseline_scope='some'"):
        baseline_mask(correct(build(), **inputs), ONES, "some")
    with pytest.raises(ValueError, match="not of the result"):
        baseline_mask(correct(build(), **inputs), ONES[:1])
    with pytest.raises(ValueError, match="gamma"):
        discounted_returns(ONES, ONES, 1.1)


def test_old_forward_gives_d_and_log_prob_the_ratio() -> None:
    config = build({"preset": "seq_reject_corr_k1", "bypass_mode": True, "old_forward": True})
    rollout = torch.full((2, 3), -1.0)
    old_forward = torch.stack([torch.full((3,), -1.0), torch.full((3,), -1.5)])
    log_prob = (rollout + 0.1).requires_grad_(True)  # drifted: by r_ppo both rows would go
    common = {"rollout_log_probs": rollout, "advantages": -ONES, "response_mask": ONES, "loss_agg_mode": "token-sum"}
    loss, metrics = policy_loss(config, log_prob=log_prob, old_forward_log_probs=old_forward, **common)
    assert metrics["rollout_corr/kept_sequences"] == 1
    assert loss.item() == pytest.approx(3 * torch.tensor(0.1).exp().item())
    _, metrics = policy_loss(config, log_prob=log_prob, **common)
    assert metrics["rollout_corr/kept_sequences"] == 0
    # correct() on the forward itself, as a trainer does before the update, sees the same mask
    assert correct(config, log_prob=old_forward, rollout_log_probs=rollout, response_mask=ONES).mask[:, 0].tolist() == [
        True,
        False,
    ]


def test_verls_aggregation_modes() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 6.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    counts = LossCounts.of(mask)
    expected = {
        "token-mean": 13 / 4,
        "token-sum": 13,
        "seq-mean-token-sum": 13 / 2,
        "seq-mean-token-mean": (3 + 4) / 2,
        "seq-mean-token-sum-norm": 13 / 2 / 3,
    }
    for mode, value in expected.items():
        got = loss_numerator(values, mask, mode) / counts.divisor(mode)
        assert got.item() == pytest.approx(value)
    scaled = loss_numerator(values, mask, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert (scaled / counts.divisor("seq-mean-token-sum-norm")).item() == pytest.approx(13 / 2 / 10)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregation_equals_verls_where_nothing_is_rejected(mode: str) -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 7, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    ours = loss_numerator(values, mask, mode) / LossCounts.of(mask).divisor(mode)
    torch.testing.assert_close(ours, agg_loss(values, mask.float(), mode))


def test_gradient_scale_of_an_empty_mini_batch_is_zero() -> None:
    provisional, nothing = LossCounts(torch.tensor(8), torch.tensor(2)), LossCounts(torch.tensor(0), torch.tensor(0))
    for mode in ("token-mean", "token-sum", "seq-mean-token-mean"):
        assert gradient_scale(provisional, nothing, mode).item() == 0
    assert gradient_scale(provisional, LossCounts(torch.tensor(4), torch.tensor(2)), "token-mean").item() == 2
    assert gradient_scale(provisional, LossCounts(torch.tensor(4), torch.tensor(2)), "token-sum").item() == 1


def _parts() -> tuple[MetricSums, list[MetricSums]]:
    generator = torch.Generator().manual_seed(3)
    old, rollout = (-torch.rand(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 4, generator=generator) < 0.8
    mask[4:] = False  # one part is empty
    config = build({"preset": "paper_tis_seq_k3", "rollout_rs_threshold": 0.03})

    def sums(rows: slice) -> MetricSums:
        return correct(config, old_log_probs=old[rows], rollout_log_probs=rollout[rows], response_mask=mask[rows]).sums

    return sums(slice(0, 6)), [sums(slice(0, 1)), sums(slice(1, 4)), sums(slice(4, 6))]


def test_metrics_merge_in_any_order_and_over_flat_vectors() -> None:
    whole, parts = _parts()
    expected = pytest.approx(whole.finalise(), rel=1e-12, abs=1e-12)
    assert (parts[0] + parts[1] + parts[2]).finalise() == expected
    assert (parts[2] + (parts[1] + parts[0])).finalise() == expected
    # As ranks do it: one sum and one maximum over vectors.
    flat = [part.flatten() for part in parts]
    totals = torch.stack([totals for totals, _ in flat]).sum(0)
    maxima = torch.stack([maxima for _, maxima in flat]).amax(0)
    assert parts[2].unflatten(totals, maxima).finalise() == expected


def test_metrics_of_different_settings_do_not_merge() -> None:
    whole, _ = _parts()
    inputs = {"old_log_probs": ONES, "rollout_log_probs": ONES, "response_mask": ONES}
    with pytest.raises(ValueError, match="rollout_rs_masked_fraction"):
        whole.merge(correct(build(preset="token_tis"), **inputs).sums)


def test_metric_names_follow_verl() -> None:
    inputs = dict.fromkeys(("old_log_probs", "rollout_log_probs", "response_mask", "log_prob", "advantages"), ONES)
    config = build({"preset": "paper_tis_seq_k1", "rollout_is_batch_normalize": True})
    _, metrics = policy_loss(config, **inputs)
    verl = """rollout_is_mean rollout_is_std rollout_is_max rollout_is_min rollout_is_eff_sample_size
        rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean rollout_is_seq_std
        rollout_is_seq_max rollout_is_seq_min rollout_is_seq_max_deviation rollout_is_seq_fraction_high
        rollout_is_seq_fraction_low rollout_is_batch_norm_factor rollout_rs_masked_fraction
        rollout_rs_seq_masked_fraction rollout_rs_seq_mean_k1_masked_fraction
        rollout_rs_seq_mean_k1_seq_masked_fraction rollout_rs_seq_mean_k1_mean rollout_rs_seq_mean_k1_max
        rollout_rs_seq_mean_k1_min rollout_rs_seq_mean_k1_fraction_high rollout_rs_seq_mean_k1_fraction_low
        training_ppl training_log_ppl kl k3_kl rollout_ppl rollout_log_ppl log_ppl_diff log_ppl_abs_diff
        log_ppl_diff_max log_ppl_diff_min ppl_ratio chi2_token chi2_seq"""
    assert {f"rollout_corr/{name}" for name in verl.split()} <= set(metrics)
    assert {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"} <= set(metrics)


def test_mismatch_metrics_equal_verls_on_clean_data() -> None:
    """Where no padding row, no huge ratio and no rejection is involved, verl's own helper says the same."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    generator = torch.Generator().manual_seed(5)
    rollout = -torch.rand(8, 6, generator=generator) - 0.1
    old = rollout + 0.2 * torch.randn(8, 6, generator=generator)
    mask = torch.ones(8, 6)
    for level in ("token", "sequence"):
        weights, _, theirs = compute_rollout_correction_and_rejection_mask(
            old, rollout, mask, rollout_is=level, rollout_is_threshold=1.3
        )
        result = correct(
            build({"rollout_is": level, "rollout_is_threshold": 1.3}),
            old_log_probs=old,
            rollout_log_probs=rollout,
            response_mask=mask,
        )
        assert result.weights is not None
        torch.testing.assert_close(result.weights, weights.batch["rollout_is_weights"])
        # Population deviation here; and verl reports raw extremes, sample-size and shares of rows differently by level.
        differ = {"rollout_is_seq_std"} | ({"rollout_is_max", "rollout_is_min"} if level == "sequence" else set())
        for name, value in theirs.items():
            if name.removeprefix("rollout_corr/") not in differ:
                assert result.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.999, 1.0])
def test_returns_equal_the_loop(gamma: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(4, 300, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 300, generator=generator) < 0.6).int()
    mask[2] = 0
    expected = torch.zeros_like(rewards)
    for i in range(4):
        carry = 0.0
        for t in reversed(range(300)):
            if mask[i, t]:
                carry = rewards[i, t].item() + gamma * carry
                expected[i, t] = carry
    torch.testing.assert_close(discounted_returns(rewards, mask, gamma), expected, rtol=1e-10, atol=1e-12)
    assert discounted_returns(rewards[:, :0], mask[:, :0], gamma).shape == (4, 0)


def test_long_returns_neither_overflow_nor_vanish() -> None:
    rewards = torch.zeros(1, 20_480)
    rewards[0, -1] = 1.0
    returns = discounted_returns(rewards, torch.ones(1, 20_480), 0.9)
    assert returns.isfinite().all()
    assert returns[0, -11].item() == pytest.approx(0.9**10, rel=1e-5)


def test_group_statistics_count_only_what_counts() -> None:
    scores = torch.tensor([1.0, 3.0, 5.0, 7.0, float("nan")])
    groups = torch.tensor([0, 0, 0, 1, 1])
    counted = torch.tensor([True, True, False, True, False])
    mean, std, count = group_statistics(scores, groups, counted, 3)
    assert mean.tolist() == [2.0, 7.0, 0.0]
    assert std.tolist() == pytest.approx([2**0.5, 0.0, 0.0])
    assert count.tolist() == [2, 1, 0]


def test_the_package_imports_nothing_of_verl() -> None:
    package = Path(verl_tim.correction.__file__).parent
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            assert not any(name.split(".")[0] in ("verl", "verl_tim", "ray", "omegaconf") for name in names), path.name


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu_and_without_waiting() -> None:
    """Same numbers; and the whole computation runs with device synchronisation forbidden."""
    generator = torch.Generator().manual_seed(4)
    shape = (64, 1_024)
    rollout = -torch.rand(shape, generator=generator) * 2
    old = rollout + 0.3 * torch.randn(shape, generator=generator)
    log_prob = old + 0.1 * torch.randn(shape, generator=generator)
    inputs = {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "log_prob": log_prob,
        "advantages": torch.randn(shape, generator=generator),
        "response_mask": torch.rand(shape, generator=generator) < 0.7,
    }
    rules = {
        "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2,opsm,token_kpop",
        "rollout_rs_threshold": [[0.2, 4.0], 0.05, 3.0, 0.2, 0.9],
    }
    for mapping in (
        {"rollout_is": "token", **rules},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True, **rules, "rollout_rs_signal": "r_ppo"},
        {"preset": "token_tis_ratio"},
        {"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0], "bypass_mode": True, "loss_type": "reinforce"},
    ):
        config = build(mapping)
        here = {**inputs, "log_prob": log_prob.clone().requires_grad_(True)}
        there = {name: value.detach().cuda() for name, value in inputs.items()}
        there["log_prob"].requires_grad_(True)
        policy_terms(config, **there)  # first use allocates
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            terms = policy_terms(config, **there, loss_agg_mode="seq-mean-token-mean")
            loss = terms.loss()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected, metrics = policy_loss(config, **here, loss_agg_mode="seq-mean-token-mean")
        expected.backward()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(there["log_prob"].grad.cpu(), here["log_prob"].grad, rtol=1e-5, atol=1e-9)
        assert terms.correction.metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_mismatch_metrics_names_what_is_recorded_of_d_alone() -> None:
    batch = torch.zeros(2, 3)
    tokens = prepare_tokens(
        RolloutCorrectionConfig(),
        response_mask=torch.ones(2, 3),
        old_log_probs=batch,
        rollout_log_probs=batch,
        log_prob=None,
        advantages=None,
        old_forward_log_probs=None,
    )
    sums = MetricSums()
    record_mismatch(sums, tokens, tokens.valid, sequence_log_is_mean=False)
    assert set(MISMATCH_METRICS) == set(sums.formulas)
