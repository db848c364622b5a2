"""What a GPU has, as far as schedules depend on it."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

from verl_tim.numerics.contract import deciding_device


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 in the interpreter."""
    return _multiprocessors(deciding_device(device))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take; that of an H100 in the interpreter."""
    return _shared_bytes(deciding_device(device))


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 << 10
    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
