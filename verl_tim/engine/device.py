"""What the graph runner needs of a device, and CUDA as that device.

Work is submitted in order and runs in order, later. The host waits only where it asks a `Mark` to be reached. Tests put
another device in CUDA's place that really runs things late, so that what depends on the order shows up without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from verl_tim.engine.errors import EngineConfigError
from verl_tim.numerics import collection

Work = Callable[[], None]


class Mark(Protocol):
    """A point in the submitted work."""

    def wait(self) -> None:
        """Return when everything submitted before it has run; raises what went wrong in it."""


class Device(Protocol):
    """A device with one queue of work."""

    device: torch.device
    records_anything: bool  # also work that reads values back

    def submit(self, work: Work) -> None:
        """Queue work on the device's tensors."""

    def mark(self) -> Mark:
        """The end of what is submitted so far."""

    def capture(self, work: Work) -> Work:
        """A replay of ``work``, to be submitted. Its tensors keep their places; what it does on the host is lost."""

    def forget_captures(self) -> None:
        """Give the memory of all captures back; their replays must be gone."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 host memory that copies to and from the device without a stop."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of memory that are free, and that there are."""

    def peak_bytes(self, work: Work) -> int:
        """Run ``work`` to its end: the most memory it held at once, beyond what was held before."""


class CudaDevice:
    """One GPU; all work goes to the stream that is current for the caller.

    Captures share one memory pool: they never run at the same time, so each may reuse what another left.
    """

    records_anything = False

    def __init__(self, device: torch.device) -> None:
        # A device without an index would let every thread's current device decide.
        self.device = torch.device("cuda", 0 if device.index is None else device.index)
        self._capture_stream = torch.cuda.Stream(self.device)
        self._pool: Any = None

    def submit(self, work: Work) -> None:
        with torch.cuda.device(self.device):
            work()

    def mark(self) -> _CudaMark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return _CudaMark(event)

    def capture(self, work: Work) -> Work:
        """Nothing in ``work`` may wait for the device or leave its stream; what it compiles must be compiled before.

        Garbage is not collected meanwhile: the engines that are gone leave graphs in it, whose end would break this
        capture (`numerics/collection.py`).
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._capture_stream.wait_stream(current)
        # torch.cuda.graph() would empty the cache around each of many captures, and does not keep the collector still.
        with collection.paused(), torch.cuda.stream(self._capture_stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken; the cause is what counts
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._capture_stream)
        return graph.replay

    def forget_captures(self) -> None:
        self._pool = None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def peak_bytes(self, work: Work) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.submit(work)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - before


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def rank_device(name: str, rank: int = 0) -> torch.device:
    """Device of a rank: `name` for the first, the following GPUs for the others.

    Raises:
        EngineConfigError: no such device.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise EngineConfigError(f"device={name!r}: expected 'cpu' or 'cuda' with an index") from None
    if device.type not in ("cpu", "cuda"):
        raise EngineConfigError(f"device={name!r}: expected 'cpu' or 'cuda' with an index")
    if device.type == "cuda":
        index = (device.index or 0) + rank
        if index >= torch.cuda.device_count():
            many = "" if rank == 0 else f" and {rank + 1} ranks or more need a GPU each"
            raise EngineConfigError(
                f"device={name!r}{many}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
                "use device='cpu', or fewer ranks"
            )
        if rank:
            device = torch.device("cuda", index)
    return device
