"""cuBLASLt products that never split K, without touching any of torch's global settings.

torch can deny split-K only process-wide (`allow_bf16_reduced_precision_reduction`) and asks the library's heuristic on
every call. Here the heuristic is asked once per shape, with no workspace and no reduction scheme allowed, and each
algorithm it offers is asked for its split before it is used. Nothing leaks into other code, and a call is one C call.

A split of 1 is not enough: some algorithms add two parts of K inside one program and call that no split (seen: 60
outputs, few rows). So each is admitted by what it does: once per process, on operands whose products cancel
(`cancelling`), it must have the bits of the plain Triton walk over K.

The product: y = x W^T (+ b) with bfloat16 operands, float32 accumulation, bfloat16 or float32 out. In the library's
column-major words: D[N, T] = op_T(W[K, N]) B[K, T].
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu import few_rows
from verl_tim.numerics.gpu.cancelling import cancelling

logger = logging.getLogger(__name__)

# Constants of cublasLt.h and library_types.h (CUDA 12 and 13).
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_OP_T, _EPILOGUE_BIAS = 1, 4
_PREF_WORKSPACE, _PREF_REDUCTION, _PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ALGO_SPLIT_K = 2

_DTYPES = {torch.bfloat16: _R_16BF, torch.float32: _R_32F}
_WORD = {torch.bfloat16: torch.int16, torch.float32: torch.int32}  # of the same size, to compare bits
_ALIGNMENT = 16  # bytes that pointers and row strides must keep
OFFERS = 8  # algorithms that the heuristic is asked for
_MOST_PLANS = 8192  # shapes remembered; beyond it all are forgotten

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ONE_AT, _ZERO_AT = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that this torch links, or None (no CUDA build, or a library of another name)."""
    if torch.version.cuda is None:
        return None
    try:
        lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    # handle, desc, alpha, A and layout, B and layout, beta, C and layout, D and layout, algo, workspace, bytes, stream
    lib.cublasLtMatmul.argtypes = (*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
    return lib


class _StatusError(Exception):
    """A call of the library failed. Whoever knows the product says of which (`_of_product`)."""


def _check(status: int, what: str) -> None:
    if status != 0:
        raise _StatusError(f"{what} gave status {status}")


def _of_product(error: _StatusError, schedule: str, x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> ContractError:
    return ContractError(
        f"linear, schedule {schedule}: cuBLASLt's {error} for x {tuple(x_TK.shape)}, weight {tuple(weight_NK.shape)}, "
        f"out {out_TN.dtype}: report the device, or take rollout=stock trainer=stock (as a library: "
        "gemm.forbid('cublaslt:0') and each other cublaslt schedule takes Triton's)"
    )


def _new(create: str, *args: Any) -> int:
    """Address of a new library object."""
    lib, made = library(), ctypes.c_void_p()
    _check(getattr(lib, create)(ctypes.byref(made), *args), create)
    assert made.value is not None
    return made.value


def _set(setter: str, target: int, attribute: int, value: Any) -> None:
    lib, size = library(), ctypes.c_size_t(ctypes.sizeof(value))
    status = getattr(lib, setter)(ctypes.c_void_p(target), ctypes.c_int(attribute), ctypes.byref(value), size)
    _check(status, f"{setter}({attribute})")


@functools.cache
def _handle(device: int) -> int:
    with torch.cuda.device(device):
        return _new("cublasLtCreate")


class _Product:
    """The library's objects for one product: `desc` of the operation, `layouts` of weight, x and out.

    They end with this object, since a run meets ever new row counts. A launch that is under way does not read them.
    """

    def __init__(self, desc: int, layouts: tuple[int, int, int]) -> None:
        self.desc, self.layouts = desc, layouts
        weakref.finalize(self, _destroy, library(), desc, layouts).atexit = False


def _destroy(lib: Any, desc: int, layouts: tuple[int, int, int]) -> None:
    lib.cublasLtMatmulDescDestroy(ctypes.c_void_p(desc))
    for layout in layouts:
        lib.cublasLtMatrixLayoutDestroy(ctypes.c_void_p(layout))


class Plan:
    """One product and one algorithm; `run` takes tensors of the sizes and strides it was made for."""

    def __init__(self, handle: int, product: _Product, algo: Any) -> None:
        lib = library()
        assert lib is not None
        self._matmul = lib.cublasLtMatmul
        self._product = product  # kept: its end is that of what the addresses below name
        self._handle, self._desc, (self._a, self._b, self._d) = handle, product.desc, product.layouts
        self.algo, self._algo_at = algo, ctypes.addressof(algo)

    @property
    def identity(self) -> bytes:
        """What the library knows of the algorithm: kernel, tile, stages, split, swizzle."""
        return bytes(self.algo)

    def run(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
        if bias_N is not None:
            _set("cublasLtMatmulDescSetAttribute", self._desc, _DESC_BIAS, ctypes.c_void_p(bias_N.data_ptr()))
        out = out_TN.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(x_TK.device.index)
        status = self._matmul(
            self._handle, self._desc, _ONE_AT, weight_NK.data_ptr(), self._a, x_TK.data_ptr(), self._b, _ZERO_AT,
            out, self._d, out, self._d, self._algo_at, None, 0, stream,
        )  # fmt: skip
        if status != 0:
            _check(status, "cublasLtMatmul")

    def fits(self) -> bool:
        """Whether the algorithm can serve this plan's sizes without a workspace."""
        lib, result = library(), _Heuristic()
        assert lib is not None
        pointers = (ctypes.c_void_p(p) for p in (self._handle, self._desc, self._a, self._b, self._d, self._d))
        status = lib.cublasLtMatmulAlgoCheck(*pointers, self.algo, ctypes.byref(result))
        return status == 0 and result.workspace == 0

    def split(self) -> int:
        """Parts that the algorithm cuts K into: 1, or 0 where it knows no splitting."""
        lib, value, written = library(), ctypes.c_int32(0), ctypes.c_size_t(0)
        assert lib is not None
        status = lib.cublasLtMatmulAlgoConfigGetAttribute(
            self.algo, ctypes.c_int(_ALGO_SPLIT_K), ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
        )
        _check(status, "cublasLtMatmulAlgoConfigGetAttribute")
        return value.value


def _describe(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> _Product:
    desc = _new("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F))
    _set("cublasLtMatmulDescSetAttribute", desc, _DESC_TRANSA, ctypes.c_int32(_OP_T))
    if bias_N is not None:
        _set("cublasLtMatmulDescSetAttribute", desc, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
    layouts = tuple(
        _new(
            "cublasLtMatrixLayoutCreate",
            ctypes.c_int(_DTYPES[t.dtype]),
            ctypes.c_uint64(t.shape[1]),
            ctypes.c_uint64(t.shape[0]),
            ctypes.c_int64(t.stride(0) if t.shape[0] > 1 else t.shape[1]),
        )
        for t in (weight_NK, x_TK, out_TN)
    )
    return _Product(desc, layouts)  # type: ignore[arg-type]


def plans(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor, count: int) -> list[Plan]:
    """Up to `count` plans for these sizes and strides, the heuristic's favourite first; none says that it splits K."""
    lib, handle = library(), _handle(x_TK.device.index)
    assert lib is not None
    product = _describe(x_TK, weight_NK, bias_N, out_TN)
    a, b, d = product.layouts
    preference = _new("cublasLtMatmulPreferenceCreate")
    _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREF_WORKSPACE, ctypes.c_uint64(0))
    _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREF_REDUCTION, ctypes.c_uint32(0))
    for alignment in _PREF_ALIGNMENTS:
        _set("cublasLtMatmulPreferenceSetAttribute", preference, alignment, ctypes.c_uint32(_ALIGNMENT))
    found, results = ctypes.c_int(0), (_Heuristic * count)()
    pointers = (ctypes.c_void_p(p) for p in (handle, product.desc, a, b, d, d, preference))
    status = lib.cublasLtMatmulAlgoGetHeuristic(*pointers, ctypes.c_int(count), results, ctypes.byref(found))
    lib.cublasLtMatmulPreferenceDestroy(ctypes.c_void_p(preference))
    _check(status, "cublasLtMatmulAlgoGetHeuristic")
    offered = [
        Plan(handle, product, (ctypes.c_uint64 * 8)(*result.algo))
        for result in results[: found.value]
        if result.state == 0 and result.workspace == 0
    ]
    return [plan for plan in offered if plan.split() <= 1]


def load(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """Run whatever the library offers for these tensors, admitted or not: it loads a kernel from its file at the first
    use. `out_TN` is left with nothing that means something."""
    try:
        for plan in plans(x_TK, weight_NK, bias_N, out_TN, OFFERS):
            plan.run(x_TK, weight_NK, bias_N, out_TN)
    except _StatusError as error:
        raise _of_product(error, "cublaslt", x_TK, weight_NK, out_TN) from error


# -- admission ---------------------------------------------------------------------------------------------------------

_MOST_ROWS, _MOST_OUTPUTS = 512, 4096  # of a trial: an output's order does not depend on how many there are
_BATCH = 64  # what a smaller trial keeps of the sizes: their remainder, which decides alignment

_admitted: dict[tuple[Any, ...], bool] = {}
_plans: dict[tuple[Any, ...], list[Plan]] = {}


def _shrunk(size: int, most: int) -> int:
    return size if size <= most else most + size % _BATCH


def _objection(plan: Plan, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> str | None:
    """Why the plan's algorithm cannot be used; None where it has the bits of the reference order, on a product of at
    most the trial's size."""
    (rows, inner), outputs, device = x_TK.shape, weight_NK.shape[0], x_TK.device
    x, weight = cancelling(_shrunk(rows, _MOST_ROWS), _shrunk(outputs, _MOST_OUTPUTS), inner, device)
    got, want = (torch.full((len(x), len(weight)), torch.nan, dtype=out_TN.dtype, device=device) for _ in range(2))
    bias = None if bias_N is None else torch.zeros(len(weight), dtype=bias_N.dtype, device=device)
    trial = Plan(_handle(device.index), _describe(x, weight, bias, got), plan.algo)
    if not trial.fits():
        return "cannot be tried: it does not serve the trial's sizes without a workspace"
    trial.run(x, weight, bias, got)
    few_rows.run(x, weight, bias, want, **few_rows.REFERENCE)
    differing = int((got.view(_WORD[got.dtype]) != want.view(_WORD[got.dtype])).sum())
    return f"adds in another order: {differing} of {got.numel()} values differ" if differing else None


def _rehearse(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """On the meta device: what the trial of an algorithm for these tensors launches beside the library."""
    (rows, inner), outputs, device = x_TK.shape, weight_NK.shape[0], x_TK.device
    x, weight = cancelling(_shrunk(rows, _MOST_ROWS), _shrunk(outputs, _MOST_OUTPUTS), inner, device)
    bias = None if bias_N is None else torch.empty(len(weight), dtype=bias_N.dtype, device=device)
    few_rows.run(
        x, weight, bias, torch.empty(len(x), len(weight), dtype=out_TN.dtype, device=device), **few_rows.REFERENCE
    )


def _is_admitted(plan: Plan, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> bool | None:
    """None: not known, and not to be found out now."""
    key = (plan.identity, x_TK.shape[1], out_TN.dtype, bias_N is None, x_TK.device.index)
    if key not in _admitted:
        if torch.cuda.is_current_stream_capturing():
            return None
        objection = _objection(plan, x_TK, weight_NK, bias_N, out_TN)
        _admitted[key] = objection is None
        if objection is not None:
            logger.info(
                "cuBLASLt's algorithm %s, offered for %d rows and weight %s, is not used; it %s",
                plan.identity[:16].hex(), len(x_TK), tuple(weight_NK.shape), objection,
            )  # fmt: skip
    return _admitted[key]


def _aligned(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> bool:
    """Whether pointers and strides are aligned, and the bias (if any) has the dtype of `out`."""
    for t in (x_TK, weight_NK, out_TN):
        size = t.element_size()
        if t.data_ptr() % _ALIGNMENT or (t.stride(0) * size) % _ALIGNMENT:
            return False
    return bias_N is None or (bias_N.dtype == out_TN.dtype and bias_N.data_ptr() % _ALIGNMENT == 0)


def _key(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> tuple[Any, ...]:
    return (
        *x_TK.shape, weight_NK.shape[0], x_TK.stride(0), weight_NK.stride(0), out_TN.stride(0), out_TN.dtype,
        bias_N is None, x_TK.device.index,
    )  # fmt: skip


def _offered(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> list[Plan]:
    """The admitted plans for these sizes and strides, kept for the next call."""
    key = _key(x_TK, weight_NK, bias_N, out_TN)
    offered = _plans.get(key)
    if offered is None:
        verdicts = [(plan, _is_admitted(plan, x_TK, weight_NK, bias_N, out_TN))
                    for plan in plans(x_TK, weight_NK, bias_N, out_TN, OFFERS)]  # fmt: skip
        offered = [plan for plan, verdict in verdicts if verdict]
        if all(verdict is not None for _, verdict in verdicts):
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = offered
    return offered


def serves(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> bool:
    """Whether the library has an admitted algorithm for these tensors.

    The first call with an algorithm that this process has not met tries it and waits for the device; while a CUDA graph
    is captured such an algorithm counts as not admitted. In a rehearsal (`rehearsal`) the library is taken to have one.
    """
    if not _aligned(x_TK, weight_NK, bias_N, out_TN):
        return False
    if x_TK.is_meta:
        _rehearse(x_TK, weight_NK, bias_N, out_TN)
        return True
    try:
        return bool(_offered(x_TK, weight_NK, bias_N, out_TN))
    except _StatusError as error:
        raise _of_product(error, "cublaslt", x_TK, weight_NK, out_TN) from error


def run(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor, rank: int = 0) -> None:
    """Write x W^T (+ bias) to `out_TN`; the tensors must be such as `serves` accepts.

    rank: which of the heuristic's admitted favourites runs, 0 the first; the last one where there are fewer.

    Raises:
        ContractError: the library has no algorithm, or fails; names the schedule and the shapes.
    """
    if x_TK.is_meta:
        return  # the library brings its kernels: nothing to compile
    try:
        _run(x_TK, weight_NK, bias_N, out_TN, rank)
    except _StatusError as error:
        raise _of_product(error, f"cublaslt:{rank}", x_TK, weight_NK, out_TN) from error


def _run(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor, rank: int) -> None:
    offered = _offered(x_TK, weight_NK, bias_N, out_TN)
    if not offered:
        raise ContractError(
            f"cuBLASLt has no algorithm in the contract's order for x {tuple(x_TK.shape)}, weight "
            f"{tuple(weight_NK.shape)}, though the probe drops such ones: report the device, or take rollout=stock "
            "trainer=stock (as a library: gemm.forbid('cublaslt:0') and each other cublaslt schedule)"
        )
    offered[min(rank, len(offered) - 1)].run(x_TK, weight_NK, bias_N, out_TN)
