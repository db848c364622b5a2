"""A process that gives no sign of life is ended; one that does, or was stopped together with its watchdog, is not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import gone, runs

pytestmark = pytest.mark.timeout(60)

TIMEOUT = 1.0
SERVER = """
import sys, time
from verl_tim.rollout.liveness import Liveness

turns = {turns}

def on_hang(said):
    print(said, flush=True)

alive = Liveness("server 7", {timeout}, "the.key", lambda: next(turns), on_hang)
print(alive._watchdog.pid, flush=True)
time.sleep(600)
"""
IDLE, BUSY, STUCK = "iter(lambda: None, 0)", "iter(range(10**9))", "iter(lambda: 5, 0)"


@pytest.fixture
def server():
    made = []

    def start(turns):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(turns=turns, timeout=TIMEOUT)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def test_a_stopped_process_is_ended_and_said_to_be(server):
    process, watchdog = server(IDLE)
    process.send_signal(signal.SIGSTOP)
    assert process.wait(30) == -signal.SIGKILL
    said = process.stderr.read()
    assert f"server 7 (pid {process.pid}) gave no sign of life for 1 s" in said
    assert "the.key" in said
    assert gone(watchdog, 20)


@pytest.mark.parametrize("turns", [IDLE, BUSY])
def test_one_that_waits_or_works_is_left_alone(server, turns):
    process, watchdog = server(turns)
    time.sleep(3 * TIMEOUT)
    assert process.poll() is None
    assert runs(watchdog)


def test_a_turn_that_does_not_end_is_told_and_then_the_process_is_ended(server):
    process, _ = server(STUCK)
    assert process.stdout.readline() == "one step or call of the engine went on for 1 s without an end (the.key)\n"
    assert process.wait(30) == -signal.SIGKILL, "what it was told for did not end it"


def test_who_was_stopped_together_with_its_watchdog_goes_on(server):
    """A batch system that suspends a job."""
    process, watchdog = server(STUCK.replace("5", "None"))
    for pid in (process.pid, watchdog):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * TIMEOUT)
    os.kill(watchdog, signal.SIGCONT)  # whichever goes on first
    time.sleep(TIMEOUT / 4)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(2 * TIMEOUT)
    assert process.poll() is None


def test_the_watchdog_ends_with_its_process(server):
    process, watchdog = server(IDLE)
    process.kill()
    process.wait()
    assert gone(watchdog, 20)


def test_a_watchdog_that_was_killed_is_replaced(server):
    process, watchdog = server(IDLE)
    os.kill(watchdog, signal.SIGKILL)
    assert gone(watchdog, 20)
    time.sleep(5 * TIMEOUT / 10)
    process.send_signal(signal.SIGSTOP)
    assert process.wait(30) == -signal.SIGKILL
    assert "its watchdog ended (exit code -9); another is started" in process.stderr.read()
