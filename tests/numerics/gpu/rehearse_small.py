"""What a rehearsal does to Triton, for a GPU that need not be there: `python -m tests.numerics.gpu.rehearse_small`.

In a process of its own, without Triton's interpreter. Prints one JSON object of what was seen.
"""

from __future__ import annotations

import json
import threading

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime import _async_compile, driver
from triton.runtime.jit import JITFunction

from verl_tim.numerics.gpu.rehearsal import META, rehearse

from .compile_all import _Driver


@triton.jit
def _copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def _broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


def main() -> None:
    gpu = _Driver(90)
    driver.set_active(gpu)
    launches: list[tuple[str, bool]] = []
    run = JITFunction.run

    def stubbed(self: JITFunction, *args, grid, warmup, **options):
        launches.append((self.__name__, warmup))
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = stubbed
    cuda = torch.device("cuda", 0)
    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda *, fn, is_manual_warmup, **_: compiled.append(fn.name)

    def copies(device: torch.device) -> None:
        for n in (64, 48, 7):  # 64 and 48 are one kernel, 7 is another
            x = torch.empty(n, device=device)
            _copy[(1,)](x, torch.empty_like(x), n, BLOCK=64)

    def with_another_thread() -> None:
        copies(META)
        other = threading.Thread(target=copies, args=(torch.device("cpu"),))
        other.start()
        other.join()

    def broken() -> None:
        copies(META)
        _broken[(1,)](torch.empty(8, dtype=torch.int32, device=META), BLOCK=8)

    seen: dict[str, object] = {}
    for time in ("ready", "again"):
        seen[time] = rehearse(cuda, lambda: copies(META))
    seen["launchers"] = list(gpu.launchers)
    before = len(compiled)
    copies(torch.device("cpu"))
    seen["compiled_at_launch"] = len(compiled) - before
    launches.clear()
    rehearse(cuda, with_another_thread)
    seen["warm_ups"] = [warmup for _, warmup in launches]
    try:
        rehearse(cuda, broken)
    except CompilationError as error:
        seen["error"] = str(error)
    seen["left_active"] = _async_compile.active_mode.get() is not None
    seen["put_back"] = JITFunction.run is stubbed
    seen["ready_after_error"] = rehearse(cuda, lambda: copies(META))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
