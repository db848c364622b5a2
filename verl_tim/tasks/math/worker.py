"""The worker process of the mathematical reward: `python -m verl_tim.tasks.math.worker MEMORY_BYTES`.

Protocol, one JSON object per line: on start `{"ready": true}` or `{"error": ...}` on stdout; then for each
`{"truth", "answer", "seconds"}` on stdin one `{"verdict": ..., "worn": bool}` on stdout. Verdicts are `judge`'s, and
`timed_out`, `out_of_memory`, `failed`. A worn worker has grown large and should be replaced. It ends with its stdin.

What it can do to the machine is bounded by the kernel, whatever library code does with an answer:

- seconds of a verdict: ITIMER_REAL raises an exception that `except Exception` cannot swallow; costs the sample
- processor seconds of a verdict: ITIMER_PROF with its default action ends the process, so that a worker stuck inside
  one C call ends even if its parent has died
- memory: RLIMIT_AS; a large number costs a MemoryError, not the machine
- files and core dumps: RLIMIT_FSIZE and RLIMIT_CORE are 0; nothing is written

The parent kills a worker that does not answer in time (`pool`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Processor seconds beyond the wall-clock limit after which the kernel ends the process.
_CPU_GRACE = 5.0
# The signal repeats: library code may swallow one exception in a bare `except` or a destructor.
_REPEAT = 0.2
# Share of the memory limit above which a worker is worn.
_WORN = 0.6


class Late(BaseException):
    """Time is up. No subclass of Exception, since sympy and math-verify catch those."""


def main() -> None:
    """Serve until stdin ends."""
    memory_bytes = int(sys.argv[1])
    replies = _claim_stdout()
    _limit(memory_bytes)
    try:
        from verl_tim.tasks.math.judge import judge
    except Exception as error:
        _send(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        verdict = _verdict(judge, request)
        worn = _address_space() > _WORN * memory_bytes
        _send(replies, {"verdict": verdict, "worn": worn or verdict == "out_of_memory"})


def _verdict(judge: Any, request: dict[str, Any]) -> str:
    try:
        with _time_limit(request["seconds"]):
            return judge(request["truth"], request["answer"])
    except Late:
        return "timed_out"
    except MemoryError:
        return "out_of_memory"
    # whatever sympy or the parser raise at an answer, RecursionError included, is about that answer
    except Exception:
        return "failed"


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def expire(number: int, frame: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds + _CPU_GRACE)
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT)
    try:
        yield
    finally:
        # first of all: a repeated signal in the lines below would leave the worker without an answer
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _address_space() -> int:
    """Bytes that count against RLIMIT_AS. Not getrusage: its peak begins with that of the process forked from."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()


def _claim_stdout() -> TextIO:
    """The pipe to the parent; whatever libraries print goes nowhere."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return replies


def _limit(memory_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
