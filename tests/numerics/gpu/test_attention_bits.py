"""On a GPU: every schedule of a row gives the same bits; gradients are right and repeat exactly."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.gpu.attention_cases import Packed, reference
from verl_tim.numerics import collection
from verl_tim.numerics.gpu import attention
from verl_tim.numerics.gpu.attention_decode import decode, scratch_elements
from verl_tim.numerics.gpu.attention_plan import STATE_SLOTS, DecodePlan, PackedPlan, PagedPlan

pytestmark = pytest.mark.gpu

LENGTHS = [131, 258, 514, 2049, 700, 64, 1, 1100]
SHAPES = [(16, 8, 128), (14, 2, 64), (32, 2, 128), (4, 4, 80), (8, 1, 96), (8, 4, 256)]
BORDERS = [0, 1, 62, 63, 64, 65, 127, 128, 255, 256, 510, 511, 512, 513, 1023, 1024, 1536, 2046, 2047, 2048]


def _differing(a, b):
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: "x".join(map(str, s)))
def trained(request):
    """A packed case and the trainer's (out, lse) for it."""
    heads, num_kv_heads, dim = request.param
    case = Packed(LENGTHS, heads, num_kv_heads, dim, device="cuda")
    plan = PackedPlan(LENGTHS, device="cuda")
    return case, *attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens, plan=plan)


def test_value(trained):
    case, out, lse = trained
    expected, sums = reference(case.q, case.k, case.v, case.lengths)
    torch.testing.assert_close(out[: case.rows].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, : case.rows].double(), sums, atol=5e-3, rtol=0)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_tile_and_warps_are_free(trained, rows):
    from verl_tim.numerics.gpu import attention_prefill

    case, out, lse = trained
    if case.dim == 256 and rows == 128:
        pytest.skip("does not fit in shared memory")
    tiles = PackedPlan(LENGTHS, device="cuda").query_tiles(rows)
    for warps in (4, 8):
        other, sums = torch.zeros_like(out), torch.zeros_like(lse)
        options = {"ROWS": rows, "STAGES": 2, "num_warps": warps}
        attention_prefill.prefill(case.q, case.k, case.v, other, sums, tiles, None, options)
        assert _differing(other, out) == 0
        assert torch.equal(sums, lse)


def test_alone_equals_packed(trained):
    case, out, _ = trained
    for s in (1, 4):
        part = slice(case.starts[s], case.starts[s + 1])
        cu_seqlens = torch.tensor([0, LENGTHS[s]], dtype=torch.int32, device="cuda")
        alone, _ = attention.varlen_forward(case.q[part], case.k[part], case.v[part], cu_seqlens)
        assert _differing(alone, out[part]) == 0


@pytest.mark.parametrize("page_size", [5, 16, 64, 128])
def test_chunked_prefill_and_mixtures(trained, page_size):
    case, out, _ = trained
    k_pages, v_pages, table = case.paged(page_size)
    for query_lens in (LENGTHS, [1, 20, 100, 777, 1, 33, 1, 1], [2, 1, 1, 1, 1, 1, 1, 513]):
        rows, start, context = case.last_rows(query_lens)
        longest = max(query_lens)
        got = attention.paged_forward(case.q[rows], k_pages, v_pages, start, context, table, longest, max(LENGTHS))
        assert _differing(got, out[rows]) == 0
        plan = PagedPlan(
            start,
            context,
            num_kv_heads=case.num_kv_heads,
            num_rows=len(rows),
            max_query_len=longest,
            query_lens=query_lens,
            context_lens=LENGTHS,
        )
        got = attention.paged_forward(
            case.q[rows], k_pages, v_pages, start, context, table, longest, max(LENGTHS), plan=plan
        )
        assert _differing(got, out[rows]) == 0


@pytest.mark.parametrize("page_size", [5, 16, 128])
@pytest.mark.parametrize("splitting", [1, 4096])
@pytest.mark.parametrize("bound", [1024, 1 << 30])
def test_decode_equals_prefill(trained, page_size, splitting, bound):
    """Positions 0..130 of one sequence and the borders of another, as decodes; walked by one program or by many, in
    the shapes of few sequences (which the bound decides) and, with two key-value heads or more, of many."""
    case, out, _ = trained
    k_pages, v_pages, table = case.paged(page_size)
    for s, positions in ((0, list(range(131))), (3, BORDERS)):
        count = len(positions)
        rows = case.starts[s] + torch.tensor(positions, device="cuda")
        context = torch.tensor(positions, dtype=torch.int32, device="cuda") + 1
        start = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        plan = DecodePlan(count, case.num_kv_heads, "cuda", target_items=splitting, max_context=bound)
        plan.refresh(start, context)
        scratch = torch.empty(scratch_elements(STATE_SLOTS, case.heads, case.dim), device="cuda")
        pages = table[s].expand(count, -1).contiguous()
        for _layer in range(2):  # the counters of the first are ready for the second
            got = torch.zeros(count, case.heads, case.dim, dtype=torch.bfloat16, device="cuda")
            decode(case.q[rows], k_pages, v_pages, pages, got, plan, scratch)
            assert _differing(got, out[rows]) == 0
        order = torch.randperm(count, device="cuda")[: count // 2]  # another batch, another order
        got = attention.paged_forward(
            case.q[rows[order]], k_pages, v_pages, start[: len(order) + 1], context[order], pages[order], 1, 2049
        )
        assert _differing(got, out[rows[order]]) == 0


@pytest.mark.parametrize("names", [("prefill:hopper",), ("decode:split",), ("prefill:hopper", "decode:split")])
def test_what_stands_in_for_a_forbidden_schedule_has_its_bits(trained, names, monkeypatch):
    case, out, lse = trained
    monkeypatch.setattr(attention, "_forbidden", set(names))
    again, sums = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    assert _differing(again, out) == 0
    assert torch.equal(sums, lse)
    for page_size in (16, 64):
        k_pages, v_pages, table = case.paged(page_size)
        for query_lens in ([1] * len(LENGTHS), [1, 20, 100, 777, 1, 33, 1, 1]):
            rows, start, context = case.last_rows(query_lens)
            arguments = (case.q[rows], k_pages, v_pages, start, context, table, max(query_lens), max(LENGTHS))
            assert _differing(attention.paged_forward(*arguments), out[rows]) == 0


@pytest.mark.parametrize("names", [(), ("decode:split",)], ids=["split", "tiles"])
def test_cuda_graph(trained, names, monkeypatch):
    """Captured once with an upper bound on the context, replayed for other lengths."""
    case, out, _ = trained
    monkeypatch.setattr(attention, "_forbidden", set(names))
    k_pages, v_pages, table = case.paged(16)
    rows, start, context = case.last_rows([1] * len(LENGTHS))
    q, context = case.q[rows].clone(), context.clone()
    attention.paged_forward(q, k_pages, v_pages, start, context, table, 1, max(LENGTHS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with collection.paused(), torch.cuda.graph(graph):
        got = attention.paged_forward(q, k_pages, v_pages, start, context, table, 1, max(LENGTHS))
    for back in (1, 37):
        lengths = [max(1, n - back) for n in LENGTHS]
        rows = torch.tensor([first + n - 1 for first, n in zip(case.starts, lengths, strict=False)], device="cuda")
        q.copy_(case.q[rows])
        context.copy_(torch.tensor(lengths))
        graph.replay()
        assert _differing(got, out[rows]) == 0


def test_long_context():
    case = Packed([16_400], 4, 2, 128, device="cuda", padding=0)
    out, _ = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    k_pages, v_pages, table = case.paged(16)
    positions = torch.tensor([2559, 2560, 8191, 16_383, 16_384, 16_399], device="cuda")
    start = torch.arange(7, dtype=torch.int32, device="cuda")
    got = attention.paged_forward(
        case.q[positions], k_pages, v_pages, start, (positions + 1).int(), table.expand(6, -1).contiguous(), 1, 16_400
    )
    assert _differing(got, out[positions]) == 0


def test_gradients(trained):
    case, out, lse = trained
    plan = PackedPlan(LENGTHS, device="cuda")
    grad = torch.randn(case.q.shape, device="cuda").to(torch.bfloat16)
    arguments = (grad, case.q, case.k, case.v, out, lse, case.cu_seqlens)
    grads = attention.varlen_backward(*arguments, plan=plan)
    again = attention.varlen_backward(*arguments)
    inputs = [x[: case.rows].double().requires_grad_() for x in (case.q, case.k, case.v)]
    reference(*inputs, LENGTHS)[0].backward(grad[: case.rows].double())
    for mine, repeated, x in zip(grads, again, inputs, strict=True):
        assert torch.equal(mine[: case.rows], repeated[: case.rows])
        assert (mine[: case.rows].double() - x.grad).norm() / x.grad.norm() < 8e-3


def test_both_gradient_schedules_agree():
    from verl_tim.numerics.gpu import attention_backward, attention_backward_hopper, attention_hopper

    case = Packed(LENGTHS, 16, 8, 128, device="cuda")
    if not attention_hopper.supports(case.q, case.k, case.v, paged=False):
        pytest.skip("not a Hopper GPU")
    plan = PackedPlan(LENGTHS, device="cuda")
    out, lse = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    grad = torch.randn(case.q.shape, device="cuda").to(torch.bfloat16)
    results = []
    for schedule in (attention_backward.backward, attention_backward_hopper.backward):
        grads = tuple(torch.zeros_like(x) for x in (case.q, case.k, case.v))
        schedule(grad, case.q, case.k, case.v, out, lse, plan, grads)
        results.append(grads)
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 2e-3
