"""On a GPU: autograd computes layers again in threads of its own, and recorded routes are in pinned memory."""

from __future__ import annotations

import pytest
import torch

from tests.replay import tiny
from tests.replay.test_replay import ROWS, checkpointed, given
from verl_tim.replay import RecordedRoutes, RoutingReplay

pytestmark = pytest.mark.gpu


def run_pass(replay, model, want, seed=0):
    replay.begin(ROWS, want)
    tokens, targets = (tiny.tokens(ROWS, s).cuda() for s in (seed, seed + 1))
    logits = model(tokens, use_cache=False).logits
    loss = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum()
    _, live, used = replay.end()
    return loss, live, used


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_each_micro_batch_is_computed_again_with_its_own_routes(reentrant):
    want = [given(seed).cuda() for seed in range(3)]
    kept = checkpointed(reentrant=None).cuda()
    replay, expected = RoutingReplay(kept), []
    for seed in range(3):
        kept.zero_grad()
        run_pass(replay, kept, want[seed], seed)[0].backward()
        expected.append(tiny.gradients(kept))
    model = checkpointed(reentrant=reentrant).cuda()
    replay = RoutingReplay(model)
    losses = [run_pass(replay, model, want[seed], seed)[0] for seed in range(3)]
    for seed in (2, 0, 1):
        model.zero_grad()
        losses[seed].backward()
        for name, gradient in tiny.gradients(model).items():
            torch.testing.assert_close(gradient, expected[seed][name], rtol=1e-3, atol=1e-4)
        assert {replay.cursor(layer).backward for layer in range(tiny.LAYERS)} == {seed}


def test_recorded_routes_are_pinned_and_come_back():
    model = tiny.model().cuda()
    replay, record = RoutingReplay(model), RecordedRoutes()
    with torch.no_grad():
        _, _, recorded = run_pass(replay, model, None)
    record.keep([4, 2], [5, 7], recorded)
    assert all(routes.is_pinned() for routes in record._rows.values())
    want = record.of([4, 2], [5, 7], torch.device("cuda"))
    assert torch.equal(want, recorded)
    _, _, used = run_pass(replay, model, want)
    assert torch.equal(used, recorded)
