"""A server's signs of life: who gives none for too long is ended, and then it is one that died (`failover`).

Two things hang. The whole process may be stopped; `watchdog`, a process beside it, sees that. Or a step of the engine
does not end, a kernel that spins, a rank that is stopped; a thread of the server's own sees that.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from verl_tim.rollout import watchdog

logger = logging.getLogger(__name__)


class Liveness:
    """Watches the process that makes it, from then on and until it ends.

    Args:
        who: the server, for messages.
        timeout: seconds without a sign of life.
        key: of the config, where a user changes it.
        turns: number of things that the engine has done, or None while it has nothing to do (`AsyncEngine.turns`).
        on_hang: called in a thread of its own, with a sentence, when the engine has been doing one thing for that long.
            The watchdog hears nothing from then on, so that it ends the process after as long again if this does not.
    """

    def __init__(
        self, who: str, timeout: float, key: str, turns: Callable[[], int | None], on_hang: Callable[[str], None]
    ) -> None:
        self._who, self._timeout, self._key = who, timeout, key
        self._turns, self._on_hang = turns, on_hang
        self._tick = min(1.0, timeout / 10)
        self._start_watchdog()
        threading.Thread(target=self._beat, name="vexact-liveness", daemon=True).start()

    def _start_watchdog(self) -> None:
        heard, self._beats = os.pipe()
        os.set_blocking(self._beats, False)
        numbers = (heard, os.getpid(), self._timeout, self._tick)
        message = (
            f"{self._who} (pid {os.getpid()}) gave no sign of life for {self._timeout:g} s and is ended: it was "
            f"stopped, or hangs ({self._key})"
        )
        self._watchdog = subprocess.Popen(
            # isolated and without site-packages: it starts in milliseconds
            [sys.executable, "-I", "-S", watchdog.__file__, *map(str, numbers), message],
            pass_fds=[heard],
            stdin=subprocess.DEVNULL,
        )
        os.close(heard)

    def _beat(self) -> None:
        pause = threading.Event()
        turn: int | None = None
        still = 0.0  # seconds of this thread's ticks; not by a clock, as in `watchdog.watch`
        while still < self._timeout:
            self._sign()
            pause.wait(self._tick)
            now = self._turns()
            still = still + self._tick if now is not None and now == turn else 0.0
            turn = now
        self._on_hang(f"one step or call of the engine went on for {self._timeout:g} s without an end ({self._key})")

    def _sign(self) -> None:
        try:
            os.write(self._beats, b".")
        except BlockingIOError:  # it is stopped itself, and has enough to read
            pass
        except BrokenPipeError:
            code = self._watchdog.wait()
            logger.warning("%s: its watchdog ended (exit code %s); another is started", self._who, code)
            os.close(self._beats)
            self._start_watchdog()
