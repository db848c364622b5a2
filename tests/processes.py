"""Whether a process still runs, for tests that end one."""

import time

import psutil


def runs(pid):
    """Of one that ended, and whose exit code nobody has asked for, False."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid, seconds):
    """Whether it has ended within so long."""
    until = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not runs(pid)
