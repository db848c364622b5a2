"""What must hold for any batch and any setting."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_tim.correction import (
    Band,
    LossCounts,
    RolloutCorrectionConfig,
    correct,
    gradient_scale,
    policy_loss,
    policy_terms,
)

from .batches import MODES, Batch, batches, settings_maps

Config = RolloutCorrectionConfig
CONFIGS = settings_maps().map(RolloutCorrectionConfig.from_mapping)
modes = st.sampled_from(MODES)
SIZES = st.sampled_from([30, 1e3, 1e4, 1e20, 1e30])
quick = settings(max_examples=40)


def loss_and_gradient(config: Config, inputs: dict[str, Tensor], **kw: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    loss, metrics = policy_loss(config, **inputs, **kw)
    loss.backward()
    gradient = inputs["log_prob"].grad
    assert gradient is not None
    return loss.detach(), gradient, metrics


def noise(metrics: dict[str, float]) -> float:
    """A deviation of 0 shows rounding noise in proportion to the largest weight."""
    return 1e-7 * max(1.0, metrics.get("rollout_corr/rollout_is_max", 1.0))


@quick
@given(config=CONFIGS, batch=batches())
def test_weights_are_bounded_detached_finite_and_zero_outside_the_mask(config: Config, batch: Batch) -> None:
    inputs = batch.tensors(config, torch.float32)
    result = correct(config, **inputs)
    assert not result.mask.requires_grad
    if config.rollout_is is None:
        assert result.weights is None
        return
    weights = result.weights
    assert weights is not None
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert not weights[~result.mask].any()
    if not config.rollout_is_batch_normalize:
        threshold = config.rollout_is_threshold
        cap = threshold.upper if isinstance(threshold, Band) else threshold
        # What has no recorded log-prob has weight 1, whatever the cap.
        assert (weights <= max(1.0, math.exp(20) * 1.0001 if cap is None else cap)).all()


@quick
@given(config=CONFIGS, batch=batches())
def test_the_mask_only_shrinks_and_inputs_stay_as_they_are(config: Config, batch: Batch) -> None:
    inputs = batch.tensors(config, torch.float32)
    before = {name: value.detach().clone() for name, value in inputs.items()}
    result = correct(config, **inputs)
    loss_and_gradient(config, inputs)
    assert result.mask.dtype == torch.bool
    assert not (result.mask & ~batch.mask).any()
    for name, value in inputs.items():
        assert torch.equal(value.detach().nan_to_num(9.0, 8.0, 7.0), before[name].nan_to_num(9.0, 8.0, 7.0)), name


@quick
@given(config=CONFIGS, batch=batches(holes=False), kind=st.sampled_from([torch.int64, torch.float32, torch.uint8]))
def test_masks_may_be_bool_int_or_float(config: Config, batch: Batch, kind: torch.dtype) -> None:
    inputs = batch.tensors(config)
    _, gradient, metrics = loss_and_gradient(config, inputs)
    other = batch.tensors(config) | {"response_mask": batch.mask.to(kind)}
    _, other_gradient, other_metrics = loss_and_gradient(config, other)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics


@quick
@given(config=CONFIGS, batch=batches(), mode=modes, seed=st.integers(0, 999))
def test_row_order_and_padding_change_nothing(config: Config, batch: Batch, mode: str, seed: int) -> None:
    """Permuted rows, inserted padding columns and added padding rows: every token keeps its gradient, every metric its
    value."""
    factor = 5.0
    _, gradient, metrics = loss_and_gradient(
        config, batch.tensors(config), loss_agg_mode=mode, loss_scale_factor=factor
    )
    generator = torch.Generator().manual_seed(seed)
    rows, width = batch.mask.shape
    columns = torch.randperm(width + 3, generator=generator)[:width].sort().values
    order = torch.randperm(rows + 2, generator=generator)[:rows]

    def scatter(tensor: Tensor) -> Tensor:
        empty = torch.full((rows + 2, width + 3), math.nan, dtype=torch.float64)
        padded = torch.zeros_like(empty, dtype=torch.bool) if tensor.dtype == torch.bool else empty
        padded[order.unsqueeze(-1), columns] = tensor
        return padded

    moved = batch.map(scatter)
    _, moved_gradient, moved_metrics = loss_and_gradient(
        config, moved.tensors(config), loss_agg_mode=mode, loss_scale_factor=factor
    )
    torch.testing.assert_close(moved_gradient[order.unsqueeze(-1), columns], gradient, rtol=1e-12, atol=0)
    assert moved_gradient.count_nonzero() == gradient.count_nonzero()
    assert moved_metrics == pytest.approx(metrics, rel=1e-9, abs=noise(metrics))


@quick
@given(config=CONFIGS, batch=batches(max_rows=7), mode=modes, data=st.data())
def test_splitting_over_micro_batches_and_ranks_never_changes_the_gradient(
    config: Config, batch: Batch, mode: str, data: st.DataObject
) -> None:
    """Both ways to one divisor: counts merged before the backward, and a provisional divisor rescaled after it. Entropy
    rides along, as does the merging of metrics."""
    if config.rollout_is_batch_normalize and config.rollout_is is not None:
        mean_parts = correct(config, **batch.tensors(config))
        assert mean_parts.weight_sum is not None
        assert mean_parts.weight_count is not None
        weight_mean = mean_parts.weight_sum / mean_parts.weight_count.clamp(min=1)
    else:
        weight_mean = None
    common: dict[str, Any] = {"loss_agg_mode": mode, "loss_scale_factor": 6.0, "weight_mean": weight_mean}
    coefficient, dp_size = 0.37, 2

    def objective(terms: Any, leaf: Tensor, counts: LossCounts | None, ranks: int) -> Tensor:
        safe = torch.where(terms.correction.mask, leaf, leaf.new_zeros(()))
        entropy = terms.numerator_of(-safe.exp() * safe) / (counts or terms.counts).divisor(mode) * ranks
        return terms.loss(counts, dp_size=ranks) - coefficient * entropy

    whole = batch.tensors(config)
    terms = policy_terms(config, **whole, **common)
    loss = objective(terms, whole["log_prob"], None, 1)
    loss.backward()

    rows = batch.mask.shape[0]
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    parts = [(owner == part).nonzero().squeeze(-1) for part in range(4)]  # micro-batches 0, 1 on rank 0; 2, 3 on rank 1
    cut = [batch.map(lambda t, p=part: t[p]).tensors(config) for part in parts]
    pieces = [policy_terms(config, **inputs, **common) for inputs in cut]
    final = LossCounts(*(torch.stack(c).sum() for c in zip(*(piece.counts for piece in pieces), strict=True)))
    assert int(final.tokens) == int(terms.counts.tokens)
    provisional = LossCounts(torch.tensor(17), torch.tensor(5))
    scale = gradient_scale(provisional, final, mode)
    for counts, factor in ((final, torch.tensor(1.0)), (provisional, scale)):
        total = torch.zeros((), dtype=torch.float64)
        for piece, inputs in zip(pieces, cut, strict=True):
            inputs["log_prob"].grad = None
            part_loss = objective(piece, inputs["log_prob"], counts, dp_size) / dp_size  # averaging over ranks
            part_loss.backward(retain_graph=True)
            total = total + part_loss.detach() * factor
        for part, inputs in zip(parts, cut, strict=True):
            expected = whole["log_prob"].grad[part]
            torch.testing.assert_close(inputs["log_prob"].grad * factor, expected, rtol=1e-10, atol=1e-15)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-10, atol=1e-13)

    merged = pieces[0].correction.sums
    for piece in pieces[1:]:
        merged = merged + piece.correction.sums
    assert merged.finalise() == pytest.approx(terms.correction.metrics, rel=1e-9, abs=noise(terms.correction.metrics))


@quick
@given(config=CONFIGS, batch=batches(), mode=modes)
def test_garbage_at_masked_positions_never_leaks(config: Config, batch: Batch, mode: str) -> None:
    clean = Batch(
        **{
            f.name: value if f.name == "mask" else torch.where(batch.mask, value, torch.zeros_like(value))
            for f in dataclasses.fields(batch)
            for value in [getattr(batch, f.name)]
        }
    )
    loss, gradient, metrics = loss_and_gradient(config, clean.tensors(config), loss_agg_mode=mode)
    for garbage in (math.nan, math.inf, -math.inf, 3e38):
        dirty = clean.map(
            lambda t, g=garbage: t if t.dtype == torch.bool else torch.where(batch.mask, t, torch.full_like(t, g))
        )
        other_loss, other_gradient, other_metrics = loss_and_gradient(config, dirty.tensors(config), loss_agg_mode=mode)
        assert torch.equal(other_loss, loss)
        assert torch.equal(other_gradient, gradient)
        assert other_metrics == metrics


@quick
@given(config=CONFIGS, batch=batches(scale=0.5, holes=False), mode=modes, size=SIZES)
def test_stays_finite_however_far_apart_the_log_probs_are(config: Config, batch: Batch, mode: str, size: float) -> None:
    far = dataclasses.replace(batch, rollout=batch.rollout - size, old_forward=batch.old_forward + size)
    near = dataclasses.replace(batch, old=batch.old - size, log_prob=batch.log_prob - size)
    for moved in (far, near):
        loss, gradient, metrics = loss_and_gradient(config, moved.tensors(config, torch.float32), loss_agg_mode=mode)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values())
        weights = correct(config, **moved.tensors(config, torch.float32)).weights
        assert weights is None or weights.isfinite().all()
    if not config.bypass_mode and batch.mask.any() and size < 1e9:
        recorded = metrics["rollout_corr/log_ratio_abs_max"]
        assert recorded == pytest.approx(size, abs=6)  # the raw extreme, not the clamped one
        if size > 1e3:
            assert metrics["rollout_corr/clamped_tokens"] == batch.mask.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@quick
@given(config=CONFIGS, batch=batches(scale=0.05, holes=False), mode=modes)
def test_low_precision_inputs_are_up_cast_before_anything_else(
    dtype: torch.dtype, config: Config, batch: Batch, mode: str
) -> None:
    half = batch.map(lambda t: t if t.dtype == torch.bool else t.to(dtype))
    loss, gradient, metrics = loss_and_gradient(config, half.tensors(config, dtype), loss_agg_mode=mode)
    expected_loss, expected, expected_metrics = loss_and_gradient(
        config, half.tensors(config, torch.float32), loss_agg_mode=mode
    )
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected.to(dtype))
    assert metrics == expected_metrics


@quick
@given(batch=batches(), settings_map=settings_maps())
def test_at_the_first_update_bypass_and_recomputation_reject_alike(batch: Batch, settings_map: dict[str, Any]) -> None:
    """With p = p_old, rules on r_corr give one mask, one set of weights, one set of mismatch metrics in both modes."""
    batch = dataclasses.replace(batch, log_prob=batch.old, old_forward=batch.old)
    common = {**settings_map, "rollout_rs_signal": "r_corr", "old_forward": False, "rollout_is_in": "loss"}
    common["loss_type"] = "reinforce"  # under bypass with ppo_clip a band is logged only, and so does not drop
    recompute = Config.from_mapping({**common, "bypass_mode": False})
    bypass = Config.from_mapping({**common, "bypass_mode": True})
    a, b = correct(recompute, **batch.tensors(recompute)), correct(bypass, **batch.tensors(bypass))
    assert torch.equal(a.mask, b.mask)
    assert a.metrics == b.metrics
    if a.weights is not None:
        assert torch.equal(a.weights, b.weights)
    # reinforce has no ratio, so here loss and gradient agree as well
    loss, gradient, _ = loss_and_gradient(recompute, batch.tensors(recompute))
    other_loss, other_gradient, _ = loss_and_gradient(bypass, batch.tensors(bypass))
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)


@quick
@given(batch=batches(), mode=modes, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_untruncated_weights_inside_the_ratio_are_bypass_bit_for_bit(
    batch: Batch, mode: str, dtype: torch.dtype
) -> None:
    """Where a trainer log-prob is lost, the two modes need not agree on old's; so old is log_prob there."""
    batch = dataclasses.replace(batch, old=torch.where(batch.old.isfinite(), batch.old, batch.log_prob))
    batch.log_prob = torch.where(batch.old.isfinite(), batch.log_prob, batch.old)
    inside = Config.from_mapping({"rollout_is": "token", "rollout_is_threshold": 1e30, "rollout_is_in": "ratio"})
    bypass = Config.from_mapping({"preset": "bypass_ppo"})
    known = batch.rollout.isfinite()  # a missing token's ratio is r_train in one mode and 1 in the other
    batch = dataclasses.replace(batch, mask=batch.mask & known)
    loss, gradient, _ = loss_and_gradient(inside, batch.tensors(inside, dtype), loss_agg_mode=mode)
    other_loss, other_gradient, _ = loss_and_gradient(bypass, batch.tensors(bypass, dtype), loss_agg_mode=mode)
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)


@quick
@given(batch=batches(), mode=modes)
def test_old_log_probs_are_not_read_under_bypass(batch: Batch, mode: str) -> None:
    bypass = Config.from_mapping({"preset": "bypass_ppo"})
    loss, gradient, metrics = loss_and_gradient(bypass, batch.tensors(bypass), loss_agg_mode=mode)
    given_old = batch.tensors(bypass) | {"old_log_probs": batch.rollout}
    other_loss, other_gradient, other_metrics = loss_and_gradient(bypass, given_old, loss_agg_mode=mode)
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics


@quick
@given(config=CONFIGS, batch=batches(max_rows=5), mode=modes)
def test_a_dropped_row_is_as_if_it_were_not_there(config: Config, batch: Batch, mode: str) -> None:
    """Kept denominators: removing the rows of which nothing was kept changes no gradient."""
    assume(config.denominator == "kept")
    assume(not config.rollout_is_batch_normalize)
    inputs = batch.tensors(config)
    _, gradient, _ = loss_and_gradient(config, inputs, loss_agg_mode=mode)
    keep = correct(config, **batch.tensors(config)).mask.any(dim=-1)
    assert not gradient[~keep].any()
    rest = batch.map(lambda t: t[keep])
    _, rest_gradient, _ = loss_and_gradient(config, rest.tensors(config), loss_agg_mode=mode)
    torch.testing.assert_close(gradient[keep], rest_gradient, rtol=1e-12, atol=0)


@quick
@given(config=CONFIGS, batch=batches(), mode=modes)
def test_no_gradient_but_through_log_prob(config: Config, batch: Batch, mode: str) -> None:
    """Weights, mask, advantages and the other log-probs are constants: the loss is linear in nothing but log_prob."""
    inputs = batch.tensors(config)
    leaves = {name: inputs[name].detach().clone().requires_grad_(True) for name in inputs if name != "response_mask"}
    loss, _ = policy_loss(config, **leaves, response_mask=batch.mask, loss_agg_mode=mode)
    loss.backward()
    assert leaves["log_prob"].grad is not None
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != "log_prob")
