"""A small interpreter for the Gluon kernels of this project: warp-specialised partitions as threads.

Triton has none for Gluon. This one runs a module's kernels on CPU tensors and checks what a GPU answers with a hang, an
illegal instruction or wrong numbers:
    - barriers count arrivals and bytes by phase; a wait that nobody ends fails after some seconds;
    - a matrix product reads its shared operands only when its wait is reached, so a buffer released too early shows;
    - a bulk copy must start at a multiple of 16 bytes in its innermost dimension; beyond the tensor it fills zeros.
It knows only the operations these kernels use, and nothing of layouts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 20.0  # seconds that a barrier may take
_local = threading.local()


class Pointer:
    """Address of an element, or a tensor of addresses, in a tensor's storage."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + offset)

    def at(self) -> tuple[Tensor, Tensor]:
        size = self.base.untyped_storage().nbytes() // self.base.element_size()
        flat = self.base.as_strided((size,), (1,), 0)
        return flat, torch.as_tensor(self.offset, dtype=torch.int64) + self.base.storage_offset()


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    flat, index = pointer.at()
    if mask is None:
        return flat[index].clone()
    index, mask = torch.broadcast_tensors(index, mask)
    return torch.where(mask, flat[torch.where(mask, index, 0)], torch.tensor(other, dtype=flat.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    flat, index = pointer.at()
    index, mask, value = torch.broadcast_tensors(index, mask, value)
    flat[index[mask]] = value[mask]


class Barrier:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._pending = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._pending = count

    def update(self, arrivals: int, transferred: int) -> None:
        with self._changed:
            self._pending -= arrivals
            self._bytes += transferred
            assert self._pending >= 0, "more arrivals than the barrier counts"
            if self._pending == 0 and self._bytes == 0:
                self._phase += 1
                self._pending = self._count
                self._changed.notify_all()

    def wait(self, parity: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase % 2 != parity, _PATIENCE):
                raise TimeoutError("a barrier was never reached: the partitions wait for each other")


class Shared:
    """Shared memory: values, or barriers."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def index(self, i: Any) -> Any:
        return Shared(self.values[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.values[start : start + length])

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()

    @property
    def barrier(self) -> Barrier:
        return self.values if isinstance(self.values, Barrier) else self.values[0]


class Descriptor:
    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.tensor = base.as_strided(shape, strides)
        self.shape, self.block, self.layout, self.dtype = shape, block_shape, layout, base.dtype
        elements = 1
        for n in block_shape:
            elements *= n
        self.block_type = SimpleNamespace(nbytes=elements * base.element_size())


def _copy(descriptor: Descriptor, coordinates: list[Any], barrier: Shared, destination: Shared) -> None:
    starts = [int(c) for c in coordinates]
    assert starts[-1] * descriptor.tensor.element_size() % 16 == 0, "the innermost coordinate must be 16-byte aligned"
    assert list(destination.values.shape) == list(descriptor.block)
    value = torch.zeros(descriptor.block, dtype=descriptor.dtype)
    stops = [min(s + n, size) for s, n, size in zip(starts, descriptor.block, descriptor.shape, strict=True)]
    if all(stop > start for start, stop in zip(starts, stops, strict=True)):
        source = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        value[tuple(slice(0, b - a) for a, b in zip(starts, stops, strict=True))] = descriptor.tensor[source]
    destination.values.copy_(value)
    barrier.barrier.update(0, -descriptor.block_type.nbytes)


class _Product:
    """A matrix product in flight."""

    def __init__(self, a: Any, b: Shared, accumulator: Tensor, use_acc: bool) -> None:
        self._operands, self.value = (a, b, accumulator, use_acc), None
        _local.flying.append(self)

    def finish(self) -> None:
        a, b, accumulator, use_acc = self._operands
        left = a.values if isinstance(a, Shared) else a
        self.value = left.float() @ b.values.float() + (accumulator if use_acc else 0.0)


def _mma(a: Any, b: Shared, accumulator: Tensor, *, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async
    return _Product(a, b, accumulator, use_acc)


def _mma_wait(outstanding: int, deps: tuple[Any, ...]) -> Any:
    while len(_local.flying) > outstanding:
        _local.flying.pop(0).finish()
    done = []
    for x in deps:
        value = x.value if isinstance(x, _Product) else x
        assert value is not None, "a product is used before its wait"
        done.append(value)
    return done[0] if len(done) == 1 else tuple(done)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any, value: Tensor | None = None) -> Shared:
    if layout == "barrier":
        return Shared([Barrier() for _ in range(shape[0])])
    # never written memory must not look like zeros
    return Shared(value.clone() if value is not None else torch.full(shape, float("nan"), dtype=dtype))


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    program, errors = (_local.program, _local.grid), []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _local.program, _local.grid = program
        _local.flying = []
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _check_static(condition: bool) -> None:
    assert condition


def _select(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def _ignore(*_args: Any, **_kwargs: Any) -> None:
    return None


_layout = SimpleNamespace(get_default_for=_ignore)
_GL = SimpleNamespace(
    constexpr=None,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    program_id=lambda axis: torch.tensor(_local.program[axis], dtype=torch.int32),
    num_programs=lambda axis: _local.grid[axis],
    load=_load,
    store=_store,
    arange=lambda start, stop, layout=None: torch.arange(start, stop, dtype=torch.int32),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    zeros_like=torch.zeros_like,
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    where=_select,
    minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    maximum=torch.maximum,
    max=lambda x, axis: x.amax(axis),
    exp2=torch.exp2,
    log2=torch.log2,
    fma=lambda a, b, c: a * b + c,
    convert_layout=lambda x, layout: x,
    static_range=range,
    static_assert=_check_static,
    NVMMADistributedLayout=_ignore,
    DotOperandLayout=_ignore,
    SliceLayout=_ignore,
    BlockedLayout=_ignore,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
)


class _NVMMASharedLayout:
    def __init__(self, *_args: int) -> None:
        pass

    get_default_for = staticmethod(_ignore)


_GL.NVMMASharedLayout = _NVMMASharedLayout
_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barrier",
    init=lambda barrier, count: barrier.barrier.init(count),
    expect=lambda barrier, nbytes: barrier.barrier.update(1, nbytes),
    arrive=lambda barrier, count: barrier.barrier.update(count, 0),
    wait=lambda barrier, phase, pred=True: barrier.barrier.wait(int(phase)) if pred else None,
)


class _Kernel:
    """A kernel that runs here when launched, or called from another."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            converted = [Pointer(a) if isinstance(a, Tensor) else a for a in arguments]
            _local.grid = (*grid, 1)[:2]
            for x in range(_local.grid[0]):
                for y in range(_local.grid[1]):
                    _local.program = (x, y)
                    self._function(*converted, **constants)

        return launch


@contextlib.contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Gluon kernels of these modules run on CPU tensors inside."""
    replaced = {
        "gl": _GL,
        "mbarrier": _MBARRIER,
        "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
        "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait,
        "fence_async_shared": _ignore,
        "TensorDescriptor": Descriptor,
    }
    before = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in replaced:
                new = replaced[name]
            elif type(value).__name__ == "GluonJITFunction":
                new = _Kernel(value.fn)
            else:
                continue
            before.append((module, name, value))
            setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
