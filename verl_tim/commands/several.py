"""What shows how far several runs side by side are: a table that follows them, or lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from verl_tim.commands.headline import REWARD, STEP_TIME, mismatch_of, number
from verl_tim.diagnosis.run_folder import LOG_NAME
from verl_tim.launch.side_by_side import RunState, State

# Between two lists where nothing redraws them.
_EVERY_SECONDS = 30.0
_CAUSE_LINES = 3
_STYLES = {State.FINISHED: "green", State.FAILED: "bold red", State.RUNNING: "bold", State.STOPPED: "yellow"}


class RunsProgress:
    """Follows the states of `run_side_by_side` on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._said: dict[str, State] = {}
        self._listed = time.monotonic()

    def __enter__(self) -> RunsProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_change(self, states: list[RunState]) -> None:
        """Show them."""
        if self._live is not None:
            self._live.update(runs_table(states), refresh=True)
            return
        for state in states:
            if self._said.get(state.name) is not state.state and not state.earlier and state.state is not State.WAITING:
                self._say(state)
            self._said[state.name] = state.state
        if time.monotonic() - self._listed >= _EVERY_SECONDS:
            self._listed = time.monotonic()
            for state in states:
                if state.state is State.RUNNING:
                    self._say(state)

    def _say(self, state: RunState) -> None:
        words = [f"{state.name}: {state.state.value}", f"step {state.steps}/{state.total or '?'}", *_figures(state)]
        if state.stage:
            words.append(state.stage)
        self._console.print("  ".join(words), markup=False, soft_wrap=True)
        for line in state.cause[-_CAUSE_LINES:] if state.state is State.FAILED else ():
            self._console.print(f"    {line}", markup=False, soft_wrap=True)


def runs_table(states: Sequence[RunState], title: str | None = None) -> Table:
    """A row for each run that this call had to do, and how many had finished before."""
    found = Table(title=title, title_justify="left")
    for column in ("run", "state", "step", "reward", "mismatch", "s/step", "seconds"):
        found.add_column(column, overflow="fold")
    for state in states:
        if state.earlier:
            continue
        metrics = state.metrics or {}
        found.add_row(
            state.name,
            f"{state.state.value}: {state.stage}" if state.stage else state.state.value,
            f"{state.steps}/{state.total or '?'}",
            number(metrics.get(REWARD)),
            number(mismatch_of(dict(metrics))),
            number(metrics.get(STEP_TIME)),
            f"{state.seconds:.0f}" if state.seconds else "",
            style=_STYLES.get(state.state, "dim"),
        )
    before = sum(state.earlier for state in states)
    if before:
        found.caption = f"and {before} that had finished before"
    return found


def failures(states: Sequence[RunState]) -> list[str]:
    """What each run that failed ended with, and where its log is: the table that followed them is gone."""
    lines = []
    for state in states:
        if state.state is State.FAILED:
            how = "could not be started" if state.exit_code is None else f"ended with exit code {state.exit_code}"
            lines += [f"{state.name} {how}", *(f"    {line}" for line in state.cause[-_CAUSE_LINES:])]
            if state.exit_code is not None:
                lines.append(f"    the whole log: {state.folder / LOG_NAME}")
    return lines


def time_is_up(states: Sequence[RunState], minutes: float) -> list[str]:
    """What a call that ended by its time leaves."""
    left = [state for state in states if state.state in (State.WAITING, State.STOPPED)]
    lines = [f"{minutes:g} minutes are up: {len(left)} of {len(states)} runs are left, and the same command goes on"]
    early = sum(state.state is State.STOPPED and not state.steps for state in left)
    if early:
        lines.append(f"  {early} of them had not come to a step, and will begin anew: give more --minutes")
    return lines


def not_begun(states: Sequence[RunState]) -> list[str]:
    """Why runs were left although time was."""
    left = [(state.name, state.not_begun) for state in states if state.not_begun is not None]
    if not left:
        return []
    name, (why, remedy) = left[0]
    runs = name if len(left) == 1 else f"{len(left)} runs"
    return [f"not begun: {runs}; {why}", f"  -> {remedy}"]


def _figures(state: RunState) -> list[str]:
    metrics = dict(state.metrics or {})
    shown = (("reward", metrics.get(REWARD)), ("mismatch", mismatch_of(metrics)), ("s/step", metrics.get(STEP_TIME)))
    return [f"{name} {number(value)}" for name, value in shown if value is not None]
