"""Python's garbage collector kept still while a CUDA graph is captured.

A collection runs in whichever thread allocates next, so also in the one that captures, and destroys what lies in
cycles: graphs of an engine that is gone, compiled kernels, communicators. While a stream of the thread is captured CUDA
refuses some of the calls that this takes, and the capture is invalid from then on: a start that fails once in many
runs, whenever the collector happens to come by. `torch.cuda.graph` does not prevent it (torch 2.9 dropped its own
collection before a capture).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_askers = 0  # the collector is one for all threads
_was_on = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, garbage stays where it is. A collector that was off stays off."""
    global _askers, _was_on
    with _lock:
        if _askers == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _askers += 1
    try:
        yield
    finally:
        with _lock:
            _askers -= 1
            if _askers == 0 and _was_on:
                gc.enable()
