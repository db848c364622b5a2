"""Grouped linear: rows sorted by expert, each expert's rows through its own weight.

Rule: per expert, that of `linear`. Free: the order of the groups, their padding, and the kernel: one batched GEMM when
the experts are evenly loaded, a GEMM per expert when padding every expert to the largest would cost more than it saves
(the probe checks that both give the same bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.numerics.contract import ROW_FLOOR, ceil_to
from verl_tim.numerics.linear import linear_reference, matmul_rows, row_blocks


@dataclass
class Dispatch:
    """Where each (token, slot) pair lies among the dispatched rows.

    row_TK: int64 [T, K] dispatched row of each pair. starts: first row of each expert's segment, and the end of the
    last. capacity: rows of every segment when all are equal (one batched GEMM), else None. num_rows: all rows,
    padding included.
    """

    row_TK: Tensor
    starts: list[int]
    capacity: int | None
    num_rows: int

    def gather(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [R, D]: each token's row copied to its experts' segments, zeros in padding."""
        tokens, slots = self.row_TK.shape
        out = torch.zeros(self.num_rows, x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
        source = x_TD[:, None].expand(tokens, slots, -1).flatten(0, 1)
        return out.index_copy_(0, self.row_TK.view(-1), source)

    def scatter(self, x_TKD: Tensor) -> Tensor:
        """[T, K, D] -> [R, D], zeros in padding."""
        out = torch.zeros(self.num_rows, x_TKD.shape[2], dtype=x_TKD.dtype, device=x_TKD.device)
        return out.index_copy_(0, self.row_TK.view(-1), x_TKD.flatten(0, 1))

    def slots(self, y_RD: Tensor) -> Tensor:
        """[R, D] -> [T, K, D]."""
        return y_RD.index_select(0, self.row_TK.view(-1)).unflatten(0, self.row_TK.shape)


def dispatch(expert_TK: Tensor, num_experts: int) -> Dispatch:
    """Plan the rows of each expert: segments padded to `ROW_FLOOR`, equal ones unless that would double the rows."""
    flat = expert_TK.reshape(-1)
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = [ceil_to(count, ROW_FLOOR) for count in counts.tolist()]
    capacity: int | None = max(sizes)
    if capacity is not None and capacity * num_experts > 2 * (flat.numel() + ROW_FLOOR * num_experts):
        capacity = None
    else:
        sizes = [max(sizes)] * num_experts
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    order = flat.argsort(stable=True)
    first_pair_E = counts.cumsum(0) - counts  # pairs sorted by expert: where each expert's begin
    segment_E = torch.tensor(starts[:-1], device=flat.device)
    sorted_expert = flat[order]
    row_sorted = torch.arange(flat.numel(), device=flat.device) + (segment_E - first_pair_E)[sorted_expert]
    row = torch.empty_like(flat).index_copy_(0, order, row_sorted)
    return Dispatch(row.view(expert_TK.shape), starts, capacity, starts[-1])


def grouped_matmul(x_RK: Tensor, weight_EPK: Tensor, plan: Dispatch) -> Tensor:
    """float32 [R, K] x per-expert W^T [E, P, K] -> [R, P]; segments and P already padded."""
    num_experts, columns, _ = weight_EPK.shape
    if plan.capacity is not None and not row_blocks():
        x = x_RK.unflatten(0, (num_experts, plan.capacity))
        return torch.bmm(x, weight_EPK.transpose(1, 2)).view(plan.num_rows, columns)
    out = torch.empty(plan.num_rows, columns, device=x_RK.device)
    for e, (start, stop) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
        if stop > start:
            out[start:stop] = matmul_rows(x_RK[start:stop], weight_EPK[e])
    return out


def grouped_linear_reference(x_TK: Tensor, expert_TS: Tensor, weight_ENK: Tensor) -> Tensor:
    """Slow: [T, S, N], each (token, slot) pair alone through its expert's weight, by `linear_reference`."""
    return torch.stack(
        [
            torch.cat([linear_reference(x_K[None], weight_ENK[int(expert)]) for expert in expert_S])
            for x_K, expert_S in zip(x_TK, expert_TS, strict=True)
        ]
    )


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, plan: Dispatch) -> Tensor:
    """Gradient of the grouped weights, float32 [E, N, K]."""
    num_experts = len(plan.starts) - 1
    if plan.capacity is not None:
        shape = (num_experts, plan.capacity)
        return torch.bmm(grad_RN.unflatten(0, shape).transpose(1, 2), x_RK.unflatten(0, shape))
    out = torch.zeros(num_experts, grad_RN.shape[1], x_RK.shape[1], device=x_RK.device)
    for e, (start, stop) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
        if stop > start:
            out[e] = grad_RN[start:stop].t() @ x_RK[start:stop]
    return out
