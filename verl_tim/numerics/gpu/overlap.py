"""Launches that overlap: a kernel is resident before the one before it has ended.

A decode step is some three hundred short kernels, and between two of them a GPU idles for about a microsecond.
Programmatic dependent launch (CUDA, Hopper and later) lets a kernel start when the one before has begun; it then must
not read or write anything that a step changes until `begin` has returned, which is when all kernels before have ended.
(Norms read their weights before it: those come from memory, and would stand between the row's sum and its output.)
Measured on an H200 at 16 sequences: 2 % of a step. (Letting a kernel start before its predecessor has begun costs more
than it brings, since waiting programs then take the places of working ones; so does fetching a linear's weights ahead.)

Bits do not change: what a kernel computes and from what stays the same. `overlapping` switches it on for the launches
of this thread; every program of a kernel that takes the option must call `begin`, or the chain of waits has a gap.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_thread = threading.local()


@functools.cache
def _can(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@contextlib.contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """Within, launches of this thread overlap, where the device can."""
    before = getattr(_thread, "on", False)
    _thread.on = device.type == "cuda" and _can(device.index or 0)
    try:
        yield
    finally:
        _thread.on = before


def launch() -> dict[str, Any]:
    """Options of a launch whose kernel has the parameter OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if getattr(_thread, "on", False) else {"OVERLAP": False}


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """First of what touches memory that a step changes: wait for the kernels before, and let the next one start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
