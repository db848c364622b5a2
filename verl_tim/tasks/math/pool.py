"""The workers of one process: started when the first answer needs one, killed when late, replaced when dead.

Plain subprocesses and pipes. multiprocessing would fork a process that holds Ray's and gRPC's threads, or run the
parent's main module again, and refuses to work below a daemonic process; a pool of it has no way to kill the one
worker that hangs, and concurrent.futures declares the whole pool broken when one dies.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from typing import Any

from verl_tim.tasks.errors import InputError

logger = logging.getLogger(__name__)

# Seconds that a worker has to import sympy on a busy machine.
_START_SECONDS = 120.0
# Wall-clock seconds beyond a verdict's own limit before the worker is killed.
_GRACE_SECONDS = 1.0

NEEDS_MATH_VERIFY = (
    "reward.custom_reward_function: the mathematical reward needs the package math-verify, which is not installed "
    "here; pip install 'math-verify==0.9.0' (it is a dependency of verl_tim)"
)


def check_installed() -> None:
    """Raises InputError where math-verify is not installed; imports nothing of it."""
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(NEEDS_MATH_VERIFY)


class WorkerLost(Exception):
    """The worker died, or had to be killed, before it answered. `late`: it was killed for its time."""

    def __init__(self, reason: str, *, late: bool) -> None:
        super().__init__(reason)
        self.late = late


class Worker:
    """One worker process. Not thread-safe: the pool hands it to one caller at a time."""

    def __init__(self, memory_bytes: int) -> None:
        # the parent may have been told of packages that PYTHONPATH does not know (Ray's py_modules, pytest)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_tim.tasks.math.worker", str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C at the terminal is the parent's affair
            start_new_session=True,
        )
        self._buffer = b""
        self.worn = False
        try:
            hello = self._receive(_START_SECONDS)
        except WorkerLost as error:
            raise RuntimeError(f"a worker of the mathematical reward did not start: {error}") from error
        if "error" in hello:
            self.kill()
            raise RuntimeError(f"a worker of the mathematical reward did not start: {hello['error']}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, truth: str, answer: str, seconds: float) -> str:
        """The worker's verdict. Raises WorkerLost, after which the worker is dead."""
        assert self._process.stdin is not None
        request = json.dumps({"truth": truth, "answer": answer, "seconds": seconds}) + "\n"
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError as error:  # it died since its last answer
            self.kill()
            raise WorkerLost(f"it had ended ({error})", late=False) from error
        reply = self._receive(seconds + _GRACE_SECONDS)
        self.worn = reply["worn"]
        return reply["verdict"]

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it, whatever it is doing, and leave no zombie."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that it never read
                pipe.close()

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        # poll, for select fails above file 1023, and Ray workers have many open
        poll = select.poll()
        poll.register(file, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                self.kill()
                raise WorkerLost(f"no answer in {seconds:g} s", late=True)
            block = os.read(file, 65536)
            if not block:
                self.kill()
                raise WorkerLost(f"it ended with exit code {self._process.returncode}", late=False)
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class WorkerPool:
    """At most `size` workers, for any number of threads.

    Args:
        size: workers at most; each takes about 60 MB and is started when all others are busy.
        memory_bytes: address space of each (RLIMIT_AS).

    Raises:
        InputError: math-verify is not installed.
    """

    def __init__(self, size: int, memory_bytes: int) -> None:
        check_installed()
        self._memory_bytes = memory_bytes
        # last in, first out: the worker that is warm works, the others are not even started
        self._slots: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def ask(self, truth: str, answer: str, seconds: float) -> str:
        """A verdict of `worker`, or `timed_out` or `lost` where the worker had to be killed or died.

        Waits for a free worker first; `seconds` count from then. Raises RuntimeError if no worker can be started at
        all: that is about this machine, not about the answer.
        """
        worker = self._slots.get()
        try:
            if worker is None or not worker.alive():
                worker = Worker(self._memory_bytes)
            try:
                verdict = worker.ask(truth, answer, seconds)
            except WorkerLost as error:
                worker = None
                logger.warning("a worker of the mathematical reward was lost: %s; answer %.80r", error, answer)
                return "timed_out" if error.late else "lost"
            if worker.worn:
                worker.kill()
                worker = None
            return verdict
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """End the idle workers; those at work end with this process."""
        with contextlib.suppress(queue.Empty):
            for _ in range(self._slots.qsize()):
                worker = self._slots.get_nowait()
                if worker is not None:
                    worker.kill()
                self._slots.put(None)


_pools: dict[tuple[int, int, int], WorkerPool] = {}
_lock = threading.Lock()


def shared_pool(size: int, memory_bytes: int) -> WorkerPool:
    """This process's pool of these settings. A forked child gets its own: pipes serve one process."""
    key = (os.getpid(), size, memory_bytes)
    with _lock:
        if key not in _pools:
            _pools[key] = pool = WorkerPool(size, memory_bytes)
            atexit.register(pool.close)
        return _pools[key]
