"""Mixture of experts: router, experts, combine.

Rule: router logits = linear without rounding (float32), softmax in float32, the top k experts by probability with ties
to the lower expert index, their probabilities renormalised in float32 where the model says so. Each expert is a
contract linear (`grouped_linear.py`). The result is the sum over slots of weight * expert output, in float32 and in
slot order (most probable expert first), rounded once to the operand dtype.
Free: in which groups the experts run, padding of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl_tim.numerics.activation import swiglu_backward, swiglu_inference
from verl_tim.numerics.contract import COLUMN_FLOOR, ContractError, exact_region, kernels, on_gpu, pad_dim0
from verl_tim.numerics.grouped_linear import Dispatch, dispatch, grouped_matmul, grouped_weight_grad
from verl_tim.numerics.linear import linear, linear_reference, matmul_rows
from verl_tim.numerics.shards import ONE, Shards


class Routes(NamedTuple):
    """expert_TK int64 (on a GPU int32) and weight_TK float32, slot 0 the most probable expert."""

    expert_TK: Tensor
    weight_TK: Tensor


class _ChosenScores(torch.autograd.Function):
    """`gather` with the backward of `topk`: what the two give is equal, to the sign of zeros."""

    @staticmethod
    def forward(ctx, score, expert):
        ctx.save_for_backward(expert)
        ctx.shape = score.shape
        return score.gather(-1, expert)

    @staticmethod
    def backward(ctx, grad):
        (expert,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, expert, grad), None


def chosen_scores(score: Tensor, expert: Tensor) -> Tensor:
    """Scores [..., E] at given experts [..., k] (int64, distinct): with those that `topk` finds, its values and its
    gradients, bit for bit."""
    return _ChosenScores.apply(score, expert)


Choose = Callable[[Tensor], "Tensor | None"]
"""(experts [T, k] that a router chose) -> those to take in their place, or None."""


def route_logits(logits_TE: Tensor, top_k: int, normalise: bool, choose: Choose | None = None) -> Routes:
    """Routes from float32 router logits [T, E]; differentiable in the weights.

    `choose` may replace the experts (routing replay); their weights are those of the logits all the same.
    """
    probabilities = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # topk promises no order among ties; a stable sort does.
    ranked, expert = probabilities.sort(dim=-1, descending=True, stable=True)
    weight, expert_TK = ranked[:, :top_k], expert[:, :top_k].contiguous()
    given_TK = None if choose is None else choose(expert_TK)
    if given_TK is not None:
        weight, expert_TK = chosen_scores(probabilities, given_TK), given_TK
    if normalise:
        weight = weight / weight.sum(-1, keepdim=True)
    return Routes(expert_TK, weight.contiguous())


class _Router(torch.autograd.Function):
    """The GPU form; a CPU's is autograd's own."""

    @staticmethod
    def forward(ctx, x_TD, weight_ED, top_k, normalise, choose):
        expert_TK, weight_TK = kernels("moe").router(x_TD, weight_ED, top_k, normalise, choose)
        ctx.save_for_backward(x_TD, weight_ED, expert_TK)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(expert_TK)
        return expert_TK, weight_TK

    @staticmethod
    def backward(ctx, _grad_expert, grad_weight_TK):
        x_TD, weight_ED, expert_TK = ctx.saved_tensors
        grads = kernels("moe").router_backward(grad_weight_TK, x_TD, weight_ED, expert_TK, ctx.normalise)
        return *grads, None, None, None


def router(x_TD: Tensor, weight_ED: Tensor, top_k: int, normalise: bool, choose: Choose | None = None) -> Routes:
    """Differentiable contract router: x [T, D] and weight [E, D] in the operand dtype; `choose`: see `route_logits`."""
    if on_gpu(x_TD):
        with exact_region(x_TD.device.type):
            return Routes(*_Router.apply(x_TD, weight_ED, top_k, normalise, choose))
    return route_logits(linear(x_TD, weight_ED, out_dtype=torch.float32), top_k, normalise, choose)


def _experts_forward(
    x_TD: Tensor,
    plan: Dispatch,
    gate_up_EPD: Tensor,
    down_EPI: Tensor,
    inner: int,
    dtype: torch.dtype,
    shards: Shards = ONE,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gate [R, I], up [R, I], y [R, D]) in the operand dtype, R the dispatched rows (padding included).

    With shards, gate and up have this rank's `inner` columns, and y its share of D.
    """
    x_RD = plan.gather(x_TD.to(torch.float32))
    gate_up = grouped_matmul(x_RD, gate_up_EPD, plan)[:, : 2 * inner].to(dtype)
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    h = shards.columns(swiglu_inference(gate, up))
    y = grouped_matmul(h.to(torch.float32), down_EPI, plan)[:, : x_TD.shape[1] // shards.size].to(dtype)
    return gate, up, y


def combine(y_RD: Tensor, plan: Dispatch, weight_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum of each token's expert outputs, float32 in slot order, one rounding."""
    y_TKD = plan.slots(y_RD).to(torch.float32)
    total = y_TKD[:, 0] * weight_TK[:, 0, None]
    for slot in range(1, weight_TK.shape[1]):
        total = total + y_TKD[:, slot] * weight_TK[:, slot, None]
    return total.to(dtype)


def router_inference(x_TD: Tensor, router_PD: Tensor, num_experts: int, top_k: int, normalise: bool) -> Routes:
    """`router` on a weight prepared as by `PreparedLinear`, without autograd."""
    if on_gpu(x_TD):
        return Routes(*kernels("moe").router(x_TD, router_PD, top_k, normalise))
    return route_logits(matmul_rows(x_TD.to(torch.float32), router_PD)[:, :num_experts], top_k, normalise)


def experts_inference(
    x_TD: Tensor, routes: Routes, gate_up_EPD: Tensor, down_EPI: Tensor, inner: int, shards: Shards = ONE
) -> Tensor:
    """`experts` on weights prepared as by `PreparedLinear`, without autograd.

    With shards the weights are this rank's rows of each expert (`inner` of gate and of up, a share of D of down), and
    the result is gathered: [T, D] on every rank.
    """
    if on_gpu(x_TD):
        y_TD = kernels("moe").experts(
            x_TD, routes.expert_TK, routes.weight_TK, gate_up_EPD, down_EPI, shards=shards
        )  # fmt: skip
        return shards.columns(y_TD)
    plan = dispatch(routes.expert_TK, gate_up_EPD.shape[0])
    _, _, y = _experts_forward(x_TD, plan, gate_up_EPD, down_EPI, inner, x_TD.dtype, shards)
    return shards.columns(combine(y, plan, routes.weight_TK, x_TD.dtype))


def moe_inference(
    x_TD: Tensor, router_PD: Tensor, num_experts: int, gate_up_EPD: Tensor, down_EPI: Tensor, inner: int, top_k: int,
    normalise: bool,
) -> Tensor:  # fmt: skip
    """Router and experts on one rank, on weights prepared as by `PreparedLinear`, without autograd, as the probe runs
    them. x in the operand dtype."""
    routes = router_inference(x_TD, router_PD, num_experts, top_k, normalise)
    return experts_inference(x_TD, routes, gate_up_EPD, down_EPI, inner)


def _pad_columns(weight_ENK: Tensor) -> Tensor:
    """[E, N, K] -> float32 [E, P, K], P a multiple of `COLUMN_FLOOR`."""
    missing = -weight_ENK.shape[1] % COLUMN_FLOOR
    weight = weight_ENK.to(torch.float32)
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight.contiguous()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI):
        ctx.save_for_backward(x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI)
        with exact_region(x_TD.device.type):
            if on_gpu(x_TD):
                return kernels("moe").experts(x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI)
            plan = dispatch(expert_TK, gate_up_EJD.shape[0])
            _, _, y = _experts_forward(
                x_TD, plan, _pad_columns(gate_up_EJD), _pad_columns(down_EDI), down_EDI.shape[2], x_TD.dtype
            )
            return combine(y, plan, weight_TK, x_TD.dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI = ctx.saved_tensors
        inner, dtype = down_EDI.shape[2], x_TD.dtype
        with exact_region(grad_TD.device.type):
            if on_gpu(grad_TD):
                grad_x, grad_weight, grad_gate_up_w, grad_down_w = kernels("moe").experts_backward(
                    grad_TD.contiguous(), x_TD, expert_TK, weight_TK, gate_up_EJD, down_EDI
                )
                return grad_x, None, grad_weight, grad_gate_up_w, grad_down_w
            plan = dispatch(expert_TK, gate_up_EJD.shape[0])
            gate_up, down = gate_up_EJD.to(torch.float32), down_EDI.to(torch.float32)
            gate, up, y = _experts_forward(x_TD, plan, _pad_columns(gate_up), _pad_columns(down), inner, dtype)
            g = grad_TD.to(torch.float32)
            y_TKD = plan.slots(y).to(torch.float32)
            grad_weight = (y_TKD * g[:, None]).sum(-1)
            grad_y = plan.scatter((g[:, None] * weight_TK[..., None]).to(dtype).to(torch.float32))
            grad_h = grouped_matmul(grad_y, down.transpose(1, 2), plan)
            grad_gate, grad_up = swiglu_backward(grad_h.to(dtype), gate, up)
            grad_gate_up = torch.cat([grad_gate, grad_up], dim=-1).to(torch.float32)
            grad_x = plan.slots(grouped_matmul(grad_gate_up, gate_up.transpose(1, 2), plan)).sum(1)
            grad_gate_up_w = grouped_weight_grad(grad_gate_up, plan.gather(x_TD.to(torch.float32)), plan)
            grad_down_w = grouped_weight_grad(grad_y, swiglu_inference(gate, up).to(torch.float32), plan)
        return (
            grad_x.to(dtype),
            None,
            grad_weight.to(weight_TK.dtype),
            grad_gate_up_w.to(gate_up_EJD.dtype),
            grad_down_w.to(down_EDI.dtype),
        )


def experts(x_TD: Tensor, routes: Routes, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    """Differentiable contract experts and combine.

    Args:
        x_TD: [T, D] in the operand dtype.
        routes: from `router`.
        gate_up_EJD: [E, 2 I, D], gate rows first (transformers 5's packed layout); down_EDI: [E, D, I].

    Returns:
        [T, D] in the operand dtype. Backward recomputes the experts.
    """
    if x_TD.dtype != gate_up_EJD.dtype or x_TD.dtype != down_EDI.dtype:
        raise ContractError(f"moe: x is {x_TD.dtype}, experts are {gate_up_EJD.dtype} and {down_EDI.dtype}")
    return _Experts.apply(x_TD, routes.expert_TK, routes.weight_TK, gate_up_EJD, down_EDI)


def moe_reference(
    x_TD: Tensor, router_ED: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, top_k: int, normalise: bool
) -> Tensor:
    """Slow: token by token, expert by expert, with the linear's own reference."""
    out = []
    inner = down_EDI.shape[2]
    for x_D in x_TD:
        logits = matmul_rows(x_D[None].to(torch.float32), pad_dim0(router_ED.to(torch.float32), COLUMN_FLOOR))
        p = torch.softmax(logits[0, : router_ED.shape[0]], dim=-1)
        chosen = sorted(range(len(p)), key=lambda e: (-p[e].item(), e))[:top_k]
        weights = torch.stack([p[e] for e in chosen])
        if normalise:
            weights = weights / weights.sum()
        total = torch.zeros(x_D.shape[0])
        for slot, e in enumerate(chosen):
            gate_up = linear_reference(x_D[None], gate_up_EJD[e])
            h = swiglu_inference(gate_up[:, :inner], gate_up[:, inner:])
            term = linear_reference(h, down_EDI[e])[0].to(torch.float32) * weights[slot]
            total = term if slot == 0 else total + term
        out.append(total.to(x_D.dtype))
    return torch.stack(out)
