"""Work of the trainer's process that is done while it waits for its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Something under way; what it returns, or raises, comes with `result`."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._future: Future[T] | None = None

    def result(self) -> T:
        """Waits until it is done; one that has not begun begins now."""
        self._wanted.set()
        assert self._future is not None
        return self._future.result()


class Errands:
    """One thread, which does one errand after the other in the order in which they were sent."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0
        self._lock = threading.Lock()

    def send(self, function: Callable[..., T], *args: Any, delay: float = 0.0) -> Errand[T]:
        """Begin with `function(*args)`, after `delay` seconds at the latest; earlier where the result is asked for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tim-errands")
        errand: Errand[T] = Errand()

        def run() -> T:
            if delay:
                errand._wanted.wait(delay)
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                with self._lock:
                    self._seconds += time.perf_counter() - began

        errand._future = self._pool.submit(run)
        return errand

    def seconds(self) -> float:
        """What the errands since the last call took, waiting for their turn not counted."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds
