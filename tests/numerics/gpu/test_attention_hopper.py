"""The Hopper kernels in the Gluon interpreter: barriers, masks and indices, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.gpu.attention_cases import Packed, reference
from tests.numerics.gpu.gluon_interpreter import interpreted
from verl_tim.numerics.contract import CHUNK_KEYS
from verl_tim.numerics.gpu import (
    attention_backward_hopper,
    attention_backward_hopper_keys,
    attention_backward_hopper_queries,
    attention_hopper,
)
from verl_tim.numerics.gpu.attention_plan import PackedPlan, PagedPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

CASES = [([3, 70, CHUNK_KEYS + 88, 130], 2, 1), ([1, 65, 128, 200], 3, 3)]


@pytest.mark.parametrize(("lengths", "heads", "num_kv_heads"), CASES)
@pytest.mark.parametrize("padding", [0, 3])
def test_packed(lengths, heads, num_kv_heads, padding):
    case = Packed(lengths, heads, num_kv_heads, 64, padding=padding)
    out = torch.zeros(case.q.shape, dtype=torch.bfloat16)
    lse = torch.zeros(heads, case.q.shape[0])
    tiles = PackedPlan(lengths, device="cpu").query_tiles(attention_hopper.ROWS)
    tiles = torch.cat([tiles, torch.zeros(2, 4, dtype=torch.int32)])  # empty ones, as a plan built on the device has
    with interpreted(attention_hopper):
        attention_hopper.prefill(case.q, case.k, case.v, out, lse, tiles, None)
    expected, sums = reference(case.q, case.k, case.v, lengths)
    torch.testing.assert_close(out[: case.rows].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, : case.rows].double(), sums, atol=5e-3, rtol=0)
    assert out[case.rows :].count_nonzero() == 0


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_chunked_prefill_over_pages(page_size):
    lengths, query_lens = [3, 70, CHUNK_KEYS + 88, 300], [2, 7, 190, 131]
    case = Packed(lengths, 2, 1, 64, padding=0)
    rows, query_start, context = case.last_rows(query_lens)
    k_pages, v_pages, table = case.paged(page_size)
    plan = PagedPlan(
        query_start, context, num_kv_heads=1, num_rows=len(rows), max_query_len=190, query_lens=query_lens,
        context_lens=lengths,
    )  # fmt: skip
    out = torch.zeros(len(rows), 2, 64, dtype=torch.bfloat16)
    with interpreted(attention_hopper):
        tiles = plan.query_tiles(attention_hopper.ROWS)
        attention_hopper.prefill(case.q[rows], k_pages, v_pages, out, None, tiles, table)
    expected, _ = reference(case.q, case.k, case.v, lengths)
    torch.testing.assert_close(out.double(), expected[rows], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("lengths", "heads", "num_kv_heads"), CASES)
@pytest.mark.parametrize("padding", [0, 3])
def test_gradients(lengths, heads, num_kv_heads, padding):
    case = Packed(lengths, heads, num_kv_heads, 64, padding=padding, sharpness=1.0)
    inputs = [x[: case.rows].double().requires_grad_() for x in (case.q, case.k, case.v)]
    expected, sums = reference(*inputs, lengths)
    out, grad = torch.zeros(case.q.shape, dtype=torch.bfloat16), torch.randn(case.q.shape).to(torch.bfloat16)
    lse = torch.zeros(heads, case.q.shape[0])
    out[: case.rows], lse[:, : case.rows] = expected.detach().to(torch.bfloat16), sums.detach().float()
    expected.backward(grad[: case.rows].double())
    grads = tuple(torch.zeros(x.shape, dtype=torch.bfloat16) for x in (case.q, case.k, case.v))
    plan = PackedPlan(lengths, device="cpu")
    kernels = attention_backward_hopper_keys, attention_backward_hopper_queries
    with interpreted(attention_hopper, attention_backward_hopper, *kernels):
        attention_backward_hopper.backward(grad, case.q, case.k, case.v, out, lse, plan, grads)
    for mine, x in zip(grads, inputs, strict=True):
        assert (mine[: case.rows].double() - x.grad).norm() / x.grad.norm() < 5e-3
        assert mine[case.rows :].count_nonzero() == 0
