"""Grouped GEMM over rows sorted by expert, with the bits of one contract linear per expert.

Rule: float32 accumulation in one pass over K in ascending order, one rounding to bfloat16; gate and up are each rounded
before SwiGLU. Two families of schedules:

    stream<B>  a Triton kernel, B rows per tile: one program holds B dispatched rows of one expert against a block of
               its output columns. Rows are gathered from x, SwiGLU is in the epilogue, and the result may go
               straight to the (token, slot) order. With few rows per expert it is bound by the weights touched.
    torch      `torch.nn.functional.grouped_mm` on gathered rows: for gradients, and where streaming is forbidden

Tiles of a `Dispatch` never cross experts, so experts without rows cost nothing and skewed ones only more tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.activation import silu_times
from verl_tim.numerics.gpu.dispatch import Dispatch, lay_out_tiles
from verl_tim.numerics.gpu.operand import require_rows, require_shape
from verl_tim.numerics.gpu.overlap import begin, launch

_MEAN_ROWS = {16: 8, 32: 20, 64: 40}
"""Rows per tile -> up to how many rows per expert, in the mean, its schedule is the fastest."""
_LARGE_BLOCK = 128
_forbidden: set[str] = set()


@dataclass(frozen=True)
class StreamConfig:
    """Free choices of the streaming kernel.

    columns, depth: output columns per program and K per step. weight_left: the weight is the left operand, so that its
    columns fill the 64 rows that `wgmma` wants. tma: the weight, and rows that need no gather, are fetched by TMA.
    columns_first: neighbouring programs share a row tile, not a block of columns.
    """

    columns: int
    depth: int
    stages: int
    warps: int
    weight_left: bool = False
    tma: bool = False
    columns_first: bool = False


@triton.jit
def _product(x_BK, w_NK, acc, WEIGHT_LEFT: tl.constexpr):
    if WEIGHT_LEFT:  # noqa: SIM108 (a compile-time branch: the accumulator's shape fits only one side)
        acc = tl.dot(w_NK, tl.trans(x_BK), acc)
    else:
        acc = tl.dot(x_BK, tl.trans(w_NK), acc)
    return acc


@triton.jit
def _weight_tile(weight, row, k, row_N, k_K, K: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """[BN, BK] of the weight's rows from `row` (by descriptor) or at `row_N` (by pointers), zero beyond K."""
    if TMA:
        tile = weight.load([row, k])
    elif K % BK:
        tile = tl.load(weight + row_N[:, None] * K + (k + k_K)[None, :], mask=(k + k_K < K)[None, :], other=0.0)
    else:
        tile = tl.load(weight + row_N[:, None] * K + (k + k_K)[None, :])
    return tile


@triton.jit
def _stream(
    x, weight, out, pair, end, tile_expert, tile_row, x_stride, columns, slots,
    K: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SWIGLU: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, WEIGHT_LEFT: tl.constexpr, TMA: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    tile, block = tl.program_id(0), tl.program_id(1)
    if COLUMNS_FIRST:
        tile, block = tl.program_id(1), tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    first_row = tl.load(tile_row + tile)
    row_B = first_row + tl.arange(0, BLOCK)
    live_B = row_B < tl.load(end + expert)
    pair_B = row_B
    if GATHER or SCATTER:
        pair_B = tl.load(pair + row_B, mask=live_B, other=0)
    source_B = row_B
    if GATHER:
        source_B = pair_B // slots
    column_N = block * BN + tl.arange(0, BN)
    k_K = tl.arange(0, BK)
    if GATHER or not TMA:
        x_at = x + source_B.to(tl.int64)[:, None] * x_stride + k_K[None, :]
    first = expert * columns
    if SWIGLU:
        first = 2 * first
    row = first + block * BN
    # columns beyond the end read some row and are never stored
    row_N = first.to(tl.int64) + tl.minimum(column_N, columns - 1)
    if WEIGHT_LEFT:
        acc = tl.zeros([BN, BLOCK], tl.float32)
        acc_up = tl.zeros([BN, BLOCK], tl.float32)
    else:
        acc = tl.zeros([BLOCK, BN], tl.float32)
        acc_up = tl.zeros([BLOCK, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if TMA and not GATHER:
            x_BK = x.load([first_row, k])  # rows of the next expert may follow; they are never stored
        elif K % BK:
            x_BK = tl.load(x_at + k, mask=live_B[:, None] & (k + k_K < K)[None, :], other=0.0)
        else:
            x_BK = tl.load(x_at + k, mask=live_B[:, None], other=0.0)
        acc = _product(x_BK, _weight_tile(weight, row, k, row_N, k_K, K, BK, TMA), acc, WEIGHT_LEFT)
        if SWIGLU:
            up_NK = _weight_tile(weight, row + columns, k, row_N + columns, k_K, K, BK, TMA)
            acc_up = _product(x_BK, up_NK, acc_up, WEIGHT_LEFT)
    y = acc.to(tl.bfloat16)
    if SWIGLU:
        y = silu_times(y, acc_up.to(tl.bfloat16))
    target_B = row_B.to(tl.int64)
    if SCATTER:
        target_B = pair_B.to(tl.int64)
    if WEIGHT_LEFT:
        at = out + target_B[None, :] * columns + column_N[:, None]
        tl.store(at, y, mask=live_B[None, :] & (column_N < columns)[:, None])
    else:
        at = out + target_B[:, None] * columns + column_N[None, :]
        tl.store(at, y, mask=live_B[:, None] & (column_N < columns)[None, :])


_CONFIGS = {
    (16, False): StreamConfig(columns=64, depth=128, stages=3, warps=4, tma=True),
    (16, True): StreamConfig(columns=64, depth=128, stages=3, warps=4, tma=True),
    (32, False): StreamConfig(columns=64, depth=64, stages=5, warps=4, weight_left=True, tma=True),
    (32, True): StreamConfig(columns=64, depth=64, stages=5, warps=4, weight_left=True, tma=True),
    (64, False): StreamConfig(columns=128, depth=64, stages=4, warps=4, weight_left=True, tma=True),
    (64, True): StreamConfig(columns=128, depth=64, stages=4, warps=4, weight_left=True, tma=True),
    (128, False): StreamConfig(
        columns=128, depth=64, stages=3, warps=8, weight_left=True, tma=True, columns_first=True
    ),
    (128, True): StreamConfig(columns=128, depth=64, stages=4, warps=8, weight_left=True, tma=True, columns_first=True),
}
"""(rows per tile, with SwiGLU) -> configuration, the fastest of those tried on one H200 (128 experts, 2048 x 768)."""


def stream(
    x: Tensor,
    weight_ENK: Tensor,
    plan: Dispatch,
    *,
    swiglu: bool = False,
    gather: bool = False,
    scatter: bool = False,
    config: StreamConfig | None = None,
) -> Tensor:
    """The streaming schedule; `plan.tiles` must be laid out.

    Args:
        x: bfloat16 [R, K] dispatched rows, or with gather [T, K] token rows.
        weight_ENK: bfloat16 [E, N, K], contiguous; with swiglu N = 2 I, gate rows first.
        scatter: write row of pair p to row p (token * K + slot) instead of its dispatched row.

    Returns:
        bfloat16 [R, N], with swiglu [R, I].
    """
    if plan.tiles is None:
        raise ContractError("grouped gemm: this dispatch has no tiles; pass block to dispatch()")
    tiles, rows = plan.tiles, plan.num_rows
    _, columns, depth = weight_ENK.shape
    if swiglu:
        columns //= 2
    config = config or _CONFIGS[tiles.block, swiglu]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    step = min(config.depth, max(16, triton.next_power_of_2(depth)))
    source: Tensor | TensorDescriptor = x
    weight: Tensor | TensorDescriptor = weight_ENK
    if config.tma:
        weight = TensorDescriptor.from_tensor(weight_ENK.flatten(0, 1), [config.columns, step])
        if not gather:
            source = TensorDescriptor.from_tensor(x, [tiles.block, step])
    grid = (tiles.expert_M.shape[0], triton.cdiv(columns, config.columns))
    _stream[grid[::-1] if config.columns_first else grid](
        source, weight, out, plan.pair_R, plan.end_E, tiles.expert_M, tiles.row_M, x.stride(0), columns,
        plan.row_TK.shape[1], K=depth, BLOCK=tiles.block, BN=config.columns, BK=step, STAGES=config.stages,
        SWIGLU=swiglu, GATHER=gather, SCATTER=scatter, WEIGHT_LEFT=config.weight_left, TMA=config.tma,
        COLUMNS_FIRST=config.columns_first, num_warps=config.warps, enable_fp_fusion=False, **launch(),
    )  # fmt: skip
    return out


def grouped_mm(x_RK: Tensor, weight_ENK: Tensor, plan: Dispatch) -> Tensor:
    """The torch schedule: bfloat16 [R, K] dispatched rows -> [R, N]."""
    if x_RK.is_meta:  # a rehearsal: the library brings its kernels
        return x_RK.new_empty(x_RK.shape[0], weight_ENK.shape[1])
    return F.grouped_mm(x_RK, weight_ENK.transpose(1, 2), offs=plan.end_E)


def grouped_mm_transposed(grad_RN: Tensor, weight_ENK: Tensor, plan: Dispatch) -> Tensor:
    """Gradient of the rows: [R, N] through each expert's weight [N, K] -> [R, K]. Free of the contract."""
    return F.grouped_mm(grad_RN, weight_ENK, offs=plan.end_E)


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, plan: Dispatch) -> Tensor:
    """Gradient of the weights: [E, N, K], zero for experts without rows."""
    return F.grouped_mm(grad_RN.t(), x_RK, offs=plan.end_E)


def _stream_schedule(block: int) -> Callable[[Tensor, Tensor, Dispatch], Tensor]:
    def run(x_RK: Tensor, weight_ENK: Tensor, plan: Dispatch) -> Tensor:
        tiles = lay_out_tiles(plan.end_E, plan.num_rows, block)
        return stream(x_RK, weight_ENK, Dispatch(plan.row_TK, plan.pair_R, plan.end_E, tiles))

    return run


_SCHEDULES: dict[str, Callable[[Tensor, Tensor, Dispatch], Tensor]] = {
    "torch": grouped_mm,
    **{f"stream{block}": _stream_schedule(block) for block in (*_MEAN_ROWS, _LARGE_BLOCK)},
}


def schedules() -> dict[str, Callable[[Tensor, Tensor, Dispatch], Tensor]]:
    """Those not forbidden: name -> function (x [R, K] dispatched rows, weight [E, N, K], plan) -> [R, N]."""
    return {name: run for name, run in _SCHEDULES.items() if name not in _forbidden}


def forbid(name: str) -> None:
    """Never choose schedule `name` in this process: the probe found that it walks K in another order here."""
    if name not in _SCHEDULES:
        raise ContractError(f"grouped gemm: no schedule {name!r}; there are {', '.join(_SCHEDULES)}")
    _forbidden.add(name)


def choose(rows: int, num_experts: int) -> str:
    """The schedule for `rows` dispatched rows; torch's only where the streaming ones are forbidden."""
    allowed = schedules()
    fitting = [f"stream{block}" for block, mean in _MEAN_ROWS.items() if rows <= mean * num_experts]
    for name in (*fitting, f"stream{_LARGE_BLOCK}", "torch", *allowed):
        if name in allowed:
            return name
    raise ContractError(
        f"grouped gemm: every schedule is forbidden ({', '.join(sorted(_forbidden))}), wanted for {rows} rows of "
        f"{num_experts} experts; this device has no exact grouped GEMM: use rollout=stock trainer=stock"
    )


def check_operands(x: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, ranks: int = 1) -> None:
    """Raise `ContractError` unless x [T, D] fits gate_up [E, 2 I, D] and down [E, D, I], all bfloat16.

    `ranks`: how many share the rows of both weights.
    """
    require_rows("moe", x=x, gate_up=gate_up_EJD, down=down_EDI)
    num_experts, share, inner = down_EDI.shape
    hidden = share * ranks
    require_shape("moe", "gate_up", gate_up_EJD, (num_experts, 2 * inner // ranks, hidden))
    require_shape("moe", "x", x, (x.shape[0], hidden))
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size", inner)):
        if size % 8:
            raise ContractError(f"moe: {name}={size}; rows must start at multiples of 16 bytes: use a multiple of 8")
    for name, weight in (("gate_up", gate_up_EJD), ("down", down_EDI)):
        if not weight.is_contiguous():
            raise ContractError(f"moe: {name} is not contiguous; call .contiguous() once at load")
