"""A program beside a rollout server that ends it when it gives no sign of life: `liveness.Liveness` starts it.

A process that is stopped, or that waits in the kernel, cannot tell of that itself. Imports nothing but Python, so that
it costs a few megabytes.
"""

import os
import select
import signal
import sys


def watch(beats: int, pid: int, timeout: float, tick: float, message: str) -> None:
    """Returns when the parent has ended, by itself or by this.

    Args:
        beats: file descriptor that the parent writes to at least once a tick.
        pid: the parent's.
        timeout: seconds without a beat after which it is killed; counted in ticks of this process, so that two that
            were stopped together, by a batch system, say, are not taken for a hang.
        tick: seconds.
        message: written to stderr, which is the parent's, before it is killed.
    """
    silent = 0.0
    while silent < timeout:
        ready, _, _ = select.select([beats], [], [], tick)
        if os.getppid() != pid or (ready and not os.read(beats, 65536)):
            return
        silent = 0.0 if ready else silent + tick
    print(message, file=sys.stderr, flush=True)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, and this ends with it
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
