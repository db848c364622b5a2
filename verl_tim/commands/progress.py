"""What shows that a command is at work: a line per run or per step, a bar."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_tim.commands.headline import REWARD, STEP_TIME, mismatch_of, number, validation_of
from verl_tim.commands.output import stderr
from verl_tim.diagnosis.metric_log import RESTARTS
from verl_tim.launch.process import Step

# Between two lines of small things where there is no terminal.
_EVERY_SECONDS = 30.0


class RunProgress:
    """Shows how far a run's start is, then its steps as they are logged.

    Args:
        label: what the run is called.
        total: training steps to come; None where it is not known beforehand.
    """

    def __init__(self, console: Console, label: str, total: int | None) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._validation: tuple[float, int] | None = None
        self._began = time.monotonic()
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(label, total=total, state="")

    def __enter__(self) -> RunProgress:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_start(self, stage: str) -> None:
        """Show what the start is waiting for."""
        self._live.update(self._task, state=stage, refresh=True)
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._began
            self._console.print(f"{self._label}: start, {seconds:.0f} s: {stage}", markup=False, soft_wrap=True)

    def on_step(self, step: Step) -> None:
        """Show one line of metrics."""
        score = validation_of(step.metrics)
        if score is not None:
            self._validation = score, step.number
        shown = (
            ("reward", step.metrics.get(REWARD), ""),
            ("mismatch", mismatch_of(step.metrics), ""),
            ("step", step.metrics.get(STEP_TIME), " s"),
        )
        parts = [f"{name} {number(value)}{unit}" for name, value, unit in shown if value is not None]
        if score is not None:
            parts.append(f"validation {number(score)}")
        state = live = ", ".join(parts)
        if score is None and self._validation is not None:
            # this line replaces that of the step which had it
            value, at = self._validation
            live = ", ".join([*parts, f"validation {number(value)} at step {at}"])
        self._live.update(self._task, completed=step.number, state=live)
        if restarts := step.metrics.get(RESTARTS):
            self._console.print(
                f"{self._label}: step {step.number}: a rollout server died and was started again "
                f"({restarts:.0f} in this step); train.log says why",
                soft_wrap=True,
            )
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: step {step.number}/{self._total or '?'}  {state}", soft_wrap=True)


class Work:
    """How far a command is, on stderr: a bar on a terminal; in a log file or a pipe lines, so that none is silent.

    Args:
        label: what is done.
        total: things to do; None where it is not known yet (`of`).
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self._console = stderr()
        self._label, self._total, self._done = label, total, 0
        self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Work:
        self._bar.start()
        self._say(self._label)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def of(self, total: int) -> None:
        """So many things there are to do."""
        self._total = total
        self._bar.update(self._task, total=total)

    def doing(self, what: str) -> None:
        """What is under way; for the bar."""
        self._bar.update(self._task, description=f"{self._label}: {what}")

    def begun(self, kind: str, what: str) -> None:
        """The next thing of this kind, which is worth a line: it may take long."""
        self.doing(what)
        self._say(f"{self._label}: {kind} {self._done + 1} of {self._total or '?'}: {what}")

    def advance(self) -> None:
        """One thing more is done. Of many small ones a line now and then is enough."""
        self._done += 1
        self._bar.advance(self._task)
        if time.monotonic() - self._said >= _EVERY_SECONDS:
            self._say(f"{self._label}: {self._done} of {self._total or '?'}")

    def ended(self, what: str) -> None:
        """Something that is worth a line has ended, and how."""
        self._say(f"{self._label}: {what}")

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, markup=False, soft_wrap=True)
            self._said = time.monotonic()
