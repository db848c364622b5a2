"""Kernels compiled side by side, before the work that launches them.

Triton compiles a kernel at its first launch, and the launch waits for it: some forty kernels one after another, each a
few tenths of a second. A *rehearsal* runs the work's own code first, on the meta device, whose tensors have shapes and
no values: a launch there only notes what must be compiled, and computes nothing. So there is no list of kernels to
keep. Threads then compile what was noted, and the work finds it in Triton's cache; a kernel that the rehearsal missed
is compiled at its launch, as without one. Schedules are chosen as on the GPU that is rehearsed for
(`contract.deciding_device`).

A kernel's first launch also waits for a C compiler, which makes the function that hands its arguments to the driver;
threads make those, too, one for all kernels of one signature.

Threads serve, since LLVM's passes and the assembler, four fifths of a compile, do not hold Python's lock, and the C
compiler is a process. The fifth that does is Triton's walk over the source, and LLVM's linking of CUDA's device
library; it sets the pace where there are many cores.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from tqdm import tqdm
from triton import AsyncCompileMode, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from verl_tim.numerics import collection
from verl_tim.numerics.contract import meta_stands_for

META = torch.device("meta")
_MOST_THREADS = 32

_one_at_a_time = threading.Lock()  # in a process: a rehearsal replaces a method of Triton's while it lasts
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


def threads() -> int:
    """How many kernels are compiled at a time: one per core that this process may use."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class _Noted(Executor):
    """Compilations to come. None begins during the rehearsal, whose every call of torch would wait for Python's lock
    as soon as threads hold it."""

    def __init__(self) -> None:
        self._compilations: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._launchers = _Launchers()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._compilations.append((future, lambda: fn(*args, **kwargs)))
        return future

    def compile(self, title: str) -> None:
        """All of them; errors stay in their futures."""
        with (
            tqdm(total=len(self._compilations), desc=title, unit="kernel", disable=None, delay=1.0) as bar,
            ThreadPoolExecutor(threads(), thread_name_prefix="compile") as pool,
        ):
            for future, run in self._compilations:
                future.add_done_callback(lambda _: bar.update())
                pool.submit(self._settle, future, run)

    def give_up(self, error: BaseException) -> None:
        """Nobody compiles what is left: whoever waits for it, as Triton does when its mode ends, gets the error."""
        for future, _ in self._compilations:
            if not future.done():
                future.set_exception(error)

    def _settle(self, future: Future[Any], run: Callable[[], Any]) -> None:
        try:
            result = run()
            if isinstance(result, CompiledKernel):
                self._launchers.make(result)
            future.set_result(result)
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)


class _Launchers:
    """The functions that hand a kernel's arguments to the driver. Their source depends on the signature alone, by which
    a lock keeps two threads from running the C compiler for the same one."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def make(self, kernel: CompiledKernel) -> None:
        """Thrown away, as it belongs to no device yet; Triton finds what was compiled in its cache on disk."""
        source, metadata = kernel.src, kernel.metadata
        signature = f"{list(source.signature.values())} {getattr(metadata, 'tensordesc_meta', None)}"
        with self._guard:
            lock = self._locks.setdefault(signature, threading.Lock())
        with lock:
            driver.active.launcher_cls(source, metadata)


@contextlib.contextmanager
def _launches_only_noted() -> Iterator[None]:
    """Patch of Triton (3.6): launches of a thread that rehearses are warm-ups; those of other threads stay launches.

    Triton has `kernel.warmup` beside `kernel[grid]`, but no way to say once that all launches of a piece of work are
    meant.
    """
    run = JITFunction.run

    def run_or_warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _rehearsing.get(), **options)

    JITFunction.run = run_or_warm_up
    try:
        yield
    finally:
        JITFunction.run = run


def _get_ready(first: Callable[[], None]) -> None:
    """What Triton does at its first launch and takes half a second for, beside `first`."""
    with ThreadPoolExecutor(2, thread_name_prefix="triton") as pool:
        # A C compiler makes the module through which Triton talks to the driver; Triton's own files, which are large,
        # are hashed, as part of every kernel's name in the cache.
        begun = [pool.submit(lambda: driver.active), pool.submit(triton_key)]
        first()
        for future in begun:
            future.result()


def rehearse(
    device: torch.device,
    work: Callable[[], None],
    *,
    first: Callable[[], None] = lambda: None,
    title: str = "compiling kernels",
) -> int:
    """Compile everything that `work` launches and this process has not yet, for the current GPU, in `threads()`.

    Args:
        device: whose schedules the work's meta tensors take.
        work: all its tensors that kernels see are on the meta device; it reads no value of one. What takes longest to
            compile should come first.
        first: what is done before, launches nothing, and can be done while Triton gets ready: imports.
        title: of the progress bar, which appears on a terminal (standard error) after a second.

    Returns:
        How many kernels were made ready: compiled, or found in Triton's cache on disk. 0 in Triton's interpreter.

    Raises:
        What `work` raises; what Triton raises at the launch of a kernel that does not compile, once the others are
        ready.
    """
    if knobs.runtime.interpret:
        return 0

    def rehearsal() -> int:
        _rehearsing.set(True)
        noted = _Noted()
        with AsyncCompileMode(noted) as mode:
            try:
                _get_ready(first)
                with meta_stands_for(device), _launches_only_noted():
                    work()
                noted.compile(title)
            except BaseException as error:
                noted.give_up(error)
                raise
        return len(mode.future_kernels)

    # `paused`: the compiler makes many objects, for each thousand of which the collector would walk the heap.
    # `catch_warnings`: Triton's compiler changes the filters, which is not safe in threads; they are put back here.
    with _one_at_a_time, collection.paused(), warnings.catch_warnings():
        # A context of its own: Triton 3.6 leaves its mode active where a kernel does not compile.
        return copy_context().run(rehearsal)
