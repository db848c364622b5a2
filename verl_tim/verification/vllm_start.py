"""Starting vLLM's engine: what its processes write goes to stderr, and a start that fails names its cause.

The engine and its workers are processes of their own. They write logs on stdout, where a command prints its result, and
of a start that fails the caller gets "Engine core initialization failed. See root cause above" only. Seen with vLLM
0.28 (v1/engine/utils.py: `wait_for_engine_startup`): a failed engine process may also wait for its workers for ever,
and the start with it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Characters of the output's end that a cause is looked for in.
_KEPT = 200_000
# What a failed engine process writes: vLLM's log, or multiprocessing where that is off.
_FAILED = ("EngineCore failed to start", "Process EngineCore")
_PREFIX = re.compile(r"^(\([\w. -]+ pid=\d+\) )?((ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] )?")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)?: \S")
_TRACEBACK = "Traceback (most recent call last)"
# How long a failed engine process may take to end.
SECONDS_TO_END = 20.0


class StartError(RuntimeError):
    """vLLM's engine did not start; the message is the cause."""


def started(make: Callable[[], T], *, seconds_to_end: float = SECONDS_TO_END) -> T:
    """The engine that `make` starts.

    Args:
        seconds_to_end: after which an engine process that has failed, and does not end, is ended.

    Raises:
        StartError: it did not start.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    output = _Output(seconds_to_end)
    try:
        engine = make()
    except Exception as error:
        output.release()
        raise StartError(cause(error, output.end())) from error
    finally:
        output.release()
    return engine


def cause(error: Exception, output: str) -> str:
    """Why a start failed: what the engine's process raised where `error` only says that it did, else `error` itself."""
    said = f"{type(error).__name__}: {error}"
    if "root cause" not in str(error):
        return said
    raised = [line for line in raised_in(output) if "root cause above" not in line]
    return raised[-1] if raised else f"{said} (on stderr)"


def raised_in(output: str) -> list[str]:
    """The last line of every traceback in vLLM's output, without the prefixes of its processes and its log."""
    found: list[str] = []
    inside = False
    for line in output.splitlines():
        text = _PREFIX.sub("", line, count=1)
        if _TRACEBACK in text:
            inside = True
        elif inside and _RAISED.match(text):
            found.append(text.strip())
            inside = False
    return found


def _duplicate(descriptor: int) -> int:
    """A second descriptor of stdout or stderr; of one that the caller has closed, a place that drops what it gets."""
    try:
        return os.dup(descriptor)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class _Output:
    """What this process and its children write on stdout and stderr, until `release`: passed on to stderr, its end
    kept. Children started meanwhile write here for as long as they live."""

    def __init__(self, seconds_to_end: float) -> None:
        self._seconds_to_end = seconds_to_end
        self._tail = ""
        self._released = False
        self._failed: threading.Timer | None = None
        self._stdout, self._stderr = _duplicate(1), _duplicate(2)
        self._read, write = os.pipe()
        for taken in (1, 2):
            os.dup2(write, taken)
        os.close(write)
        self._thread = threading.Thread(target=self._pass_on, name="vllm-output", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give this process its stdout and stderr back."""
        if self._released:
            return
        self._released = True
        if self._failed is not None:
            self._failed.cancel()
        for kept, taken in ((self._stdout, 1), (self._stderr, 2)):
            os.dup2(kept, taken)
        os.close(self._stdout)  # the thread writes to the other

    def end(self) -> str:
        """The end of what was written, once all writers are at theirs."""
        self._thread.join(timeout=5.0)
        return self._tail

    def _pass_on(self) -> None:
        while chunk := os.read(self._read, 1 << 16):
            os.write(self._stderr, chunk)
            self._tail = (self._tail + chunk.decode(errors="replace"))[-_KEPT:]
            if self._failed is None and not self._released and any(words in self._tail for words in _FAILED):
                self._failed = threading.Timer(self._seconds_to_end, self._end_engine)
                self._failed.daemon = True
                self._failed.start()
        os.close(self._read)
        os.close(self._stderr)

    def _end_engine(self) -> None:
        for process in multiprocessing.active_children():
            if process.name.startswith("EngineCore") and not self._released:
                process.kill()  # its workers end when it does
