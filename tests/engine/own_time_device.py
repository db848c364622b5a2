"""A device for the graph runner's tests that works beside the host, in a thread of its own, as a GPU does.

Work runs in the order of its submission, each piece after a pause that dice choose. So the host fills buffers while the
device reads others, a rank waits in an exchange while its host goes on, and every rank is at another step: what nothing
but luck orders shows up as other bits. (`DeferredDevice` runs nothing before it is asked to, which an exchange between
ranks would wait for in vain.)
"""

from __future__ import annotations

import queue
import random
import threading
import time

import torch


class OwnTimeDevice:
    """Args: seed: of the dice; pauses: seconds, one of which comes before each piece of work. Behind some marks the
    host is late by several steps of the device."""

    device = torch.device("cpu")
    records_anything = True

    def __init__(self, seed: int = 0, pauses: tuple[float, ...] = (0, 0, 0, 0.001, 0.004)) -> None:
        self._dice, self._host_dice, self._pauses = random.Random(seed), random.Random(seed + 1), pauses
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if isinstance(work, _Mark):
                work.reached.set()
                continue
            time.sleep(self._dice.choice(self._pauses))
            if self._error is None:
                try:
                    with torch.inference_mode():
                        work()
                except BaseException as error:
                    self._error = error

    def submit(self, work) -> None:
        self._work.put(work)

    def mark(self):
        mark = _Mark(self)
        self._work.put(mark)
        return mark

    def capture(self, work):
        return work

    def forget_captures(self) -> None:
        self.mark().wait()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_and_total(self) -> tuple[int, int]:
        self.mark().wait()
        return 8 << 30, 16 << 30

    def peak_bytes(self, work) -> int:
        self.submit(work)
        self.mark().wait()
        return 1 << 20


class _Mark:
    def __init__(self, device: OwnTimeDevice) -> None:
        self._device = device
        self.reached = threading.Event()

    def wait(self) -> None:
        self.reached.wait()
        if self._device._host_dice.random() < 0.05:
            time.sleep(0.2)
        if self._device._error is not None:
            raise self._device._error
