"""The numerics contract: the constants that decide bits, and the few helpers every operation shares.

An operation may be scheduled in any way that keeps its *order of rounding*. The constants below are part of that order
(`KEY_BLOCK`, `CHUNK_KEYS`, `VOCAB_TILE`) or are what the schedules need to keep it on real libraries (`ROW_FLOOR`,
`COLUMN_FLOOR`, `ALIGNMENT_BYTES`: BLAS picks other kernels for few rows, odd column counts and unaligned operands).
`probe.py` checks on the running device that the schedules in use obey the order.

Dtypes: a contract model has one operand dtype, float32 or bfloat16 (on a GPU bfloat16 only). Products are formed from
operands of that dtype, accumulated in float32, and rounded once to it at the end of each operation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

CONTRACT_VERSION = 1
KEY_BLOCK = 64
"""Keys per online-softmax block, counted from absolute position 0."""
CHUNK_KEYS = 512
"""Keys per chunk. A chunk has its own (max, sum, acc); chunks are merged in ascending order."""
VOCAB_TILE = 4096
"""Vocabulary columns per log-sum-exp tile on a CPU, merged in ascending order. A GPU has `gpu/vocabulary_tile.TILE`."""
ROW_FLOOR = 8
"""Rows of every GEMM on a CPU are padded to a multiple of this."""
COLUMN_FLOOR = 64
"""Output columns of every GEMM on a CPU are padded to a multiple of this."""
ALIGNMENT_BYTES = 64
"""GEMM operands on a CPU start at a multiple of this; others are copied first."""

OPERAND_DTYPES = (torch.float32, torch.bfloat16)

# device type -> (name, whose suffix is the base of the attention exponent; operand dtypes)
_DEVICE_SCHEDULES = {"cpu": ("cpu-e", OPERAND_DTYPES), "cuda": ("cuda-2", (torch.bfloat16,))}
_MINIMUM_CAPABILITY = (8, 0)  # bfloat16 matrix units


class ContractError(ValueError):
    """Input or device that the contract cannot serve exactly. The message names the operation and the remedy."""


def require_operands(op: str, **tensors: torch.Tensor) -> None:
    """Raise `ContractError` unless all have one dtype, and that is an operand's (`OPERAND_DTYPES`)."""
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) > 1 or not dtypes.issubset(OPERAND_DTYPES):
        found = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise ContractError(f"{op}: {found}; all must be {' or '.join(map(str, OPERAND_DTYPES))}")


def require_heads(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise `ContractError` unless keys and values [..., kv heads, head_dim] fit each other and the queries."""
    heads, num_kv_heads = q_THD.shape[1], k.shape[-2]
    if k.shape != v.shape or k.shape[-1] != q_THD.shape[2]:
        raise ContractError(f"attention: q {tuple(q_THD.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if heads % num_kv_heads:
        raise ContractError(f"attention: {heads} query heads are not a multiple of {num_kv_heads} kv heads")


def contract_id(device: torch.device | str, dtype: torch.dtype, attention: str = f"chunk{KEY_BLOCK}") -> str:
    """Name of everything that decides bits, for manifests: equal ids on both sides are necessary for equal bits.

    `attention`: the attention contract in use (`attention.resolve_attention`). Returns e.g.
    ``chunk64/cpu-e/bfloat16/1``; on a GPU its architecture stands in the device's part (``cuda-2-sm90``). Raises
    `ContractError` for a device or dtype without a contract.
    """
    device = torch.device(device)
    if device.type not in _DEVICE_SCHEDULES:
        raise ContractError(
            f"numerics contract: no schedules for device type {device.type!r} (have: {', '.join(_DEVICE_SCHEDULES)}); "
            "use one of these, or rollout=stock trainer=stock on this device"
        )
    schedule, dtypes = _DEVICE_SCHEDULES[device.type]
    if dtype not in dtypes:
        raise ContractError(
            f"numerics contract: dtype {dtype} is not covered on {device.type}; use {' or '.join(map(str, dtypes))}"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ContractError("numerics contract: device 'cuda' was asked for, but this process sees no GPU")
        capability = torch.cuda.get_device_capability(device)
        if capability < _MINIMUM_CAPABILITY:
            raise ContractError(
                f"numerics contract: this GPU has compute capability {capability[0]}.{capability[1]}, its bfloat16 "
                "schedules need 8.0 (Ampere) or newer; use rollout=stock trainer=stock on it"
            )
        schedule += f"-sm{capability[0]}{capability[1]}"
    return f"{attention}/{schedule}/{str(dtype).removeprefix('torch.')}/{CONTRACT_VERSION}"


_interpreted = False


@contextlib.contextmanager
def interpreted_schedules() -> Iterator[None]:
    """Let CPU tensors take the GPU schedules, for tests under Triton's interpreter (TRITON_INTERPRET=1).

    Their logic and their wiring then run where there is no GPU; bits are those of the interpreter.
    """
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


_stood_for: ContextVar[torch.device | None] = ContextVar("stood_for", default=None)


@contextlib.contextmanager
def meta_stands_for(device: torch.device) -> Iterator[None]:
    """Within, this thread's tensors on the meta device choose their schedules as on `device` (`gpu/rehearsal.py`)."""
    token = _stood_for.set(device)
    try:
        yield
    finally:
        _stood_for.reset(token)


def deciding_device(x: Tensor | torch.device) -> torch.device:
    """The device whose schedules a tensor (or all tensors of a device) take: its own, or what meta stands for."""
    device = x if isinstance(x, torch.device) else x.device
    return (_stood_for.get() or device) if device.type == "meta" else device


def on_gpu(x: Tensor | torch.device) -> bool:
    """Whether a tensor (or all tensors of a device) take the GPU schedules."""
    return deciding_device(x).type == "cuda" or _interpreted


def overlapped_launches(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within, this thread's contract kernels overlap on a GPU that can (`gpu/overlap.py`). No bit changes.

    For decode steps, whose kernels are short; everything that is launched must be the contract's or PyTorch's.
    """
    return kernels("overlap").overlapping(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def kernels(op: str) -> Any:
    """The GPU schedules of an operation, `verl_tim.numerics.gpu.<op>`; imported when a GPU tensor first needs them.

    Raises `ContractError` where Triton is missing.
    """
    try:
        return importlib.import_module(f"verl_tim.numerics.gpu.{op}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise ContractError(
            f"numerics contract: the GPU schedules of {op} need Triton; install the triton that belongs to this torch"
        ) from error


def ceil_to(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple


def pad_dim0(x: Tensor, multiple: int) -> Tensor:
    """`x` with zero rows appended so that its first size is a multiple of `multiple`; `x` itself when it already is."""
    missing = -x.shape[0] % multiple
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def operand(x: Tensor) -> Tensor:
    """`x` as a GEMM operand of the CPU reference: float32, contiguous and aligned."""
    x = x.to(torch.float32).contiguous()
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


def check_process(device: torch.device | str) -> None:
    """Raise `ContractError` when a global setting of this process changes float32 arithmetic.

    Two processes that are each consistent still disagree when only one of them lets the library compute float32
    products by another kernel, or flushes denormals to zero.
    """
    if torch.device(device).type != "cpu":
        return  # the GPU schedules set what they depend on around their own calls
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if precision not in ("none", "ieee"):
        raise ContractError(
            f"float32 matrix products may use {precision} in this process; call "
            "torch.set_float32_matmul_precision('highest') and leave torch.backends.mkldnn.*.fp32_precision at 'none'"
        )
    if float(torch.tensor(1e-40) * torch.tensor(1.0)) == 0.0:
        raise ContractError("denormals are flushed to zero in this process; call torch.set_flush_denormal(False)")


@contextlib.contextmanager
def exact_region(device_type: str) -> Iterator[None]:
    """Autocast off: a contract op chooses every dtype itself, and an autocast around it would change them."""
    if torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type=device_type, enabled=False):
            yield
    else:
        yield
