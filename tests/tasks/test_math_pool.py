"""The workers: a hostile answer costs its own sample, whatever it does to the process that looks at it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import gone
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math import pool as pools
from verl_tim.tasks.math.pool import Worker, WorkerPool

MEMORY = 1024 * 2**20


@pytest.fixture
def pool():
    pool = WorkerPool(1, MEMORY)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def long_lived():
    """One pool for all hostile answers: what one leaves behind would show in the next."""
    pool = WorkerPool(1, MEMORY)
    yield pool
    pool.close()


def pid_of(pool):
    worker = pool._slots.get()
    pool._slots.put(worker)
    return worker and worker.pid


HOSTILE = {
    "tower of powers": r"9^{9^{9^{9^{9}}}}",
    "power of 1e9 digits": r"10^{10^{9}}",
    "huge exponent": r"10^{1000000000}",
    "huge factorial": r"99999999999!",
    "factorial of factorials": r"9!!!!!!",
    "huge binomial": r"\binom{10^{9}}{5\cdot 10^{8}}",
    "long sum": r"\sum_{n=1}^{10^{9}} \frac{1}{n^{2}}",
    "long product": r"\prod_{n=1}^{10^{9}} n",
    "integral without an end": r"\int_{0}^{1} e^{x^{x^{x}}} \sin(e^{x}) dx",
    "expansion": r"(a+b+c+d+e+f)^{100000}",
    "nested parentheses": "(" * 400 + "5" + ")" * 400,
    "nested braces": "{" * 400 + "5" + "}" * 400,
    "nested roots": r"\sqrt{" * 120 + "2" + "}" * 120,
    "nested fractions": r"\frac{1}{1+" * 70 + "2" + "}" * 70,
    "unbalanced": "{" * 500,
    "wide matrix": r"\begin{pmatrix}" + "1&" * 400 + r"1\end{pmatrix}",
    "matrix power": r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{99999999}",
    "input": r"\input{/etc/passwd}",
    "write": r"\immediate\write18{touch /tmp/x}",
    "import": "__import__('os').system('true')",
    "definition": r"\def\x{\x\x}\x",
    "nul": "5\x00",
    "many digits": "7" * 1000,
    "many digits after the point": "0." + "7" * 1000,
    "many variables": "+".join(f"x_{{{n}}}" for n in range(100)),
    "infinite": r"\infty-\infty",
    "division by zero": r"\frac{0}{0}",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_answers_are_never_right_and_never_late(long_lived, name):
    assert long_lived.ask("1", "1", 30.0) == "equal"
    start = time.monotonic()
    verdict = long_lived.ask("6", HOSTILE[name], 0.5)
    assert time.monotonic() - start < 4.0
    assert verdict != "equal"
    assert long_lived.ask(r"\frac{1}{2}", "0.5", 30.0) == "equal", (
        "the next answer is judged as if nothing had happened"
    )


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_truths(long_lived, name):
    assert long_lived.ask(HOSTILE[name], "6", 0.5) != "equal"
    assert long_lived.ask(r"\frac{1}{2}", "0.5", 30.0) == "equal"


def test_a_slow_verdict_is_interrupted_without_losing_the_worker(pool):
    pool.ask("1", "1", 30.0)
    before = pid_of(pool)
    assert pool.ask("6", HOSTILE["long sum"], 0.5) == "timed_out"
    assert pid_of(pool) == before


def test_a_worker_stuck_in_one_call_is_killed_and_replaced(pool):
    pool.ask("1", "1", 30.0)
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)  # like a C call that never returns: no signal handler of Python's runs
    start = time.monotonic()
    assert pool.ask("6", "7", 0.3) == "timed_out"
    assert time.monotonic() - start < 3.0
    assert gone(before, 10.0)
    assert pool.ask("6", "6.0", 30.0) == "equal"
    assert pid_of(pool) != before


@pytest.mark.parametrize("when", ["idle", "at work"])
def test_a_worker_that_dies_is_replaced(pool, when):
    pool.ask("1", "1", 30.0)
    before = pid_of(pool)
    if when == "idle":
        os.kill(before, signal.SIGKILL)
        assert gone(before, 10.0)
    else:
        threading.Timer(0.5, os.kill, (before, signal.SIGSEGV)).start()
        assert pool.ask("6", HOSTILE["long sum"], 20.0) == "lost"
    assert pool.ask("6", "6.0", 30.0) == "equal"
    assert pid_of(pool) != before


def test_memory_is_bounded():
    pool = WorkerPool(1, 256 * 2**20)
    try:
        pool.ask("1", "1", 30.0)
        with open(f"/proc/{pid_of(pool)}/limits") as stream:
            limits = stream.read()
        assert f"{256 * 2**20}" in next(line for line in limits.splitlines() if line.startswith("Max address space"))
        # 2^(4e9) has 500 MB
        verdict = pool.ask("6", r"2^{4000000000}+1", 20.0)
        assert verdict not in ("equal", "timed_out")
        assert pool.ask("6", "6.0", 30.0) == "equal"
    finally:
        pool.close()


def test_many_threads_share_few_workers():
    pool = WorkerPool(2, MEMORY)
    try:
        with ThreadPoolExecutor(16) as threads:
            jobs = [(n, threads.submit(pool.ask, str(n), f"{n}.0", 60.0)) for n in range(60)]
            late = threads.submit(pool.ask, "6", HOSTILE["long sum"], 0.5)
            jobs += [(n, threads.submit(pool.ask, str(n), f"{n}.5", 60.0)) for n in range(60)]
            verdicts = [job.result() for _, job in jobs]
        assert verdicts == ["equal"] * 60 + ["different"] * 60
        assert late.result() == "timed_out"
        assert pool._slots.qsize() == 2
    finally:
        pool.close()


def test_close_ends_the_workers():
    pool = WorkerPool(1, MEMORY)
    pool.ask("1", "1", 30.0)
    pid = pid_of(pool)
    pool.close()
    assert gone(pid, 10.0)
    assert pool.ask("1", "1", 30.0) == "equal"
    pool.close()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_do_not_outlive_a_parent_that_is_killed(busy):
    script = textwrap.dedent(
        f"""
        import threading, time
        from verl_tim.tasks.math.pool import Worker
        worker = Worker({MEMORY})
        if {busy}:
            threading.Thread(target=worker.ask, args=("6", {HOSTILE["long sum"]!r}, 2.0), daemon=True).start()
            time.sleep(0.5)
        print(worker.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone(pid, 20.0)


def test_the_kernel_ends_a_worker_that_burns_the_processor_alone():
    # the last resort: Python's handler does not run (here: its signal is blocked), and no parent is there to kill
    script = textwrap.dedent(
        """
        import signal
        from verl_tim.tasks.math import worker
        worker._CPU_GRACE = 0.5
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        with worker._time_limit(0.5):
            while True:
                pass
        """
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGPROF


def test_an_interrupt_that_library_code_swallows_comes_again():
    script = textwrap.dedent(
        """
        from verl_tim.tasks.math import worker
        swallowed = []
        def judge(truth, answer):
            while True:
                try:
                    while len(swallowed) < 1:
                        pass
                    while True:
                        pass
                except BaseException:
                    if swallowed:
                        raise
                    swallowed.append(1)
        request = {"truth": "", "answer": "", "seconds": 0.2}
        assert worker._verdict(judge, request) == "timed_out"
        assert swallowed
        """
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_forked_child_gets_a_pool_of_its_own():
    mine = pools.shared_pool(1, MEMORY)
    assert pools.shared_pool(1, MEMORY) is mine
    assert pools.shared_pool(2, MEMORY) is not mine
    child = os.fork()
    if child == 0:
        other = pools.shared_pool(1, MEMORY)
        os._exit(0 if other is not mine and other.ask("1", "1.0", 60.0) == "equal" else 1)
    assert os.waitpid(child, 0)[1] == 0
    mine.close()


def test_without_math_verify_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(pools.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'math-verify"):
        WorkerPool(1, MEMORY)


def test_a_worker_that_cannot_start_is_an_error_not_a_zero(monkeypatch):
    with pytest.raises(RuntimeError, match="did not start"):
        Worker(8 * 2**20)  # Python itself needs more
    monkeypatch.setattr(pools.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start: it ended with exit code 1"):
        WorkerPool(1, MEMORY).ask("1", "1", 1.0)
