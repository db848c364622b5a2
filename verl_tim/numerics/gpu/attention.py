"""Causal grouped-query attention on a GPU, contract ``chunk64``: packed rows (trainer), paged keys (engine), gradients.

The rule is that of `verl_tim.numerics.attention` with base 2 exponents; `attention_block` is its arithmetic. A row has
the same bits from every function here, whatever the tiles, the batch, the page size and the cut of the chunks.

Schedules: `REFERENCE`, plain Triton, serves every row; `HOPPER` serves prefill and `SPLIT` decodes where they can,
until `forbid` says that a device does not keep to the rule there (`probe` compares each with the reference).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError, require_heads
from verl_tim.numerics.gpu import attention_backward, attention_backward_hopper, attention_hopper, attention_prefill
from verl_tim.numerics.gpu.attention_decode import decode, scratch_elements
from verl_tim.numerics.gpu.attention_plan import STATE_SLOTS, PackedPlan, PagedPlan
from verl_tim.numerics.gpu.operand import whole_rows

MAX_HEAD_DIM = 256

REFERENCE, HOPPER, SPLIT = "prefill:triton", "prefill:hopper", "decode:split"
_forbidden: set[str] = set()


def forbid(name: str) -> None:
    """Never take this schedule again in this process: `REFERENCE` takes its rows. Plans made before keep theirs.

    Raises:
        ContractError: no schedule that another one can stand in for has that name.
    """
    if name not in (HOPPER, SPLIT):
        raise ContractError(f"attention: no schedule {name!r} that can be forbidden; there are {HOPPER}, {SPLIT}")
    _forbidden.add(name)


def forbidden() -> frozenset[str]:
    """Names that `forbid` was given."""
    return frozenset(_forbidden)


def prefill_schedule(q_THD: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> str:
    """Which schedule takes the sequences of these tensors that have more than one row."""
    if HOPPER not in _forbidden and attention_hopper.supports(q_THD, k, v, paged=paged):
        return HOPPER
    return REFERENCE


def decode_schedule(q_THD: Tensor, k: Tensor, v: Tensor) -> str:
    """Which schedule takes the sequences of these tensors, keys in pages, that have one row."""
    return prefill_schedule(q_THD, k, v, paged=True) if SPLIT in _forbidden else SPLIT


def _check(q_THD: Tensor, k: Tensor, v: Tensor) -> None:
    require_heads(q_THD, k, v)
    dim = q_THD.shape[-1]
    if dim % 16 or dim > MAX_HEAD_DIM:
        raise ContractError(f"attention: head_dim {dim}; the contract covers multiples of 16 up to {MAX_HEAD_DIM}")
    for name, x in (("q", q_THD), ("k", k), ("v", v)):
        if x.dtype != torch.bfloat16:
            raise ContractError(f"attention: {name} is {x.dtype}; the GPU contract covers torch.bfloat16 only")
        if x.stride(-1) != 1:
            raise ContractError(f"attention: the last dimension of {name} must be contiguous")


def _prefill(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor | None,
    plan: PackedPlan | PagedPlan,
    block_table_SM: Tensor | None,
    schedule: str | None = None,
) -> None:
    """The named schedule, by default the fastest that serves these tensors; all give the same bits."""
    hopper = (schedule or prefill_schedule(q_THD, k, v, paged=block_table_SM is not None)) == HOPPER
    rows = attention_hopper.ROWS if hopper else attention_prefill.prefill_config(q_THD.shape[2], q_THD.device)["ROWS"]
    tiles_N4 = plan.query_tiles(rows)
    if tiles_N4 is None:
        return
    if hopper:
        attention_hopper.prefill(q_THD, k, v, out_THD, lse_HT, tiles_N4, block_table_SM)
    else:
        attention_prefill.prefill(q_THD, k, v, out_THD, lse_HT, tiles_N4, block_table_SM)


def varlen_forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    plan: PackedPlan | None = None,
    schedule: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences.

    Args:
        q_THD: bfloat16 [T, heads, D]; k_THD, v_THD: [T, kv heads, D], rotated; rows and heads may be strided.
            Rows of no sequence must be finite.
        cu_seqlens_S1: int32 [S + 1].
        plan: of the same sequences; shared by all layers. Built on the device when absent.
        schedule: `REFERENCE` or `HOPPER`; the fastest that serves when absent.

    Returns:
        (out bfloat16 [T, heads, D], natural log-sum-exp float32 [heads, T]); zeros in rows beyond cu_seqlens[-1].
    """
    _check(q_THD, k_THD, v_THD)
    rows, heads, _dim = q_THD.shape
    if plan is None:
        plan = PackedPlan(device=q_THD.device, cu_seqlens_S1=cu_seqlens_S1, num_rows=rows)
    allocate = torch.empty if plan.num_rows == rows else torch.zeros
    out = allocate(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse = allocate(heads, rows, dtype=torch.float32, device=q_THD.device)
    _prefill(q_THD, k_THD, v_THD, out, lse, plan, None, schedule)
    return out, lse


def varlen_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    plan: PackedPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `varlen_forward`, deterministic; zeros in rows beyond cu_seqlens[-1]."""
    if plan is None:
        plan = PackedPlan(device=q_THD.device, cu_seqlens_S1=cu_seqlens_S1, num_rows=q_THD.shape[0])
    grad_THD = whole_rows(grad_THD)
    allocate = torch.empty if plan.num_rows == q_THD.shape[0] else torch.zeros
    dq, dk, dv = (allocate(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_THD, v_THD))
    hopper = attention_hopper.supports(q_THD, k_THD, v_THD, paged=False) and attention_hopper.supports(
        grad_THD, k_THD, v_THD, paged=False
    )
    arguments = (grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, plan, (dq, dk, dv))
    if hopper:
        attention_backward_hopper.backward(*arguments)
    else:
        attention_backward.backward(*arguments)
    return dq, dk, dv


def paged_forward(
    q_THD: Tensor,
    k_pages_PSHD: Tensor,
    v_pages_PSHD: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SM: Tensor,
    max_query_len: int,
    max_context_len: int,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    *,
    plan: PagedPlan | None = None,
) -> Tensor:
    """Attention of a step's rows over the paged cache, which already holds their keys and values.

    Args:
        q_THD: bfloat16 [T, heads, D], rotated. k_pages_PSHD, v_pages_PSHD: [P, page size, kv heads, D], any page size;
            every slot finite (zero the pool once: masked keys count as 0 times their value).
        query_start_S1 [S + 1], context_len_S [S] (keys after this step), block_table_SM [S, M]: int32 on the device.
        max_query_len: 1 for a step of decodes only. max_context_len: an upper bound.
        out: [T, heads, D] to write; rows of no sequence are left alone. Allocated with zeros when absent.
        scratch: float32, `scratch_elements(STATE_SLOTS, heads, D)` of them. Allocated when absent.
        plan: of the same step; shared by all layers. Built on the device when absent (capturable either way).
    """
    _check(q_THD, k_pages_PSHD, v_pages_PSHD)
    rows, heads, dim = q_THD.shape
    page_size, num_kv_heads = k_pages_PSHD.shape[1:3]
    if block_table_SM.shape[1] * page_size < max_context_len:
        raise ContractError(
            f"attention: block_table has {block_table_SM.shape[1]} pages of {page_size} per sequence, too few for "
            f"max_context_len={max_context_len}"
        )
    if out is None:
        out = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if plan is None:
        plan = PagedPlan(
            query_start_S1,
            context_len_S,
            num_kv_heads=num_kv_heads,
            num_rows=rows,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            split_decodes=SPLIT not in _forbidden,
        )
    _prefill(q_THD, k_pages_PSHD, v_pages_PSHD, out, None, plan, block_table_SM)
    if plan.decode is not None:
        needed = scratch_elements(STATE_SLOTS, heads, dim)
        if scratch is None:
            scratch = torch.empty(needed, device=q_THD.device)
        if scratch.numel() < needed:
            raise ContractError(f"attention: scratch has {scratch.numel()} elements, {needed} are needed")
        decode(q_THD, k_pages_PSHD, v_pages_PSHD, block_table_SM, out, plan.decode, scratch)
    return out
