"""Router decisions of a mixture-of-experts model, rollout against trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.diagnosis.sink import MetricSink
from verl_tim.diagnosis.stats import group_sums
from verl_tim.diagnosis.tokens import ValidTokens

UNRECORDED = -1


class RouteError(ValueError):
    """Recorded routes that cannot be compared; the message names sample, layer and position."""


def put_route_metrics(
    sink: MetricSink, tokens: ValidTokens, rollout_routes: Tensor, train_routes: Tensor, num_experts: int | None = None
) -> None:
    """Add flip rate, expert mismatch and order mismatch, overall and per layer.

    Args:
        tokens: the batch's valid tokens.
        rollout_routes, train_routes: (B, T, layers, k) int, the top-k expert ids in router order; -1 in all k places
            where nothing is recorded (a dense layer, a sequence outside the sample). (token, layer) pairs unrecorded on
            both sides are left out and counted as `tim/router_unrecorded`; pairs compared are `tim/router_compared`.
        num_experts: upper bound of the ids, checked when given.
    Raises:
        RouteError: wrong shape or dtype, an id out of range, an id twice in a token, a (token, layer) with ids on one
            side only, a layer all zero (padding read as routes) or all -1 in a recorded row although the model routes
            there.
    """
    expected = tuple(tokens.shape)
    for name, routes in (("rollout_routes", rollout_routes), ("train_routes", train_routes)):
        if (
            not isinstance(routes, Tensor)
            or routes.dtype.is_floating_point
            or routes.dtype in (torch.bool, torch.complex64)
        ):
            raise RouteError(f"{name} must be an integer tensor of expert ids (batch, response tokens, layers, k)")
        if routes.dim() != 4 or tuple(routes.shape[:2]) != expected:
            raise RouteError(f"{name} has shape {tuple(routes.shape)}, expected {(*expected, 'layers', 'k')}")
    if rollout_routes.shape != train_routes.shape:
        raise RouteError(
            f"rollout_routes {tuple(rollout_routes.shape)} and train_routes {tuple(train_routes.shape)} "
            "differ in layers or k: map dense layers to -1 on the side that counts routed layers only"
        )
    valid_BT = tokens.valid_BT
    wide = torch.promote_types(torch.promote_types(rollout_routes.dtype, train_routes.dtype), torch.int16)
    rollout_NLK = rollout_routes.to(valid_BT.device)[valid_BT].to(wide)
    train_NLK = train_routes.to(valid_BT.device)[valid_BT].to(wide)
    if rollout_NLK.numel() == 0:
        return
    column_N = torch.arange(tokens.shape[1], device=valid_BT.device).expand(tokens.shape)[valid_BT]

    def refuse_where(bad_NL: Tensor, name: str, what: str) -> None:
        if bool(bad_NL.any()):
            at, layer = (int(i) for i in bad_NL.nonzero()[0])
            place = f"sample {int(tokens.row_N[at])}, layer {layer}, position {int(column_N[at])}"
            rollout_ids, train_ids = rollout_NLK[at, layer].tolist(), train_NLK[at, layer].tolist()
            raise RouteError(f"{name}: {what} at {place} (rollout {rollout_ids}, trainer {train_ids})")

    differs_NL = ~_same_ids(rollout_NLK, train_NLK)
    sorted_ids = {"rollout_routes": rollout_NLK.sort(-1).values}
    sorted_ids["train_routes"] = sorted_ids["rollout_routes"]
    if bool(differs_NL.any()):  # few do, and sorting takes long
        sorted_ids["train_routes"] = sorted_ids["rollout_routes"].clone()
        sorted_ids["train_routes"][differs_NL] = train_NLK[differs_NL].sort(-1).values
    recorded = {}
    for name, sorted_NLK in sorted_ids.items():
        least_NL, most_NL = sorted_NLK[..., 0], sorted_NLK[..., -1]
        refuse_where(
            (least_NL == UNRECORDED) & (most_NL > UNRECORDED), name, "some of the k experts are -1, the others not"
        )
        refuse_where(least_NL < UNRECORDED, name, "expert id out of range (below -1)")
        if num_experts is not None:
            refuse_where(most_NL >= num_experts, name, f"expert id out of range (num_experts is {num_experts})")
        recorded[name] = most_NL > UNRECORDED
        if sorted_NLK.shape[-1] > 1:
            twice_NL = torch.zeros_like(differs_NL)
            for place in range(1, sorted_NLK.shape[-1]):
                twice_NL |= sorted_NLK[..., place] == sorted_NLK[..., place - 1]
            twice_NL &= recorded[name]
            zero_NL = (least_NL == 0) & (most_NL == 0)
            refuse_where(zero_NL & twice_NL, name, "all-zero layer: padding, not routes; unrecorded places must be -1")
            refuse_where(twice_NL, name, "an expert id occurs twice in one token")
    rollout_NL, train_NL = recorded["rollout_routes"], recorded["train_routes"]
    refuse_where(rollout_NL & ~train_NL, "train_routes", "layer routed in the rollout only")
    refuse_where(train_NL & ~rollout_NL, "rollout_routes", "layer routed in the trainer only")

    rows, layers = tokens.shape[0], rollout_NLK.shape[1]
    both_NL = rollout_NL
    pairs_BL = torch.zeros((rows, layers), dtype=torch.int64, device=valid_BT.device)
    pairs_BL.index_add_(0, tokens.row_N, both_NL.to(torch.int64))
    silent_BL = (pairs_BL == 0) & (pairs_BL.sum(1, keepdim=True) > 0) & (pairs_BL.sum(0, keepdim=True) > 0)
    refuse_where(silent_BL[tokens.row_N], "rollout_routes and train_routes", "all -1 in a layer that the model routes")
    if rollout_NLK.shape[-1] == 1:
        # With k = 1 a single 0 is an ordinary id; a whole row of zeros on one side only is padding.
        for name, routes_NLK, other_NLK in (
            ("rollout_routes", rollout_NLK, train_NLK),
            ("train_routes", train_NLK, rollout_NLK),
        ):
            nonzero_BL = torch.zeros_like(pairs_BL).index_add_(
                0, tokens.row_N, (routes_NLK != 0).all(-1).to(torch.int64)
            )
            other_BL = torch.zeros_like(pairs_BL).index_add_(0, tokens.row_N, (other_NLK > 0).all(-1).to(torch.int64))
            padded_BL = (pairs_BL > 1) & (nonzero_BL == 0) & (other_BL > 0)
            refuse_where(
                padded_BL[tokens.row_N], name, "all-zero layer: padding, not routes; unrecorded places must be -1"
            )

    # sums over the D pairs that differ; in all others nothing is to be counted
    rollout_DK, train_DK = rollout_NLK[differs_NL], train_NLK[differs_NL]
    layer_D = torch.arange(layers, device=valid_BT.device).expand(differs_NL.shape)[differs_NL]
    found_DK = torch.zeros_like(train_DK, dtype=torch.bool)
    for place in range(train_DK.shape[-1]):
        found_DK |= train_DK == rollout_DK[:, place : place + 1]
    flipped_D = ~found_DK.all(1)  # an id stands in a token once, so that this compares sets
    per_pair = {
        "router_flip_rate": flipped_D,
        "router_expert_mismatch": (~found_DK).to(torch.float64).mean(1),
        "router_order_mismatch": ~flipped_D,
    }
    count_L = both_NL.sum(0)
    sink.put("router_compared", count_L.sum())
    sink.put("router_unrecorded", both_NL.numel() - count_L.sum())
    for name, value_D in per_pair.items():
        sum_L = group_sums(layer_D, value_D.to(torch.float64), layers)
        sink.put(name, sum_L.sum() / count_L.sum().clamp_min(1), count_L.sum())
        sink.put_bins(f"{name}/layer", [str(layer) for layer in range(layers)], sum_L, count_L)


def _same_ids(a_NLK: Tensor, b_NLK: Tensor) -> Tensor:
    """bool (N, L): all k ids agree, place by place. Compared in words as wide as they divide into."""
    size = a_NLK.shape[-1] * a_NLK.element_size()
    words = next(dtype for dtype in (torch.int64, torch.int32, torch.int16) if size % dtype.itemsize == 0)
    same = a_NLK.contiguous().view(words) == b_NLK.contiguous().view(words)
    found_NL = same[..., 0].clone()
    for place in range(1, same.shape[-1]):
        found_NL &= same[..., place]
    return found_NL
