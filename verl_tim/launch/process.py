"""verl as a child process: log in the run folder, progress from the metrics, cause of failure, a clean end."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.run_folder import METRICS_NAME
from verl_tim.launch.exit_code import INTERRUPTED
from verl_tim.launch.new_lines import NewLines
from verl_tim.launch.run_folder import LOG
from verl_tim.launch.stages import Stages

# How long verl and Ray may take to end on their own after Ctrl-C, and what is left of them after SIGTERM, then SIGKILL.
_GRACE_SECONDS = 20.0
_FORCE_SECONDS = 5.0
END_SECONDS = _GRACE_SECONDS + 2 * _FORCE_SECONDS
"""What `end_trees` takes at most."""
_POLL_SECONDS = 0.25
# A stage of the start that takes longer is told again.
_AGAIN_SECONDS = 30.0

# What ends a run: Ctrl-C, a scheduler's or a container's stop, a terminal that is closed.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Linux only; looked up here, since a child between fork and exec may not.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\((?:[A-Za-z_][\w.<>]*) pid=\d+(?:, ip=[\d.]+)?\) ?")
_EXCEPTION_LINE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Died|Failure))(?:\([\w.]+\))?(?::|$)"
)
# Whatever its name is, where it stands below the lines of a traceback.
_ANY_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*)(?:\([\w.]+\))?(?::|$)")
_HYDRA_TAIL = "Set the environment variable HYDRA_FULL_ERROR=1"


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl."""

    number: int
    metrics: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Outcome:
    """How the child ended.

    Attributes:
        exit_code: verl's own; 130 after Ctrl-C, 128 + the signal's number where a signal ended it.
        seconds: wall time of the child.
        steps: every line of its metrics.
        log: everything it printed.
        cause: the last lines of its traceback, or the signal; empty when it ended well.
        attempts: how often the run was started (`restarts`).
    """

    exit_code: int
    seconds: float
    steps: tuple[Step, ...]
    log: Path
    cause: tuple[str, ...]
    attempts: int = 1


def verl_command(run_dir: Path) -> list[str]:
    """The plain verl command that runs the config of a run folder."""
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "--config-path",
        str(run_dir),
        "--config-name",
        "config",
        f"hydra.run.dir={hydra_quoted(str(run_dir))}",
        "hydra.output_subdir=null",
    ]


class VerlProcess:
    """verl, running on `run_dir/config.yaml` as a child of this process."""

    def __init__(
        self,
        run_dir: Path,
        on_step: Callable[[Step], None],
        *,
        on_start: Callable[[str], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            on_step: called by `running` for every new line of metrics.
            on_start: called by `running` until the first of them, with what is under way (`launch.stages`): at each
                change, and of a long one now and then.
            variables: of its environment, beside this process's own.

        If this process is killed outright, the kernel sends the child SIGTERM, and Ray ends with its driver.
        """
        self.log = run_dir / LOG
        self.steps: list[Step] = []
        self._on_step, self._on_start = on_step, on_start
        self._reader = MetricsReader(run_dir / METRICS_NAME)
        self._stages = Stages(self.log)
        self._told: tuple[str, float] | None = None  # the stage of the start, and when it was told
        self._started = time.monotonic()
        with self.log.open("wb") as sink:
            # its own session: a Ctrl-C in the terminal reaches us only, and we end the tree in order
            self.child = subprocess.Popen(
                verl_command(run_dir),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(variables or {}),
                preexec_fn=partial(tie_to_parent, os.getpid()),
            )

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def running(self) -> bool:
        """Whether it still runs; hands on the steps that it logged since the last call."""
        ended = self.child.poll() is not None
        self._read()
        if not ended and not self.steps:
            self._tell_start()
        return not ended

    def outcome(self, *, stopped: bool = False) -> Outcome:
        """How it ended.

        Args:
            stopped: we ended it ourselves (`end_trees`): exit code 130, as after Ctrl-C.
        """
        self._read()
        exit_code = self.child.returncode
        cause: tuple[str, ...] = ()
        if stopped:
            exit_code = INTERRUPTED
        elif exit_code < 0:
            ended_by = signal.Signals(-exit_code)
            # its log cannot hold the cause: nobody told it
            cause = (f"verl's driver (pid {self.child.pid}) was ended by {ended_by.name}",)
            exit_code = 128 + ended_by
        elif exit_code not in (0, INTERRUPTED):
            cause = failure_cause(self.log)
        return Outcome(exit_code, self.seconds, tuple(self.steps), self.log, cause)

    def _read(self) -> None:
        for step in self._reader.new_steps():
            self.steps.append(step)
            self._on_step(step)

    def _tell_start(self) -> None:
        stage, now = self._stages.look(), time.monotonic()
        # a run without metrics in its file (tracker=console) would be told to be in its first step for ever
        again = self._told is not None and not self._stages.over and now - self._told[1] >= _AGAIN_SECONDS
        if self._told is None or self._told[0] != stage or again:
            self._told = stage, now
            self._on_start(stage)


def run_verl(run_dir: Path, *, on_step: Callable[[Step], None], on_start: Callable[[str], None]) -> Outcome:
    """Run verl on `run_dir/config.yaml` to its end.

    Args:
        on_step, on_start: as of `VerlProcess`.

    On Ctrl-C, SIGTERM and SIGHUP the child and every process of its Ray cluster are ended before this returns or
    raises: first as Ctrl-C would, then by force. Only processes that descend from this child are touched.
    """
    verl: VerlProcess | None = None
    with stop_requests() as ignore_more:
        try:
            verl = VerlProcess(run_dir, on_step, on_start=on_start)
            while verl.running():
                time.sleep(_POLL_SECONDS)
            return verl.outcome()
        except BaseException as error:
            ignore_more()
            if verl is not None:
                end_tree(verl.child)
            if not isinstance(error, KeyboardInterrupt) or verl is None:
                raise
            return verl.outcome(stopped=True)


@contextmanager
def stop_requests() -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt while this is entered; gives a function after which they are
    ignored: a second Ctrl-C, from somebody who does not want to wait, must not cut the clean end short."""
    previous = _handle(_as_interrupt, _STOPPING)
    try:
        yield lambda: _ignore(previous)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class TimeIsUp(BaseException):
    """Raised by `within`; no `except Exception` of what runs inside it may take it for a failure."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TimeIsUp in the main thread when the body has run so long; None: it may take any time.

    A timer thread and a signal of its own: code that scores answers uses SIGALRM.
    """
    if seconds is None:
        yield
        return
    armed = True

    def raise_it(signum: int, frame: Any) -> None:
        if armed:
            raise TimeIsUp

    previous = signal.signal(signal.SIGUSR2, raise_it)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(max(0.0, seconds), signal.pthread_kill, (main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        armed = False
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, previous)


def _ignore(numbers: Iterable[signal.Signals]) -> None:
    _handle(signal.SIG_IGN, list(numbers))


class MetricsReader:
    """Reads complete new lines of a growing metrics.jsonl, for who watches; what is no metrics line is passed over."""

    def __init__(self, path: Path) -> None:
        self._lines = NewLines(path)

    def new_steps(self) -> list[Step]:
        """Steps whose line was completed since the last call."""
        steps = []
        for line in self._lines.read():
            # a full disk may leave half a line, and the next one behind it: whoever reads the run folder says so
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                steps.append(Step(int(record["step"]), dict(record["data"])))
        return steps


def end_tree(child: subprocess.Popen) -> None:
    """End a child and all its descendants: SIGINT to the child, then SIGTERM and SIGKILL for what is left."""
    end_trees([child])


def end_trees(children: Sequence[subprocess.Popen]) -> None:
    """`end_tree` of several at once: they share the time that they are given."""
    import psutil

    roots = {}
    for child in children:
        with suppress(psutil.NoSuchProcess):
            roots[child.pid] = psutil.Process(child.pid)
    # taken before the signal: a raylet whose driver has gone is nobody's child any more
    tree: dict[int, psutil.Process] = {}

    def look() -> None:
        for root in roots.values():
            with suppress(psutil.NoSuchProcess):
                tree.update({process.pid: process for process in [root, *root.children(recursive=True)]})

    look()
    for child in children:
        child.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        look()
        time.sleep(0.2)
    for stop in ("terminate", "kill"):
        alive = [process for process in tree.values() if process.is_running()]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                getattr(process, stop)()
        psutil.wait_procs(alive, timeout=_FORCE_SECONDS)
    for child in children:
        child.wait()


def failure_cause(log: Path, max_lines: int = 12) -> tuple[str, ...]:
    """The end of the last traceback in a log, without Ray's prefixes and Hydra's advice.

    A log without a traceback gives its last lines.
    """
    text = _ANSI.sub("", log.read_text(encoding="utf-8", errors="replace"))
    raw = text.splitlines()
    lines = [_RAY_PREFIX.sub("", line).rstrip() for line in raw]
    while lines and (not lines[-1].strip() or lines[-1].startswith(_HYDRA_TAIL)):
        lines.pop()
    found = [index for index in range(len(lines)) if _exception_name(lines, index) and not _is_wrapper(lines[index])]
    # The driver's own error is the verdict, and repeats the worker's. What workers print has Ray's prefix, and may come
    # in later: ranks that lost their peer complain of it while the run ends.
    own = [index for index in found if not _RAY_PREFIX.match(raw[index])]
    last = max(own or found, default=None)
    if last is None:
        return tuple(lines[-max_lines:])
    # an exception's message may go on over several lines
    end = last + 1
    while (
        end < len(lines)
        and end - last < max_lines // 2
        and lines[end].strip()
        and not _starts_something_else(lines[end])
    ):
        end += 1
    start = max(0, last - (max_lines - (end - last)))
    for index in range(last - 1, start - 1, -1):
        if lines[index].startswith(
            ("Traceback (most recent call last)", "ray::", "During handling", "The above exception")
        ):
            start = index
            break
    return tuple(lines[start:end])


def exception_names(cause: Sequence[str]) -> list[str]:
    """Class names of the exceptions in the lines of a cause, without their modules, in order."""
    return [name for index in range(len(cause)) if (name := _exception_name(cause, index))]


def _exception_name(lines: Sequence[str], index: int) -> str | None:
    """Class name of the exception that this line is the message of."""
    if match := _EXCEPTION_LINE.match(lines[index]):
        return match["name"]
    match = _ANY_EXCEPTION.match(lines[index])
    if match is None:
        return None
    above = index - 1
    while above >= 0 and lines[above].startswith(" "):
        if lines[above].startswith('  File "'):
            return match["name"]
        above -= 1
    return None


def _is_wrapper(line: str) -> bool:
    # ray.exceptions.RayTaskError(ValueError): ray::TaskRunnerV1.run() ...: a header, the cause follows below it
    return line.startswith("ray.exceptions.RayTaskError")


def _starts_something_else(line: str) -> bool:
    return line.startswith(("Traceback ", "[", "INFO", "WARNING", "ERROR", "(", _HYDRA_TAIL)) or "it/s]" in line


def _handle(handler: Any, numbers: Sequence[signal.Signals]) -> dict[signal.Signals, Any]:
    """Handle these signals so; how they were handled before. What is ignored (nohup) stays ignored, and is left out."""
    previous = {number: signal.getsignal(number) for number in numbers}
    changed = {number: before for number, before in previous.items() if before not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, handler)
    return changed


def tie_to_parent(parent: int) -> None:
    """In a child, between fork and exec (`preexec_fn`): it ends with its parent, and listens to SIGINT.

    A shell's background job ignores SIGINT, and so would its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)


def _as_interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # Python buffers a log that is a file; a run that is killed would lose its last words
    return {**os.environ, "PYTHONUNBUFFERED": "1", **variables}


def hydra_quoted(value: str) -> str:
    """A value of an override, quoted, so that Hydra's grammar takes any character in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def shell_line(words: Sequence[str]) -> str:
    """A command as one would type it."""
    import shlex

    return shlex.join(words)
