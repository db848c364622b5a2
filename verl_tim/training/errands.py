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

    def __init__(self, future: Future[T], wanted: threading.Event, waited: Callable[[float], None]) -> None:
        self._future, self._wanted, self._waited = future, wanted, waited

    def result(self) -> T:
        """Waits until it is done; one that has not begun begins now."""
        began = time.perf_counter()
        self._wanted.set()
        try:
            return self._future.result()
        finally:
            self._waited(time.perf_counter() - began)


class Errands:
    """One thread, which does one errand after the other in the order in which they were sent."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # of work, less those in which somebody waited for it
        self._lock = threading.Lock()

    def send(self, function: Callable[..., T], *args: Any, delay: float = 0.0) -> Errand[T]:
        """Begin with `function(*args)`, after `delay` seconds at the latest; earlier where the result is asked for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tim-errands")
        wanted = threading.Event()

        def run() -> T:
            if delay:
                wanted.wait(delay)
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._count(time.perf_counter() - began)

        return Errand(self._pool.submit(run), wanted, lambda seconds: self._count(-seconds))

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def seconds(self) -> float:
        """What the errands since the last call took while nobody waited for their results."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return max(seconds, 0.0)
