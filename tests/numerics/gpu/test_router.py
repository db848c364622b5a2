from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import router
from verl_tim.numerics.moe import route_logits

from ..bits import same_bits
from .devices import DEVICE, close, on_gpu, values


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(9, 6, 2), (3, 128, 8), (5, 60, 4), (1, 4, 1)])
def test_routes_like_the_reference(rows, experts, top_k, normalise):
    logits = values(rows, experts, scale=2.0, dtype=torch.float32)
    expert, weight = router.route(logits, top_k, normalise)
    want = route_logits(logits, top_k, normalise)
    assert torch.equal(expert.long(), want.expert_TK)
    assert torch.allclose(weight, want.weight_TK, rtol=1e-5)


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[1, 5] = logits[1, 3] = 2.0
    expert, _ = router.route(logits, 3, True)
    assert expert.tolist() == [[0, 1, 2], [3, 5, 0], [0, 1, 2]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("experts", [6, 8])
@pytest.mark.parametrize("broken", ["nan", "one nan", "inf", "-inf"])
def test_a_row_of_broken_logits_stays_within_the_experts(broken, experts, normalise):
    logits = values(9, experts, scale=2.0, dtype=torch.float32)
    want_expert, want_weight = router.route(logits, 3, normalise)
    logits[4, 2 if broken == "one nan" else slice(None)] = float(broken.removeprefix("one "))
    expert, weight = router.route(logits, 3, normalise)
    assert expert[4].tolist() == [0, 1, 2]
    assert bool(weight[4].isnan().all())
    assert bool(router.weigh(logits, expert, normalise)[4].isnan().all())
    others = torch.arange(9, device=DEVICE) != 4
    assert torch.equal(expert[others], want_expert[others])
    assert same_bits(weight[others], want_weight[others])


@pytest.mark.parametrize("normalise", [True, False])
def test_gradients(normalise):
    x, weight = values(7, 32), values(10, 32, seed=1, scale=0.3)
    grad = values(7, 3, seed=2, dtype=torch.float32)
    expert, _ = router.router(x, weight, 3, normalise)
    got = router.router_backward(grad, x, weight, expert, normalise)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    chosen = torch.softmax(leaves[0] @ leaves[1].t(), -1).gather(1, expert.long())
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    chosen.backward(grad.double())
    close(got[0], leaves[0].grad, 2e-2)
    close(got[1], leaves[1].grad, 2e-2)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(9, 6, 2), (3, 128, 8), (1, 4, 1)])
def test_given_experts_have_the_weights_of_chosen_ones(rows, experts, top_k, normalise):
    logits = values(rows, experts, scale=2.0, dtype=torch.float32)
    expert, weight = router.route(logits, top_k, normalise)
    kept = expert.clone()
    assert same_bits(router.weigh(logits, expert, normalise), weight)
    assert torch.equal(expert, kept)
    generator = torch.Generator().manual_seed(3)
    given = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    want = route_logits(logits.cpu(), top_k, normalise, lambda _: given)
    got = router.weigh(logits, given.to(DEVICE, torch.int32), normalise)
    assert torch.allclose(got.cpu(), want.weight_TK, rtol=1e-5)


def test_a_choice_from_outside_takes_the_place_of_its_own():
    x, weight = values(7, 32), values(10, 32, seed=1, scale=0.3)
    own, _ = router.router(x, weight, 3, True)
    asked = []

    def choose(expert_TK):
        asked.append(expert_TK.clone())
        return (expert_TK.long() + 1) % 10

    expert, weights = router.router(x, weight, 3, True, choose)
    assert torch.equal(asked[0], own)
    assert expert.dtype == torch.int32
    assert torch.equal(expert, (own + 1) % 10)
    assert same_bits(weights, router.weigh(router.router_logits(x, weight), expert, True))
    same = router.router(x, weight, 3, True, lambda _: None)
    assert same_bits(same[1], router.router(x, weight, 3, True)[1])


@pytest.mark.parametrize("shape", [(7, 2), (7, 4), (6, 3)])
def test_given_experts_have_the_shape_of_chosen_ones(shape):
    x, weight = values(7, 32), values(10, 32, seed=1, scale=0.3)
    with pytest.raises(ContractError, match="given experts"):
        router.router(x, weight, 3, True, lambda _: torch.zeros(shape, dtype=torch.int64, device=DEVICE))


def test_gradients_of_given_experts():
    """Through the router's own function, as the trainer calls it."""
    from verl_tim.numerics.moe import _Router

    x, weight = values(7, 32).requires_grad_(), values(10, 32, seed=1, scale=0.3).requires_grad_()
    grad = values(7, 3, seed=2, dtype=torch.float32)
    given = ((torch.arange(7)[:, None] + torch.tensor([0, 4, 7])) % 10).to(DEVICE)
    expert, weights = _Router.apply(x, weight, 3, True, lambda _: given)
    assert torch.equal(expert.long(), given)
    weights.backward(grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    chosen = torch.softmax(leaves[0] @ leaves[1].t(), -1).gather(1, given)
    (chosen / chosen.sum(-1, keepdim=True)).backward(grad.double())
    close(x.grad, leaves[0].grad, 2e-2)
    close(weight.grad, leaves[1].grad, 2e-2)


def test_refuses_bad_input():
    with pytest.raises(ContractError, match="given experts"):
        router.weigh(torch.zeros(2, 8, device=DEVICE), torch.zeros(3, 2, dtype=torch.int32, device=DEVICE), True)
    with pytest.raises(ContractError, match="top_k=9"):
        router.route(torch.zeros(2, 8, device=DEVICE), 9, True)
    with pytest.raises(ContractError, match="must be float32"):
        router.route(values(2, 8), 2, True)


@on_gpu
@pytest.mark.parametrize("experts", [8, 60, 128, 256])
def test_a_row_does_not_depend_on_its_batch(experts):
    logits = values(1000, experts, scale=2.0, dtype=torch.float32)
    logits[::3] = (logits[::3] * 4).round() / 4  # ties
    expert, weight = router.route(logits, 4, True)
    want = route_logits(logits.cpu(), 4, True)
    for row in (0, 3, 500, 999):
        alone = router.route(logits[row : row + 1].contiguous(), 4, True)
        assert same_bits(alone[0], expert[row : row + 1])
        assert same_bits(alone[1], weight[row : row + 1])
    # Another exp may break a tie between probabilities; compare the weights, which then still agree.
    assert torch.allclose(weight.cpu(), want.weight_TK, rtol=1e-5)
    assert (expert.cpu().long() != want.expert_TK).double().mean() < 0.01


@on_gpu
@pytest.mark.parametrize(("experts", "hidden"), [(128, 2048), (60, 2048), (8, 4096)])
def test_routes_from_hidden_states_do_not_depend_on_the_batch(experts, hidden):
    x, weight = values(700, hidden), values(experts, hidden, seed=1, scale=0.05)
    expert, weights = router.router(x, weight, 4, True)
    for rows in (1, 2, 8, 33, 64, 65, 300):
        few = router.router(x[:rows], weight, 4, True)
        assert same_bits(few[0], expert[:rows]), rows
        assert same_bits(few[1], weights[:rows]), rows
