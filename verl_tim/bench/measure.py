"""Time and peak memory of a function, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Measured:
    """What one function took.

    Attributes:
        seconds: wall time, median of the repeats.
        cpu_seconds: CPU time of all threads of this process, median; less disturbed by other work on the machine.
        peak_bytes: memory at its peak over what was held before, of one call; None where the system does not tell.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int | None


def measure(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Measure functions against each other: one call each for memory and to warm up, then `repeats` rounds in turn.

    In turn, so that what disturbs the machine disturbs all of them alike.

    Args:
        functions: by name; each is called without arguments and its result is dropped at once.
        done: called after every call.
    """
    peaks: dict[str, int | None] = {}
    for name, function in functions.items():
        peaks[name] = peak_bytes(function, device)
        done()
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            _wait(device)
            started, cpu_started = time.perf_counter(), time.process_time()
            function()
            _wait(device)
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - cpu_started)
            done()
    return {
        name: Measured(statistics.median(wall[name]), statistics.median(cpu[name]), peaks[name]) for name in functions
    }


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that one call holds at once, over what is held before it.

    On a GPU of PyTorch's allocator; on a CPU of the process, as Linux keeps it (None elsewhere).
    """
    gc.collect()
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        function()
        return None
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what the C library keeps of freed memory would hide what is taken anew
    before = _resident(status, "VmRSS")
    reset.write_text("5")  # man 5 proc: sets the peak back to what is resident now
    function()
    return max(_resident(status, "VmHWM") - before, 0)


def _resident(status: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
