from __future__ import annotations

import pytest
import torch

from verl_tim.numerics import collection
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import dispatch as dispatch_module
from verl_tim.numerics.gpu.dispatch import COUNTED_PAIRS, _sorted, dispatch, lay_out_tiles

from .devices import DEVICE, on_gpu, values

LOADS = ("even", "one", "half", "zipf")


def routes(tokens: int, experts: int, top_k: int, load: str = "even") -> torch.Tensor:
    """int32 [T, K], distinct experts per token: even, or `one` (all choose the same), or `half` of the experts only, or
    `zipf` (the n-th expert is wanted as often as n ** -2: a few are full, most hold little, some nothing)."""
    if load == "one":
        return torch.arange(top_k, dtype=torch.int32, device=DEVICE).repeat(tokens, 1)
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts // 2 if load == "half" else experts, generator=generator)
    if load == "zipf":  # a draw without replacement: argsort of waiting times
        scores = -torch.log(scores) * torch.arange(1, experts + 1) ** 2.0
    return scores.argsort(1)[:, :top_k].int().contiguous().to(DEVICE)


def check(plan, expert_TK, experts: int) -> None:
    flat = expert_TK.flatten().long()
    order = flat.sort(stable=True)[1]
    assert torch.equal(plan.pair_R.long(), order)
    assert torch.equal(plan.end_E.long(), torch.bincount(flat, minlength=experts).cumsum(0))
    pairs = torch.arange(flat.numel(), device=DEVICE)
    assert torch.equal(plan.pair_R[plan.row_TK.flatten().long()].long(), pairs)
    if plan.tiles is None:
        return
    covered = []
    ends = plan.end_E.tolist()
    for expert, row in zip(plan.tiles.expert_M.tolist(), plan.tiles.row_M.tolist(), strict=True):
        if expert >= 0:
            stop = min(row + plan.tiles.block, ends[expert])
            assert stop > row >= (ends[expert - 1] if expert else 0)
            covered += range(row, stop)
    assert covered == list(range(flat.numel()))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 6, 2), (9, 6, 3), (40, 8, 4), (3, 128, 8)])
def test_pairs_are_sorted_by_expert(tokens, experts, top_k, load):
    expert_TK = routes(tokens, experts, top_k, load)
    check(dispatch(expert_TK, experts), expert_TK, experts)
    check(dispatch(expert_TK, experts, block=16), expert_TK, experts)
    check(_sorted(expert_TK, experts, 16), expert_TK, experts)


def test_many_pairs_are_compared_in_chunks(monkeypatch):
    monkeypatch.setattr(dispatch_module, "_CHUNK", 128)
    expert_TK = routes(50, 8, 3)
    check(dispatch(expert_TK, 8, block=16), expert_TK, 8)


def test_gather_copies_each_tokens_row():
    expert_TK, x = routes(5, 6, 2), values(5, 8)
    plan = dispatch(expert_TK, 6)
    assert torch.equal(plan.gather(x)[plan.row_TK.long()], x[:, None].expand(-1, 2, -1))


def test_refuses_int64():
    with pytest.raises(ContractError, match="must be int32"):
        dispatch(routes(2, 6, 2).long(), 6)


@on_gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tokens", [1, 7, 64, COUNTED_PAIRS // 8, COUNTED_PAIRS // 8 + 1, 3000])
def test_sizes_of_the_30b(tokens, load):
    expert_TK = routes(tokens, 128, 8, load)
    for block in (16, 64):
        plan = dispatch(expert_TK, 128, block=block)
        check(plan, expert_TK, 128)
        tiles = lay_out_tiles(plan.end_E, plan.num_rows, block)
        assert torch.equal(tiles.expert_M, plan.tiles.expert_M)


@on_gpu
def test_a_graph_follows_its_input():
    expert_TK = routes(32, 128, 8)
    static = expert_TK.clone()
    dispatch(static, 128, block=16)
    graph = torch.cuda.CUDAGraph()
    with collection.paused(), torch.cuda.graph(graph):
        plan = dispatch(static, 128, block=16)
    for load in ("one", "half", "even"):
        static.copy_(routes(32, 128, 8, load))
        graph.replay()
        check(plan, static, 128)
