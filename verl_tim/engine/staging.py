"""Small host arrays on their way to the device: packed into one buffer, sent as one copy.

Buffers rotate, and a buffer is filled again only when the copy out of it has run; with more buffers than steps in
flight that never makes the host wait.
"""

from __future__ import annotations

import numpy as np
import torch

from verl_tim.engine.device import Device, Mark

_ALIGNMENT = 64  # bytes: any dtype may start there


class _Slot:
    def __init__(self, device: Device, nbytes: int) -> None:
        self.host = device.host_buffer(nbytes)
        self.array = self.host.numpy()
        self.there = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
        self.sent: Mark | None = None


class Staging:
    """Rotating pairs of a host and a device buffer.

    Args:
        nbytes: first size of a buffer; one that is too small is replaced by a larger one.
        depth: buffers; at least one more than steps that may be in flight.
    """

    def __init__(self, device: Device, nbytes: int, depth: int) -> None:
        self._device = device
        self._slots = [_Slot(device, nbytes) for _ in range(depth)]
        self._turn = 0
        self._used = 0
        self._slot = self._slots[0]

    def begin(self, nbytes: int) -> None:
        """Start a new packet of at most ``nbytes`` in up to 64 arrays."""
        nbytes += 64 * _ALIGNMENT
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot.sent is not None:
            slot.sent.wait()
        if len(slot.array) < nbytes:
            slot = self._slots[self._turn] = _Slot(self._device, max(nbytes, 2 * len(slot.array)))
        self._slot, self._used = slot, 0

    def put(self, array: np.ndarray) -> torch.Tensor:
        """Add an array; where it will be on the device once :meth:`send`'s copy has run."""
        end = self._used + array.nbytes
        assert end <= len(self._slot.array), "a packet is larger than announced"
        target = self._slot.array[self._used : end].view(array.dtype).reshape(array.shape)
        np.copyto(target, array)
        there = self._slot.there[self._used : end].view(_TORCH[array.dtype.str[1:]]).view(array.shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return there

    def send(self) -> None:
        """Submit the copy of what was put."""
        slot, used = self._slot, self._used
        if used:
            self._device.submit(lambda: _copy(slot.there[:used], slot.host[:used]))
            slot.sent = self._device.mark()


_TORCH = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
