"""Mixture of experts on a GPU: dispatch, grouped GEMMs, combine; and the way back.

Rule as `verl_tim.numerics.moe`. Free: the schedule of the grouped GEMM (`grouped_gemm.choose`), which follows from the
number of rows alone, so that nothing waits for the device and a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import grouped_gemm
from verl_tim.numerics.gpu.activation import silu_times_grad, swiglu
from verl_tim.numerics.gpu.combine import combine
from verl_tim.numerics.gpu.dispatch import Dispatch, dispatch
from verl_tim.numerics.gpu.operand import require_rows, require_shape
from verl_tim.numerics.gpu.router import router, router_backward
from verl_tim.numerics.shards import ONE, Shards

__all__ = ["experts", "experts_backward", "router", "router_backward"]


@triton.jit
def _inner_grad(
    gate_up, grad_h, weight, pair, grad_gate_up, weighted_h, grad_weight, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    """One dispatched row: through the routing weight, then SwiGLU.

    grad_h is that of weight * h without the weight, so that grad weight = <h, grad_h>.
    """
    row = tl.program_id(0).to(tl.int64)
    pair_of_row = tl.load(pair + row)
    w = tl.load(weight + pair_of_row)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, INNER, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < INNER
        gate = tl.load(gate_up + row * 2 * INNER + column, mask=live, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * INNER + INNER + column, mask=live, other=0.0).to(tl.float32)
        d = tl.load(grad_h + row * INNER + column, mask=live, other=0.0).to(tl.float32)
        h = gate / (1.0 + tl.exp(-gate)) * up
        total += h * d
        dg, du = silu_times_grad(d * w, gate, up)
        tl.store(grad_gate_up + row * 2 * INNER + column, dg.to(tl.bfloat16), mask=live)
        tl.store(grad_gate_up + row * 2 * INNER + INNER + column, du.to(tl.bfloat16), mask=live)
        tl.store(weighted_h + row * INNER + column, (h * w).to(tl.bfloat16), mask=live)
    tl.store(grad_weight + pair_of_row, tl.sum(total, axis=0))


def _check(
    op: str, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, ranks: int = 1
) -> None:
    grouped_gemm.check_operands(x_TD, gate_up_EJD, down_EDI, ranks)
    require_shape(op, "expert_TK", expert_TK, (x_TD.shape[0], expert_TK.shape[1]))
    require_shape(op, "weight_TK", weight_TK, tuple(expert_TK.shape))
    if weight_TK.dtype != torch.float32 or not weight_TK.is_contiguous():
        raise ContractError(f"{op}: weight_TK is {weight_TK.dtype}; it must be float32 and contiguous")


def experts(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, *,
    schedule: str | None = None, shards: Shards = ONE,
) -> Tensor:  # fmt: skip
    """Contract experts and combine. No autograd.

    Args:
        x_TD: bfloat16 [T, D].
        expert_TK, weight_TK: int32 and float32 [T, K], from `router`.
        gate_up_EJD: bfloat16 [E, 2 I, D], gate rows first; down_EDI: bfloat16 [E, D, I]. Both contiguous.
        schedule: a name of `grouped_gemm.schedules()`; chosen by the number of rows by default.
        shards: with several ranks gate_up holds this rank's rows of gate and of up, [E, 2 I / ranks, D], and down its
            rows, [E, D / ranks, I].

    Returns:
        bfloat16 [T, D], with several ranks this rank's columns [T, D / ranks].
    """
    _check("experts", x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI, shards.size)
    top_k = expert_TK.shape[1]
    if not x_TD.shape[0]:
        return x_TD.new_empty(0, down_EDI.shape[1])
    name = schedule or grouped_gemm.choose(expert_TK.numel(), gate_up_EJD.shape[0])
    if name not in grouped_gemm.schedules():
        raise ContractError(f"experts: schedule {name!r} is unknown or forbidden on this device")
    if name == "torch":
        plan = dispatch(expert_TK, gate_up_EJD.shape[0])
        y = grouped_gemm.grouped_mm(shards.columns(_inner(x_TD, gate_up_EJD, plan)[1]), down_EDI, plan)
        return combine(y, plan.row_TK, weight_TK, top_k)
    plan = dispatch(expert_TK, gate_up_EJD.shape[0], block=int(name.removeprefix("stream")))
    h = shards.columns(grouped_gemm.stream(x_TD, gate_up_EJD, plan, swiglu=True, gather=True))
    y = grouped_gemm.stream(h, down_EDI, plan, scatter=True)
    return combine(y, None, weight_TK, top_k)


def _inner(x_TD: Tensor, gate_up_EJD: Tensor, plan: Dispatch) -> tuple[Tensor, Tensor]:
    """(gate_up [R, 2 I], h [R, I])."""
    gate_up = grouped_gemm.grouped_mm(plan.gather(x_TD), gate_up_EJD, plan)
    inner = gate_up_EJD.shape[1] // 2
    return gate_up, swiglu(gate_up[:, :inner], gate_up[:, inner:])


def experts_backward(
    grad_TD: Tensor, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `experts`; deterministic. Gate and up are computed again.

    The routing weight is applied to h instead of y (they commute), which makes the output y unnecessary and the
    weight's gradient a product of [R, I] rows.

    Returns:
        (grad x [T, D], grad weight float32 [T, K], grad gate_up [E, 2 I, D], grad down [E, D, I]).
    """
    _check("experts_backward", x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI)
    require_rows("experts_backward", grad=grad_TD)
    require_shape("experts_backward", "grad", grad_TD, tuple(x_TD.shape))
    grad_weight_TK = torch.empty_like(weight_TK)
    if not x_TD.shape[0]:
        return torch.empty_like(x_TD), grad_weight_TK, torch.zeros_like(gate_up_EJD), torch.zeros_like(down_EDI)
    inner = down_EDI.shape[2]
    plan = dispatch(expert_TK, gate_up_EJD.shape[0])
    x_RD, grad_RD = plan.gather(x_TD), plan.gather(grad_TD)
    gate_up = grouped_gemm.grouped_mm(x_RD, gate_up_EJD, plan)
    grad_h = grouped_gemm.grouped_mm_transposed(grad_RD, down_EDI, plan)
    grad_gate_up, weighted_h = torch.empty_like(gate_up), torch.empty_like(grad_h)
    _inner_grad[(plan.num_rows,)](
        gate_up, grad_h, weight_TK, plan.pair_R, grad_gate_up, weighted_h, grad_weight_TK, INNER=inner,
        BLOCK=min(1024, triton.next_power_of_2(inner)), num_warps=4,
    )  # fmt: skip
    grad_down = grouped_gemm.grouped_weight_grad(grad_RD, weighted_h, plan)
    grad_gate_up_weight = grouped_gemm.grouped_weight_grad(grad_gate_up, x_RD, plan)
    grad_x = grouped_gemm.grouped_mm_transposed(grad_gate_up, gate_up_EJD, plan)
    return combine(grad_x, plan.row_TK, None, expert_TK.shape[1]), grad_weight_TK, grad_gate_up_weight, grad_down
