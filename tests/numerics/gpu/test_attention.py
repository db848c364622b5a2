"""Attention kernels in Triton's interpreter, against float64. Bits are checked on a GPU (`test_attention_bits`)."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.gpu.attention_cases import Packed, reference
from verl_tim.numerics.contract import CHUNK_KEYS, ContractError, meta_stands_for
from verl_tim.numerics.gpu import attention, processor
from verl_tim.numerics.gpu.attention_decode import scratch_elements
from verl_tim.numerics.gpu.attention_plan import DecodePlan, PackedPlan, PagedPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

CASES = [([3, 70, CHUNK_KEYS + 88], 4, 2, 16), ([1, 65], 3, 3, 80), ([130], 8, 1, 96)]


@pytest.mark.parametrize(("lengths", "heads", "num_kv_heads", "dim"), CASES)
def test_packed(lengths, heads, num_kv_heads, dim):
    case = Packed(lengths, heads, num_kv_heads, dim)
    out, lse = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    expected, sums = reference(case.q, case.k, case.v, lengths)
    torch.testing.assert_close(out[: case.rows].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, : case.rows].double(), sums, atol=5e-3, rtol=0)
    assert out[case.rows :].count_nonzero() == 0
    planned, _ = attention.varlen_forward(
        case.q, case.k, case.v, case.cu_seqlens, plan=PackedPlan(lengths, device="cpu")
    )
    assert torch.equal(planned, out)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_paged_mixture(page_size):
    lengths, query_lens = [3, 70, CHUNK_KEYS + 88, 66], [1, 7, 1, 66]
    case = Packed(lengths, 4, 2, 16)
    rows, query_start, context = case.last_rows(query_lens)
    k_pages, v_pages, table = case.paged(page_size)
    expected, _ = reference(case.q, case.k, case.v, lengths)
    common = (case.q[rows], k_pages, v_pages, query_start, context, table, max(query_lens), max(lengths))
    out = attention.paged_forward(*common)
    torch.testing.assert_close(out.double(), expected[rows], atol=2e-2, rtol=2e-2)
    plan = PagedPlan(
        query_start,
        context,
        num_kv_heads=2,
        num_rows=len(rows),
        max_query_len=max(query_lens),
        query_lens=query_lens,
        context_lens=lengths,
    )
    planned = attention.paged_forward(*common, out=torch.full_like(out, 9.0), plan=plan)
    assert torch.equal(planned, out)


@pytest.mark.parametrize("known", [True, False], ids=["lengths on the host", "on the device"])
@pytest.mark.parametrize("query_lens", [[1, 7, 1, 66], [1, 1, 1, 1]])
def test_decodes_are_tiles_where_their_own_schedule_is_forbidden(query_lens, known, monkeypatch):
    monkeypatch.setattr(attention, "_forbidden", set())
    lengths = [3, 70, CHUNK_KEYS + 88, 66]
    case = Packed(lengths, 4, 2, 16, padding=0)
    rows, query_start, context = case.last_rows(query_lens)
    k_pages, v_pages, table = case.paged(16)
    arguments = (case.q[rows], k_pages, v_pages, query_start, context, table, max(query_lens), max(lengths))
    expected, _ = reference(case.q, case.k, case.v, lengths)
    assert attention.decode_schedule(*arguments[:3]) == attention.SPLIT
    attention.forbid(attention.SPLIT)
    assert attention.decode_schedule(*arguments[:3]) == attention.REFERENCE
    monkeypatch.setattr(attention, "decode", lambda *_: pytest.fail("the forbidden schedule ran"))
    plan = None
    if known:
        plan = PagedPlan(
            query_start, context, num_kv_heads=2, num_rows=len(rows), max_query_len=max(query_lens),
            query_lens=query_lens, context_lens=lengths, split_decodes=False,
        )  # fmt: skip
    out = attention.paged_forward(*arguments, plan=plan)
    torch.testing.assert_close(out.double(), expected[rows], atol=2e-2, rtol=2e-2)


def test_a_call_asks_nothing_of_the_device(monkeypatch):
    """What a device is does not change: it is asked once."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    q, k = (torch.empty(8, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    processor.is_hopper.cache_clear()
    try:
        with meta_stands_for(torch.device("cuda", 0)):
            for _ in range(3):
                assert attention.prefill_schedule(q, k, k, paged=False) == attention.HOPPER
    finally:
        processor.is_hopper.cache_clear()
    assert len(asked) == 1


def test_the_hopper_schedule_can_be_forbidden_and_no_other_takes_its_name(monkeypatch):
    monkeypatch.setattr(attention, "_forbidden", set())
    monkeypatch.setattr(attention.attention_hopper, "supports", lambda *_, **__: True)
    case = Packed([5], 2, 1, 64)
    assert attention.prefill_schedule(case.q, case.k, case.v, paged=False) == attention.HOPPER
    attention.forbid(attention.HOPPER)
    assert attention.forbidden() == {attention.HOPPER}
    assert attention.prefill_schedule(case.q, case.k, case.v, paged=False) == attention.REFERENCE
    out, _ = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    torch.testing.assert_close(out[:5].double(), reference(case.q, case.k, case.v, [5])[0], atol=2e-2, rtol=2e-2)
    with pytest.raises(ContractError, match="no schedule 'prefill:triton' that can be forbidden"):
        attention.forbid(attention.REFERENCE)


@pytest.mark.parametrize("num_slots", [2048, 3])
def test_decode_split_or_not(num_slots, monkeypatch):
    lengths = [2 * CHUNK_KEYS + 5, 1, CHUNK_KEYS, CHUNK_KEYS + 1]
    case = Packed(lengths, 2, 1, 16, padding=0)
    rows, query_start, context = case.last_rows([1] * 4)
    k_pages, v_pages, table = case.paged(16)
    plan = PagedPlan(query_start, context, num_kv_heads=1, num_rows=4, max_query_len=1)
    plan.decode = DecodePlan(4, 1, "cpu", num_slots=num_slots)
    plan.decode.refresh(query_start, context)
    items = plan.decode.items_W8[plan.decode.items_W8[:, 2] > 0]
    split = items[items[:, 3] >= 0]
    assert split[:, 0].unique().tolist() == ([0, 3] if num_slots == 2048 else [0])
    out = attention.paged_forward(
        case.q[rows], k_pages, v_pages, query_start, context, table, 1, max(lengths), plan=plan
    )
    expected, _ = reference(case.q, case.k, case.v, lengths)
    torch.testing.assert_close(out.double(), expected[rows], atol=2e-2, rtol=2e-2)
    assert plan.decode.arrived.count_nonzero() == 0  # ready for the next layer


@pytest.mark.parametrize(("lengths", "heads", "num_kv_heads", "dim"), CASES)
def test_gradients(lengths, heads, num_kv_heads, dim):
    case = Packed(lengths, heads, num_kv_heads, dim, sharpness=1.0)
    out, lse = attention.varlen_forward(case.q, case.k, case.v, case.cu_seqlens)
    grad = torch.randn_like(out)
    grads = attention.varlen_backward(grad, case.q, case.k, case.v, out, lse, case.cu_seqlens)
    inputs = [x[: case.rows].double().requires_grad_() for x in (case.q, case.k, case.v)]
    reference(*inputs, lengths)[0].backward(grad[: case.rows].double())
    for mine, x in zip(grads, inputs, strict=True):
        assert (mine[: case.rows].double() - x.grad).norm() / x.grad.norm() < 5e-3
        assert mine[case.rows :].count_nonzero() == 0


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_cover_every_row_once(rows):
    lengths = [5, 200, 1, 64, 65]
    cu_seqlens = torch.tensor([0, 5, 205, 206, 270, 335], dtype=torch.int32)
    known = PackedPlan(lengths, device="cpu")
    unknown = PackedPlan(device="cpu", cu_seqlens_S1=cu_seqlens, num_rows=400)
    assert known.num_rows == 335
    assert unknown.num_rows is None
    for tiles in (known.query_tiles(rows), unknown.query_tiles(rows), known.key_tiles(rows)):
        seen = [r for first, live, _, _ in tiles.tolist() for r in range(first, first + live)]
        assert sorted(seen) == list(range(335))
    tiles = known.query_tiles(rows)
    keys = (tiles[:, 2] + tiles[:, 1]).tolist()
    assert keys == sorted(keys, reverse=True)
    live = unknown.query_tiles(rows)
    assert torch.equal(live[live[:, 1] > 0], tiles)


@pytest.mark.parametrize("contexts", [[1], [5000, 3, 512, 513, 1025], [20_000] * 3 + [1] * 61, [700] * 200])
def test_decode_items_cover_every_chunk_once(contexts):
    start = torch.arange(len(contexts) + 1, dtype=torch.int32)
    plan = DecodePlan(len(contexts), 2, "cpu")
    plan.refresh(start, torch.tensor(contexts, dtype=torch.int32))
    items = [i for i in plan.items_W8.tolist() if i[2] > 0]
    seen = sorted((sequence, c) for sequence, first, n, *_ in items for c in range(first, first + n))
    assert seen == [(s, c) for s, context in enumerate(contexts) for c in range(-(-context // CHUNK_KEYS))]
    slots = [slot + i for _, _, n, slot, *_ in items if slot >= 0 for i in range(n)]
    assert len(set(slots)) == len(slots)
    assert not slots or max(slots) < plan.num_slots
    for sequence, *_rest, context, row, num_items, _unused in items:
        assert (context, row) == (contexts[sequence], sequence)
        assert num_items == sum(i[0] == sequence for i in items)


def test_refusals():
    case = Packed([4], 4, 2, 16)
    with pytest.raises(ContractError, match=r"bfloat16 only"):
        attention.varlen_forward(case.q.float(), case.k, case.v, case.cu_seqlens)
    with pytest.raises(ContractError, match="not a multiple of 2 kv heads"):
        attention.varlen_forward(case.q[:, :3], case.k, case.v, case.cu_seqlens)
    wrong = [torch.zeros(4, 2, 20, dtype=torch.bfloat16)] * 3
    with pytest.raises(ContractError, match="head_dim 20"):
        attention.varlen_forward(*wrong, case.cu_seqlens)
    with pytest.raises(ContractError, match="at least one row"):
        PackedPlan([3, 0], device="cpu")
    rows, start, context = case.last_rows([1])
    pages = case.paged(2)
    with pytest.raises(ContractError, match="too few for max_context_len=5"):
        attention.paged_forward(case.q[rows], *pages[:2], start, context, pages[2], 1, 5)
    with pytest.raises(ContractError, match=f"{scratch_elements(2048, 4, 16)} are needed"):
        attention.paged_forward(case.q[rows], *pages[:2], start, context, pages[2], 1, 4, scratch=torch.zeros(8))
