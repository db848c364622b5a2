"""What shows that a command is at work: a line per run or per step, a bar."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_tim.commands.headline import REWARD, STEP_TIME, mismatch_of, number, validation_of
from verl_tim.commands.output import stderr
from verl_tim.launch.process import Step


class RunProgress:
    """Shows a run's steps as they are logged.

    Args:
        label: what the run is called.
        total: training steps to come; None where it is not known beforehand.
    """

    def __init__(self, console: Console, label: str, total: int | None) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._validation: float | None = None
        self._live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(label, total=total, state="starting verl and Ray")

    def __enter__(self) -> RunProgress:
        self._live.start()
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: starting verl and Ray")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_step(self, step: Step) -> None:
        """Show one line of metrics."""
        score = validation_of(step.metrics)
        if score is not None:
            self._validation = score
        shown = (
            ("reward", step.metrics.get(REWARD), ""),
            ("mismatch", mismatch_of(step.metrics), ""),
            ("step", step.metrics.get(STEP_TIME), " s"),
        )
        parts = [f"{name} {number(value)}{unit}" for name, value, unit in shown if value is not None]
        if self._validation is not None:
            parts.append(f"validation {number(self._validation)}")
        state = ", ".join(parts)
        self._live.update(self._task, completed=step.number, state=state)
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: step {step.number}/{self._total or '?'}  {state}", soft_wrap=True)


def counting_bar() -> Progress:
    """A bar of things done out of a total, on stderr while it is entered; nothing where stderr is no terminal."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
