"""The work of a decode step: how much of it at once, and that every key chunk of every sequence has one program."""

from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import CHUNK_KEYS, ContractError

from .devices import DEVICE

plans = pytest.importorskip("verl_tim.numerics.gpu.attention_plan")


@pytest.mark.parametrize(
    ("pairs", "max_context", "want"),
    [
        (255, 1024, (1, 3, 4)),
        (255, 1025, (16, 2, 4)),
        (256, 1024, (4, 2, 2)),  # many pairs fill the device whatever their contexts
        (256, 1 << 30, (4, 2, 2)),
    ],
)
def test_the_shape_of_work_turns_at_its_bounds(pairs, max_context, want):
    assert plans._shape_of_work(pairs, max_context) == want


@pytest.mark.parametrize(("sequences", "kv_heads", "max_context"), [(1, 2, 4096), (6, 1, 1024), (128, 2, 4096)])
def test_a_plan_takes_that_shape(sequences, kv_heads, max_context):
    waves, stages, warps = plans._shape_of_work(sequences * kv_heads, max_context)
    plan = plans.DecodePlan(sequences, kv_heads, DEVICE, max_context=max_context)
    wanted = max(1, waves * plans.multiprocessors(torch.device(DEVICE)) // kv_heads)
    assert (plan.stages, plan.warps) == (stages, warps)
    assert plan.items_W8.shape == (sequences + wanted, 8)
    assert plan.arrived.shape == (sequences * kv_heads,)


@pytest.mark.parametrize("max_context", [1024, 1 << 30])
def test_every_chunk_is_walked_once_whatever_the_shape(max_context):
    contexts = [1, CHUNK_KEYS, CHUNK_KEYS + 1, 1024, 3, 900]
    plan = plans.DecodePlan(len(contexts), 2, DEVICE, max_context=max_context)
    start = torch.arange(len(contexts) + 1, dtype=torch.int32, device=DEVICE)
    plan.refresh(start, torch.tensor(contexts, dtype=torch.int32, device=DEVICE))
    walked: dict[int, list[int]] = {sequence: [] for sequence in range(len(contexts))}
    for sequence, first, chunks, _slot, context, row, *_ in plan.items_W8.tolist():
        if chunks:
            assert (context, row) == (contexts[sequence], sequence)
            walked[sequence] += range(first, first + chunks)
    assert {s: sorted(c) for s, c in walked.items()} == {
        s: list(range(-(-context // CHUNK_KEYS))) for s, context in enumerate(contexts)
    }


def test_lengths_of_another_step_are_refused():
    plan = plans.DecodePlan(2, 1, DEVICE)
    lengths = torch.ones(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ContractError, match="built for 2 sequences, got 3 context lengths and 3 query starts"):
        plan.refresh(lengths, lengths)
