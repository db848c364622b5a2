"""Routers take what they are given, forward and backward, and only that; the scores are live."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from tests.replay import tiny
from verl_tim.replay import RecordedRoutes, ReplayError, RoutingReplay, agreement
from verl_tim.replay.agreement import refuse_misplaced

ROWS = 12


def forward(model: nn.Module, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return model(tiny.tokens(rows, seed), use_cache=False).logits.log_softmax(-1).gather(
        -1, tiny.tokens(rows, seed + 1).unsqueeze(-1)
    ).sum()  # fmt: skip


def run_pass(replay, model, given, rows=ROWS, seed=0):
    replay.begin(rows, given)
    loss = forward(model, rows, seed)
    _, live, used = replay.end()
    return loss, live, used


def given(seed=5, rows=ROWS, layers=tiny.LAYERS):
    return torch.from_numpy(tiny.routes(rows, layers, seed))


def checkpointed(kind="qwen3_moe", *, reentrant: bool | None):
    model = tiny.model(kind)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_its_own_routes_change_no_bit(kind):
    """Recorded and given back: log-probs and gradients are those of a model without handles, bit for bit."""
    plain, model = tiny.model(kind), tiny.model(kind)
    forward(plain).backward()
    replay = RoutingReplay(model)
    loss, live, used = run_pass(replay, model, None)
    assert (live == used).all()
    again, live_again, used_again = run_pass(replay, model, used)
    assert (live_again == used_again).all()
    again.backward()
    assert tiny.same_bits(forward_plain := forward(plain), loss)
    assert tiny.same_bits(forward_plain, again)
    theirs, ours = tiny.gradients(plain), tiny.gradients(model)
    assert theirs.keys() == ours.keys()
    assert all(tiny.same_bits(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_given_routes_are_taken_in_their_order(kind):
    model = tiny.model(kind)
    replay = RoutingReplay(model)
    want = given(layers=len(replay.routers))
    loss, live, used = run_pass(replay, model, want)
    assert (used == want).all()
    assert (live != want).any()
    assert not tiny.same_bits(loss, run_pass(replay, model, None)[0])


def reference(model: nn.Module, want: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients with routers written out by hand: live probabilities at the given experts, renormalised."""
    for layer, decoder in enumerate(model.model.layers):
        gate = decoder.mlp.gate

        def choose(hidden, gate=gate, layer=layer):
            logits = torch.nn.functional.linear(hidden, gate.weight)
            index = want[:, layer].long()
            score = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float).gather(-1, index)
            return logits, score / score.sum(-1, keepdim=True), index

        gate.forward = choose
    forward(model, seed=seed).backward()
    return tiny.gradients(model)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "not reentrant", "reentrant"])
def test_backward_is_of_the_given_routes_with_live_scores(reentrant):
    want = given()
    expected = reference(tiny.model(), want)
    model = checkpointed(reentrant=reentrant)
    replay = RoutingReplay(model)
    loss, _, _ = run_pass(replay, model, want)
    loss.backward()
    found = tiny.gradients(model)
    assert expected.keys() == found.keys()
    assert found["model.layers.1.mlp.gate.weight"].abs().sum() > 0
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    for layer in range(tiny.LAYERS):
        assert replay.cursor(layer).forward == 0
        assert replay.cursor(layer).backward == (-1 if reentrant is None else 0)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_backward_in_another_thread(reentrant):
    """As on a GPU, where autograd runs in threads of its own; a forward is under way in this one meanwhile."""
    want = given()
    model = checkpointed(reentrant=reentrant)
    replay = RoutingReplay(model)
    run_pass(replay, model, want)[0].backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    loss = run_pass(replay, model, want)[0]
    replay.begin(ROWS, given(8))
    failed = []

    def backward():
        try:
            loss.backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failed
    found = tiny.gradients(model)
    assert all(tiny.same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_several_micro_batches_outstanding(reentrant, order):
    """Each is computed again with its own routes, whatever the order of the backwards."""
    want = [given(seed) for seed in range(3)]
    expected = []
    for seed in range(3):
        alone = tiny.model()
        replay = RoutingReplay(alone)
        run_pass(replay, alone, want[seed], seed=seed)[0].backward()
        expected.append(tiny.gradients(alone))
    model = checkpointed(reentrant=reentrant)
    replay = RoutingReplay(model)
    losses = [run_pass(replay, model, want[seed], seed=seed)[0] for seed in range(3)]
    for seed in order:
        model.zero_grad()
        losses[seed].backward()
        found = tiny.gradients(model)
        for name in found:
            torch.testing.assert_close(found[name], expected[seed][name], rtol=1e-4, atol=1e-6)
        assert {replay.cursor(layer).backward for layer in range(tiny.LAYERS)} == {seed}
    # and all in one backward
    model.zero_grad()
    losses = [run_pass(replay, model, want[seed], seed=seed)[0] for seed in range(3)]
    sum(losses).backward()
    for name, gradient in tiny.gradients(model).items():
        torch.testing.assert_close(gradient, sum(one[name] for one in expected), rtol=1e-4, atol=1e-5)


def test_recorded_routes_stay_when_weights_move():
    """r2: weights move between the two forwards so that live routes flip; the routes stay, the scores do not."""
    model = checkpointed(reentrant=False)
    replay, kept = RoutingReplay(model), RecordedRoutes()
    lengths = [5, 7]
    with torch.no_grad():
        old, _, recorded = run_pass(replay, model, None)
    kept.keep([3, 1], lengths, recorded)
    assert kept.nbytes == 2 * ROWS * tiny.LAYERS * tiny.TOP_K
    with torch.no_grad():
        for decoder in model.model.layers:
            decoder.mlp.gate.weight.add_(torch.randn_like(decoder.mlp.gate.weight))
    want = kept.of([3, 1], lengths, torch.device("cpu"))
    assert (want == recorded).all()
    loss, live, used = run_pass(replay, model, want)
    assert (live != recorded).any(), "the planted change flips no route"
    assert (used == recorded).all()
    loss.backward()
    torch.testing.assert_close(
        tiny.gradients(model)["model.layers.0.mlp.gate.weight"],
        reference(_moved_like(model), recorded)["model.layers.0.mlp.gate.weight"], rtol=1e-4, atol=1e-6,
    )  # fmt: skip
    assert abs(float((loss - old).detach())) > 1e-3, "scores were not live"
    # rows come back in whatever order they are asked for
    assert (kept.of([1], [7], torch.device("cpu")) == recorded[5:]).all()
    with pytest.raises(ReplayError, match="sample 2: its routes were not recorded on this rank"):
        kept.of([2], [5], torch.device("cpu"))
    with pytest.raises(ReplayError, match="sample 1: 7 positions were recorded, and it has 6"):
        kept.of([1], [6], torch.device("cpu"))
    kept.clear()
    assert (len(kept), kept.nbytes) == (0, 0)


def _moved_like(model: nn.Module) -> nn.Module:
    other = tiny.model()
    other.load_state_dict(model.state_dict())
    return other


def test_live_where_there_is_no_route():
    model = tiny.model()
    replay = RoutingReplay(model)
    _, live, _ = run_pass(replay, model, None)
    want = given()
    want[-1] = -1
    _, live, used = run_pass(replay, model, want)
    assert (used[:-1] == want[:-1]).all()
    assert (used[-1] == live[-1]).all()


def test_nothing_runs_without_routes():
    model = tiny.model()
    replay = RoutingReplay(model)
    with pytest.raises(ReplayError, match=r"layer 0: model\.layers\.0\.mlp\.gate runs outside of a micro-batch"):
        forward(model)
    with replay.free():
        free = forward(model)
    assert tiny.same_bits(free, forward(tiny.model()))
    replay.begin(ROWS + 1, None)
    with pytest.raises(ReplayError, match=f"layer 0: .* sees {ROWS} rows, and micro-batch 0 has routes for {ROWS + 1}"):
        forward(model)
    with pytest.raises(ReplayError, match="a forward begins before the last one ended"):
        replay.begin(ROWS, None)
    replay.clear()
    with pytest.raises(ReplayError, match=r"routes \(12, 2, 2\) for 12 rows, 3 routers and k=2"):
        replay.begin(ROWS, given(layers=2))


def test_a_router_passed_over_and_one_run_twice():
    model = tiny.model()
    replay = RoutingReplay(model)
    hidden = torch.randn(ROWS, 32)
    replay.begin(ROWS, given())
    for layer in (0, 2):
        model.model.layers[layer].mlp.gate(hidden)
    with pytest.raises(ReplayError, match=r"layer 2: model\.layers\.2\.mlp\.gate ran twice"):
        model.model.layers[2].mlp.gate(hidden)
    with pytest.raises(ReplayError, match=r"layer 1: model.layers.1.mlp.gate did not run .* choose live in silence"):
        replay.end()


def test_recomputation_by_others_is_refused():
    """A checkpoint that carries no pass: better no gradient than one of other experts."""
    from torch.utils.checkpoint import checkpoint

    model = tiny.model()
    replay = RoutingReplay(model)
    block = model.model.layers[0].mlp
    replay.begin(ROWS, given())
    out = checkpoint(block, torch.randn(1, ROWS, 32, requires_grad=True), use_reentrant=False)
    with pytest.raises(ReplayError, match="computed again by something that does not say for which micro-batch"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_after_clear_nothing_is_computed_again(reentrant):
    model = checkpointed(reentrant=reentrant)
    replay = RoutingReplay(model)
    loss, _, _ = run_pass(replay, model, given())
    replay.clear()
    assert all(replay.cursor(layer).forward == -1 for layer in range(tiny.LAYERS))
    with pytest.raises(ReplayError, match="whose routes were cleared"):
        loss.backward()
    model.zero_grad()
    run_pass(replay, model, given())[0].backward()


def test_free_forwards_are_free_in_their_backward_too():
    model = checkpointed(reentrant=False)
    replay = RoutingReplay(model)
    with replay.free():
        forward(model).backward()
    plain = tiny.model()
    forward(plain).backward()
    ours, theirs = tiny.gradients(model), tiny.gradients(plain)
    assert all(tiny.same_bits(ours[name], theirs[name]) for name in theirs)


def test_known_agreement():
    # B19: [3, 7] against [7, 3] is order, no flip; [3, 7] against [3, 5] one flip and half the experts
    one = torch.tensor([[[3, 7], [3, 7]], [[3, 7], [1, 2]], [[-1, -1], [-1, -1]]], dtype=torch.int16)
    two = torch.tensor([[[7, 3], [3, 5]], [[3, 7], [4, 5]], [[0, 1], [0, 1]]], dtype=torch.int16)
    pairs, flips, order, missing, live = agreement(one, two).tolist()
    assert (pairs, flips, order, missing, live) == (4, 2, 1, 1.5, 2)
    assert agreement(one, one).tolist() == [4, 0, 0, 0, 2]


@pytest.mark.parametrize("shift", [1, -1, 30, -30])
def test_shifted_content_is_noticed(shift):
    """Right shapes, wrong places: the router's own choice says so."""
    live = torch.from_numpy(tiny.routes(100, 3))
    mismatch = np.random.default_rng(0).random(100) < 0.2
    routes = live.clone()
    routes[mismatch] = given(9, rows=100)[mismatch]
    refuse_misplaced(routes, live, prompt=30, sample="u0")
    moved = routes.roll(shift, 0)
    with pytest.raises(ReplayError, match=rf"sample u0, .* shifted by {shift} position"):
        refuse_misplaced(moved, live, prompt=30, sample="u0")
    # too little to tell
    refuse_misplaced(moved[:40], live[:40], prompt=30, sample="u0")
    # of another sequence of the same length, or of the step before
    with pytest.raises(ReplayError, match=r"sample u0, all layers, position 0 on: the routes are of another sequence"):
        refuse_misplaced(given(9, rows=100), live, prompt=30, sample="u0")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_shift_by_a_prompt_longer_than_its_response(sign):
    """Routes of few experts agree half by chance, so that only the shift tells."""
    live = torch.from_numpy(tiny.routes(300, 3, experts=4))
    refuse_misplaced(live, live, prompt=220, sample="u0")
    with pytest.raises(ReplayError, match=rf"sample u0, .* shifted by {sign * 220} position"):
        refuse_misplaced(live.roll(sign * 220, 0), live, prompt=220, sample="u0")


def test_routes_of_another_answer_to_the_same_prompt():
    """Of one length, and right in most positions, which are the prompt's."""
    live = torch.from_numpy(tiny.routes(400, 3))
    other = live.clone()
    other[300:] = given(9, rows=100)
    with pytest.raises(ReplayError, match=r"sample u0, all layers, position 300 on: the routes are of another"):
        refuse_misplaced(other, live, prompt=300, sample="u0")
    refuse_misplaced(other[:360], live[:360], prompt=300, sample="u0")  # too little to tell
    refuse_misplaced(other, live, prompt=400, sample="u0")
