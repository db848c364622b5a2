"""On a CPU a batch is worked on block by block of rows, and nobody can tell from the results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_tim.correction import RolloutCorrectionConfig, blocks, correct, policy_loss, policy_terms
from verl_tim.correction.blocks import row_blocks

from .batches import MODES, Batch, batches, settings_maps


def in_blocks(elements: int) -> Any:
    return mock.patch.object(blocks, "_ELEMENTS", elements)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=settings_maps().map(RolloutCorrectionConfig.from_mapping),
    batch=batches(max_rows=7),
    mode=st.sampled_from(MODES),
    elements=st.integers(1, 20),
)
def test_blocks_give_what_the_whole_gives(
    config: RolloutCorrectionConfig, batch: Batch, mode: str, elements: int
) -> None:
    results = []
    for size in (elements, 2**18):
        inputs = batch.tensors(config, torch.float32)
        with in_blocks(size):
            terms = policy_terms(config, loss_agg_mode=mode, **inputs)
            loss, metrics = policy_loss(config, loss_agg_mode=mode, **inputs)
            loss.backward()
            result = correct(config, **{name: value.detach() for name, value in inputs.items()})
        results.append((terms, loss.detach(), metrics, inputs["log_prob"].grad, result))
    (terms, loss, metrics, grad, result), (terms_, loss_, metrics_, grad_, result_) = results
    for one, other in ((result, result_), (terms.correction, terms_.correction)):
        assert torch.equal(one.mask, other.mask)
        assert torch.equal(one.usable, other.usable)
        assert (one.weights is None) == (other.weights is None)
        assert one.weights is None or torch.equal(one.weights, other.weights)
    assert torch.equal(grad, grad_)
    assert terms.counts == terms_.counts
    assert torch.equal(terms.counted, terms_.counted)
    # only sums may be added in another order
    torch.testing.assert_close(loss, loss_, rtol=1e-5, atol=1e-6 * float(grad_.abs().max()) + 1e-12)
    spread = 1e-7 * max(1.0, metrics_.get("rollout_corr/rollout_is_max", 1.0))
    assert metrics == pytest.approx(metrics_, rel=1e-9, abs=spread)


def test_rows_are_dealt_in_order_and_none_is_lost() -> None:
    mask = torch.ones(7, 10)
    values = torch.arange(70.0).view(7, 10)
    with in_blocks(25):
        parts = list(row_blocks(mask, whole=False, values=values, absent=None))
    assert [len(part["values"]) for part in parts] == [2, 2, 2, 1]
    assert torch.equal(torch.cat([part["values"] for part in parts]), values)
    assert all(part["absent"] is None for part in parts)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 9), (3, 9)])
def test_a_row_is_never_cut(shape: tuple[int, int]) -> None:
    with in_blocks(4):
        parts = list(row_blocks(torch.ones(shape), whole=False))
    assert sum(len(part["response_mask"]) for part in parts) == shape[0]
    assert all(part["response_mask"].shape[1] == shape[1] for part in parts)


def test_the_batch_stays_whole_where_rows_depend_on_each_other() -> None:
    config = RolloutCorrectionConfig.from_mapping({"preset": "token_tis", "rollout_is_batch_normalize": True})
    q = torch.full((4, 3), -1.0)
    old = q + torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    with in_blocks(3):
        result = correct(config, old_log_probs=old, rollout_log_probs=q, response_mask=torch.ones(4, 3))
    assert result.weights is not None
    assert result.weights.mean().item() == pytest.approx(1.0)


def test_shapes_that_differ_are_still_named() -> None:
    config = RolloutCorrectionConfig.from_mapping({"preset": "token_tis"})
    with in_blocks(4), pytest.raises(ValueError, match=r"rollout_log_probs has shape \(6, 4\), response_mask \(6, 5\)"):
        correct(
            config,
            old_log_probs=torch.zeros(6, 5),
            rollout_log_probs=torch.zeros(6, 4),
            response_mask=torch.ones(6, 5),
        )
