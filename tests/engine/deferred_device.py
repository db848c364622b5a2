"""A device for the graph runner's tests without a GPU: what is submitted runs when it suits it, on the CPU, in order.

By default nothing runs before a mark is waited for, and then only up to it. So a host buffer that is filled again too
early, a value read too early, or work that looks at host state when it runs instead of when it was submitted, shows up
as a wrong token. With ``early`` a submission may run everything at once, as a fast device does: then results that are
overwritten before the host has read them show up. A "graph" is a callable that was recorded; it is called anew in every
replay.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch


class DeferredDevice:
    """Args: early: how often a submission makes everything submitted run, in [0, 1].

    Attributes: submitted, ran: pieces of work; captures: recordings made; waits: marks that had work before them.
    """

    device = torch.device("cpu")
    records_anything = True

    def __init__(self, *, early: float = 0.0, free: int = 8 << 30, total: int = 16 << 30, peak: int = 1 << 20) -> None:
        self.queue: deque = deque()
        self.early, self.dice = early, np.random.default_rng(0)
        self.submitted = self.ran = self.captures = self.waits = 0
        self.live_captures = 0
        self.memory = (free, total)
        self.peak = peak
        self.capture_bytes = 0  # each recording takes so much

    def submit(self, work) -> None:
        self.submitted += 1
        self.queue.append(work)
        if self.early and self.dice.random() < self.early:
            self._run(self.submitted)

    def mark(self):
        return _Mark(self, self.submitted)

    def run_until(self, number: int) -> None:
        if self.ran < number:
            self.waits += 1
        self._run(number)

    def _run(self, number: int) -> None:
        while self.ran < number:
            self.ran += 1
            with torch.inference_mode():
                self.queue.popleft()()

    def capture(self, work):
        self.captures += 1
        self.live_captures += 1
        return work

    def forget_captures(self) -> None:
        self.live_captures = 0

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_and_total(self) -> tuple[int, int]:
        self.run_until(self.submitted)
        return self.memory[0] - self.live_captures * self.capture_bytes, self.memory[1]

    def peak_bytes(self, work) -> int:
        with torch.inference_mode():
            work()
        return self.peak


class _Mark:
    def __init__(self, device: DeferredDevice, number: int) -> None:
        self._device, self._number = device, number

    def wait(self) -> None:
        self._device.run_until(self._number)
