from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.numerics import attention, paging
from verl_tim.numerics.attention import (
    PackedSequences,
    attention_reference,
    paged_attention,
    varlen_attention,
)
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.paging import PagedBatch, _partition

from .bits import DTYPES, close_to_double, randn, same_bits

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LENGTHS = (1, 5, 63, 64, 65, 130, 520, 1100)  # blocks and chunks, just below, at and above their borders


def _qkv(rows: int, heads=4, kv_heads=2, dim=32, dtype=torch.float32):
    return (randn(rows, h, dim, dtype=dtype, seed=i, scale=1.5) for i, h in enumerate((heads, kv_heads, kv_heads)))


def _cu(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def paged(k, v, lengths, query_lens, page_size, *, poison=True):
    """Pages in a shuffled order holding packed keys; slots nobody owns are NaN, except those of the null page."""
    counts = [-(-n // page_size) for n in lengths]
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(page_size)) + 1).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    slots = []
    for row, (n, pages) in enumerate(zip(lengths, order, strict=True)):
        table[row, : len(pages)] = pages
        at = torch.arange(n)
        slots.append(pages[at // page_size] * page_size + at % page_size)
    pages = []
    for rows in (k, v):
        page = torch.full((sum(counts) + 1, page_size, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
        page[0] = 0.0
        page.view(-1, *rows.shape[1:])[torch.cat(slots)] = rows
        pages.append(page)
    starts = _cu(lengths)[:-1].tolist()
    rows = torch.cat([torch.arange(s + n - q, s + n) for s, n, q in zip(starts, lengths, query_lens, strict=True)])
    position = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, query_lens, strict=True)])
    batch = PagedBatch(_cu(query_lens), torch.tensor(lengths), table, torch.cat(slots)[rows], position)
    return rows, pages[0], pages[1], batch


@both_dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 16), (8, 8, 64), (3, 3, 80)])
def test_equals_its_reference(heads, kv_heads, dim, dtype):
    q, k, v = _qkv(sum(LENGTHS), heads, kv_heads, dim, dtype)
    cu = _cu(LENGTHS)
    out = varlen_attention(q, k, v, cu)
    for start, stop in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        for row in {start, (start + stop) // 2, stop - 1}:
            assert same_bits(out[row], attention_reference(q[row], k[start : row + 1], v[start : row + 1]))


@both_dtypes
def test_close_to_double(dtype):
    q, k, v = _qkv(sum(LENGTHS), dtype=dtype)
    out = varlen_attention(q, k, v, _cu(LENGTHS))
    for a, b in zip(_cu(LENGTHS), _cu(LENGTHS)[1:], strict=False):
        one = [x[a:b].double().transpose(0, 1)[None] for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        close_to_double(out[a:b], want, dtype)


@both_dtypes
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
def test_paged_equals_packed(page_size, dtype):
    """Decode, prefill, and chunks cut anywhere, in one batch, for any page size; foreign slots hold NaN."""
    q, k, v = _qkv(sum(LENGTHS), dtype=dtype)
    want = varlen_attention(q, k, v, _cu(LENGTHS))
    for query_lens in ((1,) * 8, LENGTHS, (1, 2, 63, 1, 7, 100, 3, 513)):
        rows, k_pages, v_pages, batch = paged(k, v, LENGTHS, query_lens, page_size)
        padded = torch.cat([q[rows], torch.full((5, 4, 32), 3.0, dtype=dtype)])
        got = paged_attention(padded, k_pages, v_pages, batch)
        assert same_bits(got[: len(rows)], want[rows])
        assert not got[len(rows) :].any(), "padding rows are zero"


@given(st.lists(st.integers(1, 140), min_size=1, max_size=6), st.data())
@settings(max_examples=25)
def test_any_cut_gives_the_same_rows(lengths, data):
    q, k, v = _qkv(sum(lengths))
    want = varlen_attention(q, k, v, _cu(lengths))
    query_lens = [data.draw(st.integers(1, n)) for n in lengths]
    rows, k_pages, v_pages, batch = paged(k, v, lengths, query_lens, data.draw(st.integers(1, 70)))
    assert same_bits(paged_attention(q[rows], k_pages, v_pages, batch), want[rows])


def test_grouping_and_tiles_are_schedules(monkeypatch):
    q, k, v = _qkv(sum(LENGTHS))
    rows, k_pages, v_pages, batch = paged(k, v, LENGTHS, (1,) * 8, 16)
    packed, decoded = varlen_attention(q, k, v, _cu(LENGTHS)), paged_attention(q[rows], k_pages, v_pages, batch)
    for keys, worth, tile in ((1, 1, 1 << 12), (1 << 30, 1 << 30, 1 << 30), (700, 2, 1 << 16)):
        monkeypatch.setattr(paging, "_GROUP_KEYS", keys)
        monkeypatch.setattr(paging, "_WORTH_SPLITTING", worth)
        monkeypatch.setattr(paging, "_CACHED_BIAS", tile)
        monkeypatch.setattr(attention, "_TILE_ELEMENTS", tile)
        rows, k_pages, v_pages, batch = paged(k, v, LENGTHS, (1,) * 8, 16)
        assert same_bits(varlen_attention(q, k, v, _cu(LENGTHS)), packed)
        assert same_bits(paged_attention(q[rows], k_pages, v_pages, batch), decoded)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4000)), min_size=1, max_size=40))
@settings(max_examples=100)
def test_partition_covers_every_sequence_once(sizes):
    query_lens = [q for q, _ in sizes]
    contexts = [q + cached for q, cached in sizes]
    groups = _partition(query_lens, contexts)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        assert len({query_lens[i] == 1 for i in group}) == 1, "decodes are kept apart from prefills"
        assert group == sorted(group)


@both_dtypes
def test_gradients(dtype):
    lengths = (1, 70, 5, 130)
    q, k, v = _qkv(sum(lengths) + 3, dtype=dtype)  # three padding rows
    g = randn(*q.shape, dtype=dtype, seed=9)
    leaves, doubles = [t.clone().requires_grad_() for t in (q, k, v)], [t.double().requires_grad_() for t in (q, k, v)]
    varlen_attention(*leaves, _cu(lengths)).backward(g)
    pieces = []
    for a, b in zip(_cu(lengths), _cu(lengths)[1:], strict=False):
        one = [x[a:b].transpose(0, 1)[None] for x in doubles]
        pieces.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    torch.cat(pieces).backward(g[: sum(lengths)].double())
    for leaf, double in zip(leaves, doubles, strict=True):
        assert not leaf.grad[sum(lengths) :].any(), "padding rows have no gradient"
        close_to_double(leaf.grad, double.grad, dtype)


def test_gradients_are_deterministic_and_independent_of_tiles(monkeypatch):
    q, k, v = _qkv(sum(LENGTHS))
    grads = []
    for tile in (1 << 21, 1 << 21, 1 << 14):
        monkeypatch.setattr(attention, "_TILE_ELEMENTS", tile)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        varlen_attention(*leaves, PackedSequences(_cu(LENGTHS))).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(same_bits(a, b) for a, b in zip(grads[0], grads[1], strict=True))
    for a, b in zip(grads[0], grads[2], strict=True):
        close_to_double(b, a.double(), torch.float32)


def test_refuses_what_it_cannot_serve():
    q, k, v = _qkv(10)
    with pytest.raises(ContractError, match="multiple of 3 kv heads"):
        varlen_attention(q, randn(10, 3, 32), randn(10, 3, 32), torch.tensor([0, 10]))
    with pytest.raises(ContractError, match="head_dim 24"):
        varlen_attention(randn(10, 4, 24), randn(10, 2, 24), randn(10, 2, 24), torch.tensor([0, 10]))
    for cu in ([1, 10], [0, 5, 5, 10], []):
        with pytest.raises(ContractError, match="cu_seqlens"):
            varlen_attention(q, k, v, torch.tensor(cu, dtype=torch.int64))
    whole = torch.tensor([0, 10])
    for operands in ((q, k, v[:, :1]), (q, k[..., :16], v[..., :16])):
        with pytest.raises(ContractError, match="do not fit"):
            varlen_attention(*operands, whole)
    for operands, cu in (((q, k, v), [0, 5, 15]), ((q, k[:5], v[:5]), [0, 5])):
        with pytest.raises(ContractError, match="do not fit 10 rows of q"):
            varlen_attention(*operands, torch.tensor(cu))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ContractError, match=f"k is {dtype}"):
            varlen_attention(q, k.to(dtype), v, whole)
        with pytest.raises(ContractError, match=r"all must be torch\.float32 or torch\.bfloat16"):
            varlen_attention(q.to(dtype), k.to(dtype), v.to(dtype), whole)
    with pytest.raises(ContractError, match="'chunk32' is unknown; use chunk64 or fa3"):
        varlen_attention(q, k, v, whole, "chunk32")
    with pytest.raises(ContractError, match="fa3 needs a GPU"):
        varlen_attention(q, k, v, whole, "fa3")
    rows, k_pages, v_pages, batch = paged(k, v, [10], [10], 4)
    with pytest.raises(ContractError, match="fa3 needs a GPU"):
        paged_attention(q[rows], k_pages, v_pages, batch, "fa3")
    with pytest.raises(ContractError, match="batch of 10 rows does not fit 3"):
        paged_attention(q[:3], k_pages, v_pages, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_S1": [0, 1]}, "all three must agree"),
        ({"query_start_S1": [1, 2, 4]}, "must begin at 0"),
        ({"query_start_S1": [0, 0, 3]}, "at least one row"),
        ({"context_len_S": [1, 1]}, "cannot be below"),
        ({"slot_T": [0, 0]}, "must cover"),
        ({"block_table_SM": [[1], [2]], "context_len_S": [20, 2]}, "too few for a context of 20"),
    ],
)
def test_paged_batch_refuses_fields_that_do_not_fit(change, message):
    fields = {
        "query_start_S1": [0, 1, 3],
        "context_len_S": [4, 2],
        "block_table_SM": [[1, 0], [2, 0]],
        "slot_T": [4, 8, 9],
        "position_T": [3, 0, 1],
    }
    with pytest.raises(ContractError, match=message):
        PagedBatch(**{name: torch.tensor(value) for name, value in {**fields, **change}.items()}).groups(4)
