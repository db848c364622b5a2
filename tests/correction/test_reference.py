"""The tensors against the float64 loops: weights, mask, loss, gradient and metrics, over all settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_tim.correction import PRESETS, RolloutCorrectionConfig, correct, policy_loss

from .batches import MODES, Batch, batches, settings_maps
from .reference import evaluate

CLIPS = st.fixed_dictionaries(
    {
        "clip_ratio_low": st.sampled_from([0.0, 0.2]),
        "clip_ratio_high": st.sampled_from([0.0, 0.28]),
        "clip_ratio_c": st.sampled_from([1.1, 3.0, None]),
    }
)


def check(mapping: dict[str, Any], batch: Batch, mode: str, factor: float | None, clips: dict[str, Any]) -> None:
    config = RolloutCorrectionConfig.from_mapping(mapping)
    inputs = batch.tensors(config)
    loss, metrics = policy_loss(config, **inputs, **clips, loss_agg_mode=mode, loss_scale_factor=factor)
    loss.backward()
    expected = evaluate(
        config.to_mapping(),
        **batch.lists(config),
        mode=mode,
        factor=factor,
        clip_low=clips["clip_ratio_low"],
        clip_high=clips["clip_ratio_high"],
        clip_c=clips["clip_ratio_c"],
    )
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    gradient = torch.tensor(expected.gradient, dtype=torch.float64)
    torch.testing.assert_close(inputs["log_prob"].grad, gradient, rtol=1e-9, atol=1e-14)

    result = correct(config, **{**inputs, "log_prob": inputs["log_prob"].detach()})
    assert result.mask.tolist() == expected.mask
    if expected.weights is None:
        assert result.weights is None
    else:
        assert result.weights is not None
        assert result.weights.dtype == torch.float32
        torch.testing.assert_close(
            result.weights, torch.tensor(expected.weights, dtype=torch.float32), rtol=1e-6, atol=0
        )
    largest = max(1.0, expected.metrics.get("rollout_corr/rollout_is_max", 1.0))
    for name, value in expected.metrics.items():
        tolerance = 1e-7 * largest if name.endswith("_std") else 1e-12
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=tolerance), name
        if "ppo_" not in name:
            assert result.metrics[name] == metrics[name]
    assert all(math.isfinite(value) for value in metrics.values())


@settings(max_examples=200)
@given(
    mapping=settings_maps(),
    batch=batches(),
    mode=st.sampled_from(MODES),
    factor=st.sampled_from([None, 3.5]),
    clips=CLIPS,
)
def test_everything_equals_the_loops(
    mapping: dict[str, Any], batch: Batch, mode: str, factor: float | None, clips: dict[str, Any]
) -> None:
    check(mapping, batch, mode, factor, clips)


@pytest.mark.parametrize("bypass", [False, True], ids=["recompute", "bypass"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_equals_the_loops(preset: str, bypass: bool) -> None:
    mapping: dict[str, Any] = {"preset": preset}
    if "_sum_k1" in preset:
        mapping["rollout_rs_threshold"] = [0.8, 1.3]
    elif "_sum_k3" in preset:
        mapping["rollout_rs_threshold"] = 0.02
    if bypass and preset != "token_tis_ratio":
        mapping["bypass_mode"] = True
    generator = torch.Generator().manual_seed(7)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(24, 9, generator=generator, dtype=torch.float64)

    rollout = -normal(1.0).abs() - 0.01
    # Rows from almost equal to far apart, so that rejection rules find both kinds.
    old = rollout + normal(1.0) * torch.logspace(-4, 0.3, 24, dtype=torch.float64).unsqueeze(-1)
    old[3] -= 4  # and one whose product of ratios is below every lower bound
    log_prob = old + normal(1.0) * torch.logspace(-4, -0.3, 24, dtype=torch.float64).flip(0).unsqueeze(-1)
    mask = torch.rand(24, 9, generator=generator) < 0.8
    batch = Batch(old, rollout, log_prob, normal(1.0), mask, old)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    check(mapping, batch, "token-mean", None, clips)
    config = RolloutCorrectionConfig.from_mapping(mapping)
    if config.rules:  # the data exercise both verdicts
        kept = correct(config, **batch.tensors(config)).mask
        assert 0 < int(kept.sum()) < int(mask.sum())


@example(mapping={}, batch=Batch(*(torch.zeros(0, 3).double() for _ in range(4)), torch.zeros(0, 3), torch.zeros(0, 3)))
@example(mapping={}, batch=Batch(*(torch.zeros(2, 0).double() for _ in range(4)), torch.zeros(2, 0), torch.zeros(2, 0)))
@settings(max_examples=15)
@given(mapping=settings_maps(), batch=batches().map(lambda b: Batch(**{**vars(b), "mask": torch.zeros_like(b.mask)})))
def test_empty_batches_give_zero_with_a_graph(mapping: dict[str, Any], batch: Batch) -> None:
    config = RolloutCorrectionConfig.from_mapping(mapping)
    for mode in MODES:
        inputs = batch.tensors(config)
        loss, metrics = policy_loss(config, **inputs, loss_agg_mode=mode)
        loss.backward()
        assert loss.item() == 0
        assert not inputs["log_prob"].grad.any()
        assert metrics["rollout_corr/empty_step"] == 1
        assert metrics["rollout_corr/valid_tokens"] == 0
        assert "rollout_corr/kl" not in metrics
        assert all(math.isfinite(value) for value in metrics.values())
