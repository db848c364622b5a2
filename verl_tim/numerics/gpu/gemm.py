"""Linear on a GPU: y = x W^T (+ b), one rule, any schedule.

Rule: bfloat16 operands, one float32 accumulator per output filled in one ascending pass over K (no split), the bias
added in float32, one rounding at the end (bfloat16, or none where float32 is wanted).

Free: the schedule. `schedules` lists those that serve a shape, by name; all give the same bits, so the choice is about
speed alone and may differ between processes. `in_use` are those that this process takes, which `probe` compares with
the first, the reference; `forbid` drops one that a device does not keep to the rule, and another comes into use. The
choice for a shape is made once, by a rule, and kept in a dict: a call measures nothing, so a CUDA graph or a traced
call freezes nothing it should not. It waits for the device only where cuBLASLt offers an algorithm that this process
has not tried yet (`cublaslt.serves`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError, deciding_device
from verl_tim.numerics.gpu import cublaslt, few_rows
from verl_tim.numerics.gpu.processor import shared_bytes

logger = logging.getLogger(__name__)

Run = Callable[[Tensor, Tensor, "Tensor | None", Tensor], None]
Serves = Callable[[Tensor, Tensor, "Tensor | None", Tensor], bool]


@dataclass(frozen=True)
class Schedule:
    """name: as `forbid` takes it; run(x_TK, weight_NK, bias_N, out_TN): writes the product, whatever `out`'s dtype;
    serves: whether it can take these tensors (alignment); shared: bytes of shared memory that one program takes."""

    name: str
    run: Run
    serves: Serves = lambda *_: True
    shared: int = 0


def _triton(bm: int, bn: int, bk: int, swap: bool, warps: int, stages: int) -> Schedule:
    name = f"triton:{bm}x{bn}x{bk}{'t' if swap else ''}/{warps}w{stages}s"
    run = functools.partial(few_rows.run, bm=bm, bn=bn, bk=bk, swap=swap, warps=warps, stages=stages)
    # one stage more on Hopper where the matrix unit reads from there, which has room for all of these
    return Schedule(name, run, shared=(stages - 1) * (bm + bn) * bk * 2)


def _cublaslt(rank: int) -> Schedule:
    """The heuristic's `rank`-th favourite (0: the first)."""
    return Schedule(f"cublaslt:{rank}", functools.partial(cublaslt.run, rank=rank), cublaslt.serves)


REFERENCE = _triton(**few_rows.REFERENCE)
"""The plainest walk over K; serves every shape, and what the others are compared with."""
_TILED = _triton(128, 128, 64, False, 8, 3)  # many rows where cuBLASLt is missing or forbidden
_CUBLASLT = [_cublaslt(rank) for rank in range(cublaslt.OFFERS)]

# For 16 rows: few columns per program, so that all multiprocessors stream weights with as many bytes in flight as fit.
_STREAM_LONG = _triton(16, 16, 512, False, 2, 4)  # few outputs, large K
_STREAM = _triton(16, 32, 256, False, 4, 6)  # as many programs as multiprocessors
_STREAM_MORE = _triton(16, 64, 64, True, 4, 8)
_STREAM_WIDE = _triton(16, 64, 64, True, 4, 6)  # many outputs

_KNOWN = [s.name for s in (REFERENCE, _TILED, _STREAM_LONG, _STREAM, _STREAM_MORE, _STREAM_WIDE, *_CUBLASLT)]

_MULTIPROCESSORS = 132  # of an H200, on which the rule was measured

_forbidden: set[str] = set()
_chosen: dict[tuple[int, int, int, torch.device], Schedule] = {}
_MOST_CHOICES = 1 << 16  # shapes remembered; beyond it all are forgotten
_stood_in: set[tuple[str, int, int]] = set()  # (schedule, outputs, inputs) of which the log has told


def forbid(name: str) -> None:
    """Never take this schedule again in this process (a probe found that it does not keep the bits).

    Raises:
        ContractError: no schedule has that name.
    """
    if name not in _KNOWN:
        raise ContractError(f"gemm: no schedule {name!r}; there are {', '.join(_KNOWN)}")
    _forbidden.add(name)
    _chosen.clear()


def forbidden() -> frozenset[str]:
    """Names that `forbid` was given, for reports."""
    return frozenset(_forbidden)


def _candidates(rows: int, outputs: int, inner: int, device: torch.device) -> list[Schedule]:
    """The rule's favourite first, the reference last.

    The rule is what one H200 showed on the linears of Qwen3-1.7B, 8B and 30B-A3B: cuBLASLt without split-K is as fast
    as cuBLAS with it (geometric mean 1.00). Up to 16 rows, streaming beats it: by 8 to 17 % where K is 2,048, by 2 to
    6 % where it is 4,096, and by 0 to 1 % beyond, where both wait for the same chain of K / 16 products on the matrix
    unit, each of which needs the last one's accumulator, some 25 ns apart.
    """
    libraries = _CUBLASLT if deciding_device(device).type == "cuda" and cublaslt.library() is not None else []
    if rows > 16:
        return [*libraries, _TILED, REFERENCE]
    if outputs <= 16 * _MULTIPROCESSORS and inner > 2048:
        streams = [_STREAM_LONG, _STREAM, _STREAM_MORE, _STREAM_WIDE]
    elif outputs <= 32 * _MULTIPROCESSORS:
        streams = [_STREAM, _STREAM_MORE, _STREAM_WIDE, _STREAM_LONG]
    elif outputs < 8192:
        streams = [_STREAM_MORE, _STREAM_WIDE, _STREAM, _STREAM_LONG]
    else:
        streams = [_STREAM_WIDE, _STREAM_MORE, _STREAM, _STREAM_LONG]
    return [*(s for s in streams if s.shared <= shared_bytes(device)), *libraries, REFERENCE]


def schedules(rows: int, outputs: int, inner: int, device: torch.device | str = "cuda") -> list[Schedule]:
    """Every schedule that may serve x [rows, inner] times weight [outputs, inner], the reference first."""
    *others, reference = _candidates(rows, outputs, inner, torch.device(device))
    return [reference, *(s for s in others if s.name not in _forbidden)]


def in_use(rows: int, outputs: int, inner: int, device: torch.device) -> list[Schedule]:
    """Those of `schedules` that `gemm` takes as long as nothing more is forbidden, the reference first: its choice and
    what stands in where that cannot take the tensors."""
    using = [REFERENCE, _choose(rows, outputs, inner, device), *_stand_ins(rows)[:1]]
    return list(dict.fromkeys(using))


def _choose(rows: int, outputs: int, inner: int, device: torch.device) -> Schedule:
    for schedule in _candidates(rows, outputs, inner, device):
        if schedule.name not in _forbidden:
            return schedule
    raise _nothing_left(rows, outputs, inner)


def choice(rows: int, outputs: int, inner: int, device: torch.device) -> str:
    """Name of the schedule that serves such a product, for messages."""
    return _choose(rows, outputs, inner, device).name


def get_ready(
    row_counts: tuple[int, ...], outputs: int, inner: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    """Have cuBLASLt load its kernels for products of so many rows each, so that the first of them waits for none."""
    if cublaslt.library() is None:
        return
    x, weight = (torch.empty(n, inner, dtype=torch.bfloat16, device=device) for n in (max(row_counts), outputs))
    out = torch.empty(max(row_counts), outputs, dtype=out_dtype, device=device)
    for rows in row_counts:
        if _choose(rows, outputs, inner, device) in _CUBLASLT:
            cublaslt.load(x[:rows], weight, None, out[:rows])


def _nothing_left(rows: int, outputs: int, inner: int) -> ContractError:
    return ContractError(
        f"gemm: every schedule for {rows} rows, weight ({outputs}, {inner}) is forbidden "
        f"({', '.join(sorted(_forbidden))}); this device does not keep the contract: use rollout=stock trainer=stock"
    )


def _stand_ins(rows: int) -> list[Schedule]:
    """What takes any tensors, the fastest first."""
    able = [REFERENCE] if rows <= 64 else [_TILED, REFERENCE]
    return [schedule for schedule in able if schedule.name not in _forbidden]


def _stand_in(chosen: Schedule, rows: int, outputs: int, inner: int) -> Schedule:
    """Where the chosen schedule cannot take the tensors. Slower, so the log tells of it, once."""
    for schedule in _stand_ins(rows):
        if (told := (chosen.name, outputs, inner)) not in _stood_in:
            _stood_in.add(told)
            logger.warning(
                "gemm: %s cannot serve %d rows with weight (%d, %d) (rows that do not start at multiples of 16 bytes, "
                "a bias of another dtype than the result, or no algorithm in the contract's order): the slower %s "
                "takes its place",
                chosen.name, rows, outputs, inner, schedule.name,
            )  # fmt: skip
        return schedule
    raise _nothing_left(rows, outputs, inner)


def _check(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    if x_TK.dtype != torch.bfloat16 or weight_NK.dtype != torch.bfloat16:
        raise ContractError(f"gemm: x is {x_TK.dtype} and the weight {weight_NK.dtype}; both must be torch.bfloat16")
    if x_TK.dim() != 2 or weight_NK.dim() != 2 or x_TK.shape[1] != weight_NK.shape[1]:
        raise ContractError(f"gemm: x {tuple(x_TK.shape)} does not fit the weight {tuple(weight_NK.shape)}")
    if out_TN.shape != (x_TK.shape[0], weight_NK.shape[0]) or out_TN.dtype not in (torch.bfloat16, torch.float32):
        raise ContractError(
            f"gemm: out {tuple(out_TN.shape)} {out_TN.dtype} does not fit; want "
            f"({x_TK.shape[0]}, {weight_NK.shape[0]}) in torch.bfloat16 or torch.float32"
        )
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ContractError(f"gemm: bias {tuple(bias_N.shape)} does not fit {weight_NK.shape[0]} outputs")
    for name, t in (("x", x_TK), ("the weight", weight_NK), ("out", out_TN), ("bias", bias_N)):
        if t is not None and t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ContractError(f"gemm: {name}'s last dimension must be contiguous, its strides are {t.stride()}")


def gemm(
    x_TK: Tensor,
    weight_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Contract product, no autograd.

    Args:
        x_TK: bfloat16 [T, K], last dimension contiguous (rows may be strided). Any T.
        weight_NK: bfloat16 [N, K], likewise.
        bias_N: [N], contiguous, or None.
        out_dtype: torch.bfloat16 or torch.float32 (the accumulator as it is); `out` overrides it.
        out: [T, N], rows may be strided.

    Raises:
        ContractError: dtypes or shapes that do not fit.
    """
    rows, outputs = x_TK.shape[0], weight_NK.shape[0]
    if out is None:
        out = torch.empty(rows, outputs, dtype=out_dtype, device=x_TK.device)
    _check(x_TK, weight_NK, bias_N, out)
    if rows == 0:
        return out
    key = (rows, outputs, weight_NK.shape[1], x_TK.device)
    schedule = _chosen.get(key)
    if schedule is None:
        if len(_chosen) >= _MOST_CHOICES:
            _chosen.clear()
        schedule = _chosen[key] = _choose(rows, outputs, weight_NK.shape[1], x_TK.device)
    if not schedule.serves(x_TK, weight_NK, bias_N, out):
        schedule = _stand_in(schedule, rows, outputs, weight_NK.shape[1])
    schedule.run(x_TK, weight_NK, bias_N, out)
    return out
