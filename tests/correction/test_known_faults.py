"""Publicly reported faults of this field, each with its input and the right value.

The name gives the report (repository and number). Notation: d = trainer log-prob - rollout log-prob.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from verl_tim.correction import (
    RolloutCorrectionConfig,
    baseline_mask,
    correct,
    discounted_returns,
    group_statistics,
    policy_loss,
    policy_terms,
    whiten,
)
from verl_tim.correction.ratios import k3, two_outcome_kl

from .batches import MODES, tensor

build = RolloutCorrectionConfig.from_mapping
C = "rollout_corr/"


def of_d(mapping: dict[str, Any], d: torch.Tensor, mask: torch.Tensor | None = None, **kw: Any) -> Any:
    """correct() with rollout log-probs 0 and the trainer's equal to d, so that d has no rounding error."""
    mask = torch.ones_like(d) if mask is None else mask
    config = build(mapping)
    name = "log_prob" if config.bypass_mode else "old_log_probs"
    return correct(config, **{name: d}, rollout_log_probs=torch.zeros_like(d), response_mask=mask, **kw)


def unit_loss(d: torch.Tensor, mask: torch.Tensor, mapping: dict[str, Any], **kw: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradient where every token's loss is 1: ratio 1, advantage -1."""
    log_prob = d.clone().requires_grad_(True)
    loss, _ = policy_loss(
        build(mapping),
        log_prob=log_prob,
        old_log_probs=d,
        rollout_log_probs=torch.zeros_like(d),
        advantages=torch.full_like(d, -1.0),
        response_mask=mask,
        **kw,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad


def test_verl_6362_rewards_and_baselines_see_the_original_mask() -> None:
    """The outcome reward stands on the last token, which is rejected: GRPO and REINFORCE++ must both keep it."""
    rewards, original = tensor([0.0, 1.0], [0.0, 0.0]), torch.ones(2, 2)
    d = tensor([0.0, 5.0], [0.0, 0.0])
    result = of_d({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, d)
    assert result.mask.tolist() == [[True, False], [True, True]]
    for scope in ("all", "kept"):
        mask = baseline_mask(result, original, scope)
        assert torch.equal(mask, torch.ones(2, 2, dtype=torch.bool))  # no row is fully rejected
    scores = (rewards * original).sum(-1)
    mean, std, _ = group_statistics(scores, torch.zeros(2, dtype=torch.int64), mask.any(-1), 1)
    grpo = (scores - mean) / (std + 1e-6)
    assert grpo.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    returns = discounted_returns(rewards, original, 1.0)
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert whiten(returns, original)[0, 0] > 0.8


def test_verl_6806_share_of_sequences_above_the_cap_is_of_raw_weights() -> None:
    metrics = of_d({"rollout_is": "token", "rollout_is_threshold": 2.0}, tensor([1.0, 1.0])).metrics
    assert metrics[C + "rollout_is_seq_fraction_high"] == 1.0
    assert metrics[C + "rollout_is_seq_max"] == 2.0
    assert metrics[C + "rollout_is_raw_max"] == pytest.approx(math.e)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["none", "paper_tis_seq_k1", "icepop", "bypass_ppo", "bypass_reinforce"])
def test_verl_3984_everything_masked(preset: str, mode: str) -> None:
    config = build({"preset": preset})
    log_prob = torch.randn(2, 3).requires_grad_(True)
    loss, metrics = policy_loss(
        config,
        log_prob=log_prob,
        old_log_probs=torch.randn(2, 3),
        rollout_log_probs=torch.randn(2, 3),
        advantages=torch.randn(2, 3),
        response_mask=torch.zeros(2, 3),
        loss_agg_mode=mode,
    )
    loss.backward()
    assert loss.item() == 0
    assert loss.shape == ()
    assert log_prob.grad is not None
    assert not log_prob.grad.any()
    counts = {f"{side}_{unit}" for side in ("valid", "kept") for unit in ("tokens", "sequences")}
    counts |= {
        "missing_tokens",
        "nonfinite_trainer_tokens",
        "clamped_tokens",
        "clamped_sequences",
        "ppo_clamped_tokens",
    }
    assert metrics == {**{C + name: 0.0 for name in counts}, C + "empty_step": 1.0}


@pytest.mark.parametrize("valid", [0, 1])
def test_verl_3984_whitening_with_no_or_one_valid_token(valid: int) -> None:
    mask = torch.zeros(2, 3)
    mask[0, :valid] = 1
    assert torch.equal(whiten(torch.full((2, 3), 5.0), mask), torch.zeros(2, 3))


def test_verl_5859_one_token_and_constant_vectors_have_finite_statistics() -> None:
    for d, mask in ((tensor([0.3, 0.3]), tensor([1.0, 0.0])), (torch.full((3, 2), 0.3), torch.ones(3, 2))):
        for level in ("token", "sequence", "sequence_mean"):
            metrics = of_d(
                {"rollout_is": level, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 9.0}, d, mask
            ).metrics
            assert all(math.isfinite(value) for value in metrics.values())
            assert metrics[C + "rollout_is_std"] == pytest.approx(0, abs=1e-6)


def test_verl_7196_bypass_reports_the_mismatch_under_the_same_names() -> None:
    d = tensor([0.1, -0.3], [0.2, 0.0])
    recompute, bypass = of_d({"rollout_is": "token"}, d), of_d({"rollout_is": "token", "bypass_mode": True}, d)
    assert recompute.metrics == bypass.metrics
    assert bypass.metrics[C + "log_ratio_abs_max"] == pytest.approx(0.3)
    assert bypass.metrics[C + "log_ratio_abs_mean"] == pytest.approx(0.15)


@pytest.mark.parametrize("preset", ["token_tis", "seq_reject_corr_k1", "seq_reject_ppo_k3", "bypass_ppo"])
def test_verl_6158_absent_rollout_log_probs_name_the_switch_that_records_them(preset: str) -> None:
    some = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.calculate_log_probs=true"):
        policy_loss(build(preset=preset), log_prob=some, old_log_probs=some, advantages=some, response_mask=some)


def test_absent_rollout_log_probs_are_fine_when_nothing_is_corrected() -> None:
    log_prob = tensor([-1.0, -2.0]).requires_grad_(True)
    loss, metrics = policy_loss(
        build(),
        log_prob=log_prob,
        old_log_probs=log_prob.detach() - 0.1,
        advantages=tensor([1.0, 1.0]),
        response_mask=torch.ones(1, 2),
    )
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.1)
    assert metrics[C + "ppo_k1"] == pytest.approx(-0.1)
    assert metrics[C + "missing_tokens"] == 0
    assert C + "kl" not in metrics


def test_verl_4105_weights_are_detached() -> None:
    """A weight that leaked its gradient would cancel the policy's exactly here."""
    log_prob = tensor([-1.0]).requires_grad_(True)
    config = build({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1e9})
    inputs = {"rollout_log_probs": tensor([-1.5]), "response_mask": torch.ones(1, 1)}
    loss, _ = policy_loss(config, log_prob=log_prob, advantages=tensor([1.0]), **inputs)
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(-1.64872, abs=1e-5)
    weights = correct(config, log_prob=log_prob, **inputs).weights
    assert weights is not None
    assert weights.requires_grad is False


def test_verl_4070_the_two_ratios_never_share_a_name() -> None:
    """r_corr = e^-0.1 looks from p_old at q; the ratio in a bypass loss, e^0.1, looks from p at q."""
    config = build({"preset": "bypass_ppo", "old_forward": True, "rollout_is": "token"})
    one = torch.ones(1, 1)
    _, metrics = policy_loss(
        config,
        log_prob=tensor([-1.0]),
        rollout_log_probs=tensor([-1.1]),
        old_forward_log_probs=tensor([-1.2]),
        advantages=-one,
        response_mask=one,
    )
    assert metrics[C + "rollout_is_mean"] == pytest.approx(0.90484, abs=1e-5)
    assert math.exp(-metrics[C + "kl"]) == pytest.approx(0.90484, abs=1e-5)
    assert math.exp(-metrics[C + "ppo_k1"]) == pytest.approx(1.10517, abs=1e-5)


def test_verl_3915_the_denominator_counts_what_was_kept() -> None:
    d, mask = tensor([0.0, 0.0], [9.0, 9.0]), torch.ones(2, 2)
    rule = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}
    for mode in ("seq-mean-token-mean", "token-mean"):
        assert unit_loss(d, mask, rule, loss_agg_mode=mode)[0] == 1.0
        assert unit_loss(d, mask, {**rule, "denominator": "all"}, loss_agg_mode=mode)[0] == 0.5


def test_verl_6800_kpop_takes_the_larger_direction() -> None:
    log_p, log_q = torch.tensor([0.5]).log(), torch.tensor([0.9]).log()
    assert two_outcome_kl(log_p, log_q).item() == pytest.approx(0.51083, abs=1e-5)
    assert two_outcome_kl(log_q, log_p).item() == pytest.approx(0.51083, abs=1e-5)
    for bound, kept in ((0.4, False), (0.6, True)):
        result = correct(
            build({"rollout_rs": "token_kpop", "rollout_rs_threshold": bound}),
            old_log_probs=log_p[None],
            rollout_log_probs=log_q[None],
            response_mask=torch.ones(1, 1),
        )
        assert result.mask.item() is kept


def test_kpop_at_certainty() -> None:
    """Probability 1 on one side is as near to 1 as fp32 can say, not infinitely far from everything else."""
    log_p = torch.tensor([0.0, 1e-7, 0.0, -1e4, 0.0])
    log_q = torch.tensor([-1e-7, 0.0, math.log(0.5), math.log(0.5), -1e4])
    got = two_outcome_kl(log_p, log_q)
    assert got.isfinite().all()
    assert got[0] < 1e-6
    assert got[1] < 1e-6
    assert (got[2:] > 5).all()


def test_verl_5229_a_masked_outlier_is_nowhere() -> None:
    d, mask = tensor([0.1, 0.1, 9.0, 0.5, 0.5]), tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    metrics = of_d({}, d, mask).metrics
    assert metrics[C + "log_ratio_abs_mean"] == pytest.approx(0.3)
    assert metrics[C + "log_ratio_abs_max"] == 0.5


def test_trl_5814_both_sequence_levels_exist() -> None:
    d = torch.full((1, 100), -0.01)
    for level, value in (("sequence", 0.36788), ("sequence_mean", 0.99005)):
        weights = of_d({"rollout_is": level}, d).weights
        assert weights[0].tolist() == pytest.approx([value] * 100, abs=1e-5)
    weights = of_d({"rollout_is": "sequence"}, tensor([0.1, 0.2])).weights
    assert weights[0].tolist() == pytest.approx([1.34986] * 2, abs=1e-5)


def test_trl_7120_long_products_live_in_log_space_and_are_counted() -> None:
    d = torch.full((2, 300), math.log(0.7))
    d[1] = 0
    result = of_d({"rollout_is": "sequence"}, d)
    assert result.weights[0, 0].item() == pytest.approx(math.exp(-20), rel=1e-6)
    assert result.metrics[C + "clamped_sequences"] == 1
    assert result.metrics[C + "clamped_tokens"] == 0
    assert result.metrics[C + "log_ratio_seq_abs_max"] == pytest.approx(-300 * math.log(0.7))
    result = of_d({"rollout_is": "sequence_mean"}, d)
    assert result.weights[0, 0].item() == pytest.approx(0.7)
    assert result.metrics[C + "clamped_sequences"] == 0  # what is exponentiated here is the mean


def test_vime_70_a_missing_log_prob_is_no_probability() -> None:
    """NaN marks what the engine never scored; a recorded 0.0 is a value."""
    inputs = {"old_log_probs": tensor([-1.0, -10.8, -1.0]), "response_mask": torch.ones(1, 3)}
    config = build({"rollout_is": "token", "rollout_is_threshold": 2.0})
    result = correct(config, rollout_log_probs=tensor([-1.0, math.nan, -1.0]), **inputs)
    assert result.weights is not None
    assert result.weights.tolist() == [[1.0, 1.0, 1.0]]
    assert result.mask.all()
    assert result.metrics[C + "missing_tokens"] == 1
    assert result.metrics[C + "log_ratio_abs_max"] == 0
    assert result.metrics[C + "rollout_is_eff_sample_size"] == 1
    result = correct(config, rollout_log_probs=tensor([-1.0, 0.0, -1.0]), **inputs)
    assert result.metrics[C + "missing_tokens"] == 0
    assert result.metrics[C + "log_ratio_abs_max"] == pytest.approx(10.8)


def test_missing_tokens_go_with_their_row_and_train_under_bypass() -> None:
    mask = torch.ones(3, 2)
    rollout = tensor([-1.0, math.nan], [-1.0, math.nan], [math.nan, math.inf])
    old = tensor([-1.0, -2.0], [-4.0, -2.0], [-1.0, -1.0])
    reject = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0, "rollout_is": "sequence"}
    result = correct(build(reject), old_log_probs=old, rollout_log_probs=rollout, response_mask=mask)
    assert result.mask.tolist() == [[True, True], [False, False], [True, True]]
    assert result.weights is not None
    assert result.weights.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    log_prob = old.clone().requires_grad_(True)
    loss, metrics = policy_loss(
        build({"preset": "bypass_ppo"}),
        log_prob=log_prob,
        rollout_log_probs=rollout,
        advantages=mask,
        response_mask=mask,
        loss_agg_mode="token-sum",
    )
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.flatten().tolist() == pytest.approx([-1, -1, -math.exp(-3), -1, -1, -1])
    assert metrics[C + "missing_tokens"] == 4


def test_slime_657_the_mean_weight_leaves_out_what_the_band_zeroed() -> None:
    result = of_d({"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0]}, tensor([0.1, -1.5, 0.8, -10.0, 0.3]))
    assert result.weights[0].tolist() == pytest.approx([1.10517, 0, 0, 0, 1.34986], abs=1e-5)
    assert result.mask.tolist() == [[True, False, False, False, True]]
    assert result.metrics[C + "rollout_is_mean"] == pytest.approx(1.22752, abs=1e-5)
    assert result.metrics[C + "kept_tokens"] == 2
    assert result.metrics[C + "rollout_is_oob_ratio"] == pytest.approx(0.6)
    # The effective sample size keeps the zeroes: n is all five.
    w = [1.10517, 1.34986]
    assert result.metrics[C + "rollout_is_eff_sample_size"] == pytest.approx(
        sum(w) ** 2 / (5 * sum(x * x for x in w)), rel=1e-4
    )


def test_effective_sample_size_is_zero_when_every_weight_is() -> None:
    metrics = of_d({"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0]}, tensor([3.0, 3.0])).metrics
    assert metrics[C + "rollout_is_eff_sample_size"] == 0
    assert C + "rollout_is_mean" not in metrics
    assert metrics[C + "empty_step"] == 1


def test_icepop_under_bypass_with_ppo_clip_is_logged_only() -> None:
    mapping = {"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0], "bypass_mode": True}
    result = of_d(mapping, tensor([0.1, 3.0]))
    assert result.mask.tolist() == [[True, True]]
    assert result.weights[0].tolist() == pytest.approx([1.10517, 0], abs=1e-5)
    assert of_d({**mapping, "loss_type": "reinforce"}, tensor([0.1, 3.0])).mask.tolist() == [[True, False]]


def test_prime_rl_2085_a_hundred_nats() -> None:
    """The weight is the cap, K3 is finite, the clamp is counted, and the raw extreme stays visible."""
    result = correct(
        build({"rollout_is": "token", "rollout_is_threshold": 2.0}),
        old_log_probs=tensor([-0.1]),
        rollout_log_probs=tensor([-100.0]),
        response_mask=torch.ones(1, 1),
    )
    assert result.weights is not None
    assert result.weights.item() == 2.0
    assert result.metrics[C + "k3_kl"] == pytest.approx(math.exp(20) - 1 - 99.9, rel=1e-7)
    assert result.metrics[C + "clamped_tokens"] == 1
    assert result.metrics[C + "log_ratio_abs_max"] == pytest.approx(99.9, rel=1e-6)
    assert of_d({}, tensor([199.0])).metrics[C + "k3_kl"] < 1e9


def test_prime_rl_2458_token_and_sequence_means_have_two_names() -> None:
    d, mask = torch.zeros(2, 9), torch.zeros(2, 9)
    d[0, 0], mask[0, 0], mask[1] = 1.0, 1, 1
    metrics = of_d({}, d, mask).metrics
    assert metrics[C + "log_ratio_abs_mean"] == pytest.approx(0.1)
    assert metrics[C + "log_ppl_abs_diff"] == pytest.approx(0.5)


def test_prime_rl_2478_kl_of_kept_and_of_all_tokens_are_two_metrics() -> None:
    metrics = of_d({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, tensor([0.1, 3.0])).metrics
    assert metrics[C + "kl"] == pytest.approx(-1.55)
    assert metrics[C + "kl_kept"] == pytest.approx(-0.1)


def test_trl_6095_a_row_without_tokens_trains_nothing() -> None:
    d, mask = torch.zeros(2, 3), tensor([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    for level in ("sequence", "sequence_mean"):
        for mode in MODES:
            loss, gradient = unit_loss(d, mask, {"rollout_is": level}, loss_agg_mode=mode)
            alone, gradient_alone = unit_loss(d[:1], mask[:1], {"rollout_is": level}, loss_agg_mode=mode)
            assert not gradient[1].any()
            assert loss == alone
            assert torch.equal(gradient[:1], gradient_alone)
            assert gradient_alone.any()


def test_nemo_rl_2485_a_non_finite_trainer_log_prob_is_left_out_and_counted() -> None:
    log_prob = tensor([-1.0, -math.inf, -1.0, -2.0]).requires_grad_(True)
    for preset in ("none", "token_tis", "seq_reject_ppo_k3", "bypass_ppo", "bypass_reinforce"):
        log_prob.grad = None
        loss, metrics = policy_loss(
            build(preset=preset),
            log_prob=log_prob,
            old_log_probs=tensor([-1.0, -1.0, math.nan, -2.0]),
            rollout_log_probs=tensor([-1.0, -1.0, -1.0, -2.0]),
            advantages=torch.full((1, 4), -1.0),
            response_mask=torch.ones(1, 4),
        )
        loss.backward()
        bypass = preset.startswith("bypass")
        kept = 3 if bypass else 2
        assert metrics[C + "nonfinite_trainer_tokens"] == 4 - kept
        assert metrics[C + "kept_tokens"] == kept
        if preset != "bypass_reinforce":
            assert loss.item() == pytest.approx(1.0)
        assert log_prob.grad is not None
        expected = [1 / kept, 0.0, 1 / kept if bypass else 0.0, 1 / kept]
        assert log_prob.grad[0].tolist() == pytest.approx(expected)
        assert all(math.isfinite(value) for value in metrics.values())


def test_vocabulary_padding_that_rejects_everything_is_reported() -> None:
    """log(99/128) on every token: a sum of K3 at 0.01 rejects all, and three silent steps follow unless it is said."""
    d = torch.full((4, 8), math.log(99 / 128))
    result = of_d({"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.01}, d)
    assert not result.mask.any()
    assert result.metrics[C + "empty_step"] == 1
    assert result.metrics[C + "rollout_rs_seq_sum_k3_masked_fraction"] == 1
    assert result.metrics[C + "kl"] == pytest.approx(0.25691, abs=1e-5)
    loss, gradient = unit_loss(d, torch.ones(4, 8), {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.01})
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("trainer", "rollout", "d"),
    [
        ("raw", "temperature", -0.26467),  # a trainer that does not divide by the rollout's temperature
        ("raw", "top_p", -0.09434),  # log of the share that top-p keeps
        ("temperature", "temperature", 0.0),
    ],
)
def test_trl_6789_a_constant_of_the_sampling_stands_in_kl(trainer: str, rollout: str, d: float) -> None:
    """Logits (2, 1, 0), token 0, on every token: the offset is constant, so `kl` is it, and no weight hides it."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    log_probs = {
        "raw": logits.log_softmax(0)[0],
        "temperature": (logits / 0.5).log_softmax(0)[0],
        "top_p": logits[:2].log_softmax(0)[0],  # 0.9 keeps two tokens
    }
    old, recorded = (log_probs[side].expand(3, 5) for side in (trainer, rollout))
    result = correct(build({"preset": "token_tis"}), old_log_probs=old, rollout_log_probs=recorded, response_mask=old)
    for name in ("kl", "kl_kept"):
        assert result.metrics[C + name] == pytest.approx(-d, abs=1e-5)
    assert result.metrics[C + "log_ratio_min"] == result.metrics[C + "log_ratio_max"] == pytest.approx(d, abs=1e-5)
    assert result.weights is not None
    assert result.weights.flatten().tolist() == pytest.approx([math.exp(d)] * 15, abs=1e-5)


def test_rllm_508_padding_is_not_in_the_mean() -> None:
    mask = torch.tensor([[1.0] * 3 + [0.0] * 5])
    assert unit_loss(torch.zeros(1, 8), mask, {})[0] == 1.0
    metrics = of_d({}, tensor([0.5, -0.5])).metrics
    assert metrics[C + "kl"] == 0
    assert metrics[C + "log_ratio_abs_mean"] == 0.5


def test_trl_6369_a_masked_row_is_in_no_denominator() -> None:
    mask = tensor([1.0, 1.0], [0.0, 0.0])
    for mode in ("token-mean", "seq-mean-token-mean"):
        for denominator in ("kept", "all"):
            assert unit_loss(torch.zeros(2, 2), mask, {"denominator": denominator}, loss_agg_mode=mode)[0] == 1.0


def test_miles_1827_masked_kl_enters_no_return() -> None:
    mask = tensor([1.0, 0.0, 0.0, 1.0])
    returns = discounted_returns(-torch.ones(1, 4), mask, 0.9)
    assert returns[0].tolist() == pytest.approx([-1.9, 0, 0, -1.0])
    for garbage in (7.0, math.nan, math.inf):
        rewards = torch.where(mask == 1, -1.0, garbage)
        assert torch.equal(discounted_returns(rewards, mask, 0.9), returns)


def test_a_rejected_last_output_leaves_its_session_an_advantage() -> None:
    """Session 0 has outputs a and b (final), session 1 has c; rewards 1 and 0 stand on the final ones; b is rejected.

    The baseline is taken over the original mask, so a keeps the advantage it has without rejection.
    """
    d = tensor([0.0, 0.0], [9.0, 9.0], [0.0, 0.0])
    result = of_d({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, d)
    assert result.mask.any(-1).tolist() == [True, False, True]
    mask = baseline_mask(result, torch.ones(3, 2), "all")
    session, final = torch.tensor([0, 0, 1]), torch.tensor([1, 2])
    scores = tensor([0.0, 1.0], [0.0, 1.0], [0.0, 0.0]).sum(-1)[final]
    mean, std, _ = group_statistics(scores, torch.zeros(2, dtype=torch.int64), mask.any(-1)[final], 1)
    advantage = ((scores - mean) / (std + 1e-6))[session]
    assert advantage.tolist() == pytest.approx([0.70711, 0.70711, -0.70711], abs=1e-5)
    assert baseline_mask(result, torch.ones(3, 2), "kept").any(-1).tolist() == [True, False, True]


def test_openrlhf_1334_group_statistics_survive_bf16_rewards() -> None:
    rewards = torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)
    mean, std, count = group_statistics(rewards, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), 1)
    assert ((rewards - mean) / std).tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)
    assert count.item() == 4


def test_openrlhf_1334_log_probs_are_up_cast_before_they_are_subtracted() -> None:
    rollout, old = torch.tensor([[-10.0]], dtype=torch.bfloat16), torch.tensor([[-9.999]])
    result = correct(build({"rollout_is": "token"}), old_log_probs=old, rollout_log_probs=rollout, response_mask=old)
    assert result.metrics[C + "log_ratio_max"] == pytest.approx(0.001, rel=1e-3)
    halves = [torch.tensor([[x]], dtype=torch.bfloat16) for x in (-0.6015625, -3.109375)]
    result = correct(build(), old_log_probs=halves[0], rollout_log_probs=halves[1], response_mask=old)
    assert result.metrics[C + "log_ratio_max"] == 2.5078125  # bf16 would say 2.5


def test_an_icepop_zero_leaves_the_mean_and_not_only_the_sum() -> None:
    """Ten tokens of ratio 1 and advantage 1, one zeroed by the band: the mean over kept tokens is -1, not -0.9."""
    d = torch.zeros(1, 10)
    d[0, 4] = 5.0
    for mode in ("token-mean", "seq-mean-token-mean"):
        config = build(preset="icepop")
        loss, _ = policy_loss(
            config,
            log_prob=d,
            old_log_probs=d,
            rollout_log_probs=torch.zeros(1, 10),
            advantages=torch.ones(1, 10),
            response_mask=torch.ones(1, 10),
            loss_agg_mode=mode,
        )
        assert loss.item() == -1.0


def test_mismatch_is_in_nats() -> None:
    """3 nats at small probability are 0.0064 as a difference of probabilities."""
    result = correct(
        build(), old_log_probs=tensor([-8.0]), rollout_log_probs=tensor([-5.0]), response_mask=torch.ones(1, 1)
    )
    assert result.metrics[C + "log_ratio_abs_max"] == 3.0


def test_k1_band_is_on_the_ratio_and_not_inverted() -> None:
    """[0.5, 1.2] keeps ratio 0.6 and rejects 1.5; a band on -log r would do the opposite."""
    for rule, d in (("token_k1", 1.0), ("seq_sum_k1", 0.5), ("seq_mean_k1", 1.0)):
        log_ratios = torch.tensor([0.6, 1.5, 0.45, 1.1]).log() * d
        result = of_d({"rollout_rs": rule, "rollout_rs_threshold": [0.5, 1.2]}, log_ratios.unsqueeze(-1).repeat(1, 2))
        assert result.mask.any(-1).tolist() == [True, False, False, True]
    edges = tensor([math.log(0.5)], [math.log(1.2)])
    assert of_d({"rollout_rs": "token_k1", "rollout_rs_threshold": [0.5, 1.2]}, edges).mask.all()


def test_k3_is_accurate_near_one_and_right_far_away() -> None:
    x = torch.tensor([0.0, 1e-8, 1e-4, -1e-4, 0.05, -0.0999, 0.1001, 1.0, -30.0, 25.0, 1e12], dtype=torch.float64)
    series = [v * v / 2 + v**3 / 6 + v**4 / 24 for v in x.tolist()]
    plain = [math.expm1(min(v, 20)) - v for v in x.tolist()]
    exact = torch.where(x.abs() > 1e-3, *(torch.tensor(values, dtype=torch.float64) for values in (plain, series)))
    exact[-1] = 1e12 - 1  # there the clamped formula is negative; a lower bound of the true value stands in
    for dtype, rel in ((torch.float64, 1e-9), (torch.float32, 3e-6)):
        got = k3(x.to(dtype))
        assert (got >= 0).all()
        torch.testing.assert_close(got.double(), exact, rtol=rel, atol=0)


def test_opsm_drops_negative_sequences_that_drifted() -> None:
    """mean A < 0 and mean(log q - log p) above the threshold, both, and then the whole row."""
    log_prob = tensor([-2.0, -2.0], [-2.0, -2.0], [-1.0, -1.0], [-2.0, -1.0])
    result = correct(
        build({"rollout_rs": "opsm", "rollout_rs_threshold": 0.5}),
        old_log_probs=log_prob,
        log_prob=log_prob,
        rollout_log_probs=torch.full((4, 2), -1.0),
        advantages=tensor([-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]),
        response_mask=torch.ones(4, 2),
    )
    assert result.mask.all(-1).tolist() == [False, True, True, True]  # the last one's mean gap is exactly 0.5
    assert result.metrics[C + "rollout_rs_opsm_seq_masked_fraction"] == 0.25


def test_batch_normalisation_truncates_first_and_divides_by_the_kept_mean() -> None:
    d = torch.tensor([[4.0, 1.0], [0.5, 8.0]]).log()
    mapping = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}
    result = of_d({**mapping, "rollout_rs": "token_k1", "rollout_rs_threshold": 5.0}, d)
    mean = (2.0 + 1.0 + 0.5) / 3  # the last token, truncated to 2, was rejected
    assert result.weights.flatten().tolist() == pytest.approx([2 / mean, 1 / mean, 0.5 / mean, 0])
    assert result.metrics[C + "rollout_is_batch_norm_factor"] == pytest.approx(mean)
    assert result.metrics[C + "rollout_is_batch_norm_excess_max"] == 0
    low = of_d({**mapping, "rollout_is_threshold": 1.0}, d)
    assert low.metrics[C + "rollout_is_batch_norm_excess_max"] == pytest.approx(1 / 0.875 - 1)
    assert low.metrics[C + "rollout_is_batch_norm_over_cap"] == pytest.approx(3 / 4)
    assert low.weight_sum.item() / low.weight_count.item() == pytest.approx(0.875)
    rows = of_d({**mapping, "rollout_is": "sequence"}, torch.tensor([[1.5, 1.0, 1.0], [0.25, 2.0, 1.0]]).log())
    assert rows.weights[:, 0].tolist() == pytest.approx([1.5, 0.5])
    assert rows.metrics[C + "rollout_is_batch_norm_factor"] == pytest.approx(1.0)


def test_padding_rows_change_no_metric() -> None:
    d = torch.cat([tensor([0.3, -0.2], [0.1, 0.4]), torch.full((30, 2), 5.0)])
    mask = torch.cat([torch.ones(2, 2), torch.zeros(30, 2)])
    for level in ("token", "sequence", "sequence_mean"):
        mapping = {"rollout_is": level, "rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": [0.02, 1.3]}
        assert of_d(mapping, d, mask).metrics == of_d(mapping, d[:2]).metrics


def test_entropy_and_kl_share_mask_and_denominator() -> None:
    d = tensor([0.0, 0.0], [9.0, 9.0])
    config = build({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0})
    terms = policy_terms(
        config,
        log_prob=d,
        old_log_probs=d,
        rollout_log_probs=torch.zeros(2, 2),
        advantages=torch.ones(2, 2),
        response_mask=torch.ones(2, 2),
        loss_agg_mode="seq-mean-token-mean",
    )
    entropy = tensor([1.0, 3.0], [math.nan, 100.0])
    assert (terms.numerator_of(entropy) / terms.counts.divisor(terms.mode)).item() == 2.0
