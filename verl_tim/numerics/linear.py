"""Linear: y = x W^T (+ b).

Rule: operands in the model dtype, one float32 accumulation in ascending K without split-K, the bias added in float32,
one rounding at the end (to the operand dtype, or none where float32 is wanted).
Free: the number of rows, fusing weights that share an input, which side pads.

GPU schedules: `gpu/gemm.py`.
CPU schedule: both operands up-cast to float32, rows padded to `ROW_FLOOR`, outputs padded to `COLUMN_FLOOR`, MKL GEMM;
in blocks of `ROW_FLOOR` rows where the probe finds that the machine needs it (`use_row_blocks`).
`PreparedLinear` holds the weight for inference in the layout of the device's schedule, so that nothing is converted in
a step; it is the only copy of that weight, so it cannot go stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_tim.numerics.contract import (
    COLUMN_FLOOR,
    ROW_FLOOR,
    ContractError,
    ceil_to,
    exact_region,
    kernels,
    on_gpu,
    operand,
    pad_dim0,
    require_operands,
)

# Whether rows go through the GEMM in blocks of exactly `ROW_FLOOR`; see `use_row_blocks`.
_row_blocks = False


def use_row_blocks(on: bool) -> None:
    """Choose this process's CPU schedule: one GEMM over all rows, or one per `ROW_FLOOR` rows.

    The second is for machines whose GEMM walks K in another order for few rows (`probe` switches to it where it finds
    that): every call then has one shape, whatever the batch. It costs speed at many rows.
    """
    global _row_blocks
    _row_blocks = on


def row_blocks() -> bool:
    """Whether `use_row_blocks` is on in this process."""
    return _row_blocks


def matmul_rows(x_TK: Tensor, weight_PK: Tensor) -> Tensor:
    """float32 x W^T for an already padded float32 weight (P a multiple of `COLUMN_FLOOR`); rows padded here if need be.

    Returns float32 [T, P].
    """
    rows = x_TK.shape[0]
    if rows % ROW_FLOOR:
        return matmul_rows(pad_dim0(x_TK, ROW_FLOOR), weight_PK)[:rows]
    if not _row_blocks:
        return torch.mm(x_TK, weight_PK.t())
    blocks_B8K = x_TK.reshape(-1, ROW_FLOOR, x_TK.shape[1])
    weight_BKP = weight_PK.t().expand(blocks_B8K.shape[0], -1, -1)
    return torch.bmm(blocks_B8K, weight_BKP).view(rows, weight_PK.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        with exact_region(x_TK.device.type):
            if on_gpu(x_TK):
                return kernels("gemm").gemm(x_TK, weight_NK, bias_N=bias_N, out_dtype=out_dtype)
            y = matmul_rows(operand(x_TK), operand(pad_dim0(weight_NK, COLUMN_FLOOR)))[:, : weight_NK.shape[0]]
            if bias_N is not None:
                y = y + bias_N.to(torch.float32)
            return y.to(out_dtype)

    @staticmethod
    def backward(ctx, grad_TN: Tensor):
        x_TK, weight_NK = ctx.saved_tensors
        with exact_region(grad_TN.device.type):
            if on_gpu(grad_TN):
                # The library's own choice: only the forward is bound. Its split-K reductions are ordered.
                g = grad_TN.to(x_TK.dtype)
                grad_x = g @ weight_NK if ctx.needs_input_grad[0] else None
                grad_w = g.t() @ x_TK if ctx.needs_input_grad[1] else None
                grad_b = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
                return grad_x, grad_w, grad_b, None
            g = grad_TN.to(torch.float32)
            grad_x = (g @ weight_NK.to(torch.float32)).to(x_TK.dtype) if ctx.needs_input_grad[0] else None
            grad_w = (g.t() @ x_TK.to(torch.float32)).to(weight_NK.dtype) if ctx.needs_input_grad[1] else None
            grad_b = g.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_b, None


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Differentiable contract linear.

    Args:
        x_TK: [T, K] in the operand dtype (float32 or bfloat16), the weight's.
        weight_NK: [N, K].
        bias_N: [N] or None.
        out_dtype: dtype of the result; None means the operand dtype.

    Returns:
        [T, N]. Raises `ContractError` for operands of different or other dtypes, and shapes that do not fit.
    """
    require_operands("linear", x=x_TK, weight=weight_NK)
    if x_TK.dim() != 2 or weight_NK.dim() != 2 or x_TK.shape[1] != weight_NK.shape[1]:
        raise ContractError(f"linear: x {tuple(x_TK.shape)} does not fit weight {tuple(weight_NK.shape)}")
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ContractError(f"linear: bias {tuple(bias_N.shape)} does not fit {weight_NK.shape[0]} outputs")
    return _Linear.apply(x_TK, weight_NK, bias_N, out_dtype or x_TK.dtype)


class PreparedLinear:
    """Weights that share an input, in one buffer of the device's schedule.

    On a CPU float32 [P, K], P padded to `COLUMN_FLOOR`; on a GPU [N, K] in the operand dtype. The bias in the same
    dtype: cuBLASLt takes none but the result's.

    Args:
        parts: output sizes of the fused weights, in order.
        in_features: K.
        dtype: the operand dtype.
        bias: whether the parts carry a bias.
    """

    def __init__(
        self, parts: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(self.parts)
        self.in_features = in_features
        self.dtype = dtype
        rows, kept_dtype = self.out_features, dtype
        if not on_gpu(device):
            rows, kept_dtype = ceil_to(rows, COLUMN_FLOOR), torch.float32
        self.weight_PK = torch.zeros(rows, in_features, device=device, dtype=kept_dtype)
        self.bias_N = torch.zeros(self.out_features, device=device, dtype=kept_dtype) if bias else None

    def _rows(self, part: int) -> slice:
        start = sum(self.parts[:part])
        return slice(start, start + self.parts[part])

    def weight_view(self, part: int) -> Tensor:
        """The rows of one part. Writers round to the operand dtype first, as FSDP2's mixed precision does."""
        return self.weight_PK[self._rows(part)]

    def bias_view(self, part: int) -> Tensor:
        if self.bias_N is None:
            raise ContractError("linear: this weight has no bias")
        return self.bias_N[self._rows(part)]

    @property
    def nbytes(self) -> int:
        return self.weight_PK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    def __call__(self, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, K] in the operand dtype -> [T, out_features] in it, or in `out_dtype`. Same bits as `linear` per part."""
        out_dtype = out_dtype or self.dtype
        if on_gpu(x_TK):
            return kernels("gemm").gemm(x_TK, self.weight_PK, bias_N=self.bias_N, out_dtype=out_dtype)
        y = matmul_rows(x_TK.to(torch.float32), self.weight_PK)
        if y.shape[1] != self.out_features:
            y = y[:, : self.out_features]
        if self.bias_N is not None:
            y = y + self.bias_N
        return y.to(out_dtype)


def linear_reference(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Slow: each row alone (in its own padded tile), each 64 outputs alone, one thread's order of accumulation."""
    rows = []
    for x_K in x_TK:
        x_8K = pad_dim0(x_K.to(torch.float32)[None], ROW_FLOOR)
        tiles = [
            torch.mm(x_8K, pad_dim0(tile, COLUMN_FLOOR).to(torch.float32).t().contiguous())[0, : tile.shape[0]]
            for tile in weight_NK.split(COLUMN_FLOOR)
        ]
        rows.append(torch.cat(tiles))
    y_TN = torch.stack(rows)
    if bias_N is not None:
        y_TN = y_TN + bias_N.to(torch.float32)
    return y_TN.to(x_TK.dtype)
