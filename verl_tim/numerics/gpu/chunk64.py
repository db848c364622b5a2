"""Attention contract ``chunk64`` for the packed rows and paged batches of `numerics.attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_tim.numerics.gpu.attention import SPLIT, forbidden, paged_forward, varlen_backward, varlen_forward
from verl_tim.numerics.gpu.attention_plan import PackedPlan, PagedPlan

if TYPE_CHECKING:
    from verl_tim.numerics.attention import PackedSequences
    from verl_tim.numerics.paging import DecodeBatch, PagedBatch


def _packed_plan(packed: PackedSequences) -> PackedPlan:
    if packed.gpu_plan is None:
        packed.gpu_plan = PackedPlan(packed.lengths, device=packed.cu_seqlens.device)
    return packed.gpu_plan


def paged(q_THD: Tensor, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor, batch: PagedBatch | DecodeBatch) -> Tensor:
    """Arguments and result as `numerics.paged_attention`."""
    layout = batch.gpu
    assert layout is not None, "a batch on a GPU has a layout there"
    if layout.plan is None:
        layout.plan = PagedPlan(
            layout.query_start_S1, layout.context_len_S, num_kv_heads=k_pages_PSHD.shape[2], num_rows=q_THD.shape[0],
            max_query_len=batch.max_query, max_context_len=batch.max_context,
            query_lens=layout.query_lens, context_lens=layout.context_lens, split_decodes=SPLIT not in forbidden(),
        )  # fmt: skip
    # Rows of no sequence must be zero; where there are none, nothing needs to be filled.
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if batch.num_rows == len(q_THD) else None
    return paged_forward(
        q_THD, k_pages_PSHD, v_pages_PSHD, layout.query_start_S1, layout.context_len_S, layout.block_table_SM,
        batch.max_query, batch.max_context, out, plan=layout.plan,
    )  # fmt: skip


def varlen(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], log-sum-exp float32 [H, T]) over packed rows; rows beyond the last sequence are zero."""
    return varlen_forward(q_THD, k_THD, v_THD, packed.cu_seqlens_int32, plan=_packed_plan(packed))


def backward(
    grad_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, out_THD: Tensor, lse_HT: Tensor,
    packed: PackedSequences,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v in their dtypes; zero beyond the last sequence."""
    return varlen_backward(
        grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, packed.cu_seqlens_int32,
        plan=_packed_plan(packed),
    )  # fmt: skip
