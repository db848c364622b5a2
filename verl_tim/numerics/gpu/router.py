"""MoE router: float32 logits, float32 softmax, the top k experts, their weights; and the way back.

Rule as `verl_tim.numerics.moe`: ties in probability go to the lower expert index, the chosen weights are divided by
their float32 sum where the model says so. The softmax sum is `sums.tree_sum`, the sum of the chosen weights runs in
slot order; so a row's routes do not depend on its batch. A row whose logits hold NaN or +inf, or no finite value, takes
the first k experts with NaN for weights, as on a CPU: no kernel behind it may meet an expert that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.gemm import gemm
from verl_tim.numerics.gpu.operand import require_rows, require_shape
from verl_tim.numerics.gpu.overlap import begin, launch
from verl_tim.numerics.gpu.sums import tree_sum


@triton.jit
def _softmax(logits, row_R, live_R, expert_E, experts, ROWS: tl.constexpr, LOG_E: tl.constexpr):
    live = live_R[:, None] & (expert_E < experts)[None, :]
    x = tl.load(logits + row_R[:, None] * experts + expert_E[None, :], mask=live, other=float("-inf"))
    x = tl.where(live_R[:, None], x, 0.0)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    total_R = tree_sum(e, ROWS, LOG_E)
    return tl.div_rn(e, tl.broadcast_to(total_R[:, None], [ROWS, 2**LOG_E]))


@triton.jit(do_not_specialize=["rows"])  # it only bounds whole rows: compiles nothing better
def _route(
    logits, expert, weight, rows, experts,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, LOG_E: tl.constexpr, SLOTS: tl.constexpr,
    GIVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """GIVEN: `expert` is read, not written; its weights are computed as those of experts that are chosen here."""
    begin(OVERLAP)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < rows
    expert_E = tl.arange(0, 2**LOG_E)
    slot_S = tl.arange(0, SLOTS)
    p = _softmax(logits, row_R, live_R, expert_E, experts, ROWS, LOG_E)
    broken_RE = p != p  # all of a row or nothing: its sum is NaN
    p = tl.where((expert_E < experts)[None, :], tl.where(broken_RE, 0.0, p), -1.0)
    weight_RS = tl.zeros([ROWS, SLOTS], tl.float32)
    expert_RS = tl.zeros([ROWS, SLOTS], tl.int32)
    total_R = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):
        if GIVEN:
            index_R = tl.load(expert + row_R * TOP_K + slot, mask=live_R, other=0)
            best_R = tl.max(tl.where(expert_E[None, :] == index_R[:, None], p, -1.0), axis=1)
        else:
            best_R = tl.max(p, axis=1)
            index_R = tl.min(tl.where(p == best_R[:, None], expert_E[None, :], 2**LOG_E), axis=1)
        p = tl.where(expert_E[None, :] == index_R[:, None], -1.0, p)
        weight_RS = tl.where(slot_S[None, :] == slot, best_R[:, None], weight_RS)
        expert_RS = tl.where(slot_S[None, :] == slot, index_R[:, None], expert_RS)
        total_R += best_R
    if NORMALISE:
        weight_RS = tl.div_rn(weight_RS, tl.broadcast_to(total_R[:, None], [ROWS, SLOTS]))
    broken_R = tl.max(broken_RE.to(tl.int32), axis=1) > 0
    weight_RS = tl.where(broken_R[:, None], float("nan"), weight_RS)
    live = live_R[:, None] & (slot_S < TOP_K)[None, :]
    at = row_R[:, None] * TOP_K + slot_S[None, :]
    if not GIVEN:
        tl.store(expert + at, expert_RS, mask=live)
    tl.store(weight + at, weight_RS, mask=live)


@triton.jit
def _route_grad(
    grad_weight, logits, expert, grad_logits, rows, experts,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, LOG_E: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < rows
    expert_E = tl.arange(0, 2**LOG_E)
    p = _softmax(logits, row_R, live_R, expert_E, experts, ROWS, LOG_E)
    chosen = tl.zeros([ROWS, 2**LOG_E], tl.float32)  # 1 where the row chose the expert
    grad = tl.zeros([ROWS, 2**LOG_E], tl.float32)  # gradient of the weight of a chosen expert
    for slot in tl.static_range(TOP_K):
        index_R = tl.load(expert + row_R * TOP_K + slot, mask=live_R, other=0)
        grad_R = tl.load(grad_weight + row_R * TOP_K + slot, mask=live_R, other=0.0)
        here = expert_E[None, :] == index_R[:, None]
        chosen = tl.where(here, 1.0, chosen)
        grad = tl.where(here, grad_R[:, None], grad)
    if NORMALISE:
        total_R = tl.sum(p * chosen, axis=1)
        mean_R = tl.sum(p * grad, axis=1) / total_R
        grad = (grad - mean_R[:, None]) * chosen / total_R[:, None]
    grad = p * (grad - tl.sum(p * grad, axis=1)[:, None])
    live = live_R[:, None] & (expert_E < experts)[None, :]
    at = row_R[:, None] * experts + expert_E[None, :]
    tl.store(grad_logits + at, grad.to(grad_logits.dtype.element_ty), mask=live)


def _tile(experts: int) -> dict[str, int]:
    log_experts = max(1, triton.next_power_of_2(experts).bit_length() - 1)
    return {"ROWS": max(1, 512 >> log_experts), "LOG_E": log_experts}


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """float32 [T, E]: the contract linear's accumulators, not rounded."""
    require_rows("router", x=x_TD, router=router_ED)
    return gemm(x_TD, router_ED, out_dtype=torch.float32)


def route(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """(expert int32 [T, K], weight float32 [T, K]) from float32 logits, slot 0 the most probable expert."""
    rows, experts = logits_TE.shape
    if not 0 < top_k <= experts:
        raise ContractError(f"router: top_k={top_k} of {experts} experts; set num_experts_per_tok to 1..num_experts")
    expert_TK = torch.empty(rows, top_k, dtype=torch.int32, device=logits_TE.device)
    return expert_TK, _run(logits_TE, expert_TK, normalise, given=False)


def weigh(logits_TE: Tensor, expert_TK: Tensor, normalise: bool) -> Tensor:
    """Weights float32 [T, K] of given experts, int32 [T, K], of a row distinct: the bits of `route` for its own."""
    require_shape("router", "given experts", expert_TK, (logits_TE.shape[0], expert_TK.shape[-1]))
    return _run(logits_TE, expert_TK, normalise, given=True)


def _run(logits_TE: Tensor, expert_TK: Tensor, normalise: bool, *, given: bool) -> Tensor:
    if logits_TE.dtype != torch.float32 or not logits_TE.is_contiguous():
        raise ContractError(f"router: logits are {logits_TE.dtype}; they must be float32 and contiguous")
    rows, experts = logits_TE.shape
    top_k = expert_TK.shape[1]
    weight_TK = torch.empty(rows, top_k, dtype=torch.float32, device=logits_TE.device)
    if rows:
        tile = _tile(experts)
        _route[(triton.cdiv(rows, tile["ROWS"]),)](
            logits_TE, expert_TK, weight_TK, rows, experts, TOP_K=top_k, NORMALISE=normalise, **tile,
            SLOTS=max(2, triton.next_power_of_2(top_k)), GIVEN=given, num_warps=4, enable_fp_fusion=False, **launch(),
        )  # fmt: skip
    return weight_TK


def router(
    x_TD: Tensor,
    router_ED: Tensor,
    top_k: int,
    normalise: bool,
    choose: Callable[[Tensor], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(expert int32 [T, K], weight float32 [T, K]) for bfloat16 x [T, D] and router weight [E, D]. No autograd.

    Args:
        choose: the experts that were chosen -> those to take in their place, or None (routing replay). In 0..E-1 and
            of a row distinct, which is not looked at here: it would wait for the device.
    """
    logits_TE = router_logits(x_TD, router_ED)
    expert_TK, weight_TK = route(logits_TE, top_k, normalise)
    given_TK = None if choose is None else choose(expert_TK)
    if given_TK is None:
        return expert_TK, weight_TK
    require_shape("router", "given experts", given_TK, tuple(expert_TK.shape))
    given_TK = given_TK.to(torch.int32).contiguous()
    return given_TK, weigh(logits_TE, given_TK, normalise)


def route_backward(grad_weight_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, normalise: bool) -> Tensor:
    """Gradient of the logits through the chosen weights, bfloat16 [T, E] (a GEMM operand)."""
    rows, experts = logits_TE.shape
    require_shape("router_backward", "grad_weight", grad_weight_TK, tuple(expert_TK.shape))
    grad_TE = torch.empty(rows, experts, dtype=torch.bfloat16, device=logits_TE.device)
    if rows:
        tile = _tile(experts)
        _route_grad[(triton.cdiv(rows, tile["ROWS"]),)](
            grad_weight_TK.contiguous(), logits_TE, expert_TK, grad_TE, rows, experts, TOP_K=expert_TK.shape[1],
            NORMALISE=normalise, **tile, num_warps=4,
        )  # fmt: skip
    return grad_TE


def router_backward(
    grad_weight_TK: Tensor, x_TD: Tensor, router_ED: Tensor, expert_TK: Tensor, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `router`: (grad x [T, D], grad router [E, D]), bfloat16. The logits are computed again."""
    grad_TE = route_backward(grad_weight_TK, router_logits(x_TD, router_ED), expert_TK, normalise)
    return torch.mm(grad_TE, router_ED), torch.mm(grad_TE.t(), x_TD)
