"""Runs of a matrix side by side on one machine, within a time: each a process and a Ray cluster of its own.

For runs that are small beside their GPU. What a run takes of the GPU's memory is its recipe's to say
(`cluster=gpu1_shared`); here is only who runs when, and that nothing is left behind when the time is up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tim.launch import restarts
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.matrix import Matrix, finished, record
from verl_tim.launch.process import Outcome, Step, VerlProcess, end_trees, stop_requests
from verl_tim.launch.run_folder import claim
from verl_tim.training.config import joins_a_cluster

TIME_IS_UP = 75
"""Exit code where nothing failed and runs are left: EX_TEMPFAIL of sysexits.h, come again."""

# Between two starts: Ray and verl pick free ports and open them later.
_GAP_SECONDS = 5.0
_POLL_SECONDS = 0.25
# What ending the trees may take; so long before the time is up they are told.
_END_SECONDS = 25.0


class State(Enum):
    """Of one run."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    # by the time or by Ctrl-C; the same command goes on with it
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunState:
    """How far one run is.

    Attributes:
        steps: the last that it logged; total: its last.
        seconds: of its attempts in this call.
        exit_code: None while it waits or runs.
        earlier: it had finished before this call.
    """

    name: str
    folder: Path
    state: State
    steps: int
    total: int | None
    seconds: float = 0.0
    exit_code: int | None = None
    cause: tuple[str, ...] = ()
    metrics: Mapping[str, Any] | None = None
    earlier: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "run": self.name,
            "state": self.state.value,
            "exit_code": self.exit_code,
            "steps": self.steps,
            "total_steps": self.total,
            "seconds": round(self.seconds, 1),
            "run_dir": str(self.folder),
            "cause": list(self.cause),
            "earlier": self.earlier,
        }


@dataclass
class _Job:
    config: DictConfig
    attempts: int = 0
    seconds: float = 0.0
    process: VerlProcess | None = None


def run_side_by_side(
    matrix: Matrix,
    configs: Mapping[str, DictConfig],
    *,
    at_once: int,
    seconds: float | None,
    on_change: Callable[[list[RunState]], None],
) -> tuple[list[RunState], int]:
    """Run what is still to be done, `at_once` at a time, and end whatever runs when the time is up.

    A run is not begun where less time is left than the longest finished one took, unless it writes checkpoints to go on
    from. One that fails keeps none of the others from running; one whose process died is begun again as `tim.restarts`
    says.

    Args:
        configs: `matrix.prepared`.
        seconds: for all of it; None: as long as it takes.
        on_change: called with the state of every run of the matrix after each step and change.

    Returns:
        (states, exit code): 0 if all have finished, else the code of the first that failed, 130 after Ctrl-C, else
        `TIME_IS_UP`.

    Raises:
        LaunchError: a config that joins a Ray cluster, where runs would take each other's places.
    """
    joining = [name for name, config in configs.items() if joins_a_cluster(config)]
    if joining and at_once > 1:
        raise LaunchError(
            [
                Finding(
                    "ray_kwargs.ray_init.address",
                    f"{joining[0]} joins a Ray cluster that runs already, and of two runs in one cluster one takes the "
                    "other's actors",
                    "unset it and RAY_ADDRESS, so that each run has a cluster of its own, or leave --at-once out",
                )
            ]
        )
    crew = _Crew(matrix, configs, at_once, seconds, on_change)
    with stop_requests() as ignore_more:
        try:
            crew.work()
        except BaseException as error:
            ignore_more()
            crew.stop()
            if not isinstance(error, KeyboardInterrupt):
                raise
            return crew.states(), 130
        ignore_more()
        crew.stop()
    return crew.states(), crew.exit_code()


class _Crew:
    def __init__(
        self,
        matrix: Matrix,
        configs: Mapping[str, DictConfig],
        at_once: int,
        seconds: float | None,
        on_change: Callable[[list[RunState]], None],
    ) -> None:
        self.matrix, self.at_once, self.on_change = matrix, at_once, on_change
        self.began = time.monotonic()
        self.deadline = None if seconds is None else self.began + seconds - _END_SECONDS
        self.jobs = {name: _Job(config) for name, config in configs.items()}
        self.waiting = list(configs)
        self.longest = max((took(matrix.folder / name) for name in finished(matrix)), default=0.0)
        self.of = {
            cell.name: RunState(
                cell.name, matrix.folder / cell.name, State.FINISHED, 0, None, exit_code=0, earlier=True
            )
            for cell in matrix.cells
        }
        for name, config in configs.items():
            total = config.trainer.total_training_steps
            self.of[name] = RunState(name, Path(config.tim.run_dir), State.WAITING, 0, total)
        self.last_start: float | None = None

    def states(self) -> list[RunState]:
        return list(self.of.values())

    def exit_code(self) -> int:
        """Of the whole, once nothing runs any more."""
        failed = [state.exit_code for state in self.of.values() if state.state is State.FAILED]
        left = any(state.state in (State.WAITING, State.STOPPED) for state in self.of.values())
        return (failed[0] or 1) if failed else TIME_IS_UP if left else 0

    def work(self) -> None:
        self._say()
        while not self._time_is_up():
            self._start_next()
            running = self._running()
            if not running and not self._startable():
                return
            for name in running:
                self._look_at(name)
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End what runs, with all its processes."""
        running = self._running()
        if not running:
            return
        end_trees([job.process.child for name in running if (job := self.jobs[name]).process is not None])
        for name in running:
            self._ended(name, stopped=True)

    def _running(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job.process is not None]

    def _time_is_up(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _startable(self) -> list[str]:
        """Those that wait and may still be begun."""
        if self.deadline is None:
            return self.waiting
        left = self.deadline - time.monotonic()
        return [n for n in self.waiting if left >= self.longest or self.jobs[n].config.trainer.save_freq > 0]

    def _start_next(self) -> None:
        if len(self._running()) >= self.at_once:
            return
        if self.last_start is not None and time.monotonic() - self.last_start < _GAP_SECONDS:
            return
        for name in self._startable()[:1]:
            self.waiting.remove(name)
            job = self.jobs[name]
            if job.attempts == 0:
                job.config = restarts.again(job.config)
            job.attempts += 1
            self.last_start = time.monotonic()
            job.process = VerlProcess(claim(job.config).path, partial(self._step, name))
            self._set(name, state=State.RUNNING)

    def _step(self, name: str, step: Step) -> None:
        seen = self.of[name].metrics or {}
        self._set(name, steps=step.number, metrics={**seen, **step.metrics})

    def _look_at(self, name: str) -> None:
        job = self.jobs[name]
        if job.process is not None and not job.process.running():
            self._ended(name, stopped=False)

    def _ended(self, name: str, *, stopped: bool) -> None:
        job = self.jobs[name]
        assert job.process is not None
        outcome: Outcome = job.process.outcome(stopped=stopped)
        job.process, job.seconds = None, job.seconds + outcome.seconds
        restarts.record(self.of[name].folder, outcome)
        state = State.STOPPED if stopped else State.FAILED
        if outcome.exit_code == 0:
            state = State.FINISHED
            record(self.matrix, name)
            self.longest = max(self.longest, job.seconds)
        elif not stopped and job.attempts <= int(job.config.tim.restarts.limit) and restarts.is_infrastructure(outcome):
            state = State.WAITING
            job.config = restarts.resuming(job.config)
            self.waiting.insert(0, name)
        code = None if state is State.WAITING else outcome.exit_code
        self._set(name, state=state, exit_code=code, seconds=job.seconds, cause=outcome.cause)

    def _set(self, name: str, **changes: Any) -> None:
        self.of[name] = replace(self.of[name], **changes)
        self._say()

    def _say(self) -> None:
        self.on_change(self.states())


def took(folder: Path) -> float:
    """Seconds that a finished run took from its last start to its end; 0 where its folder does not tell."""
    path = folder / restarts.ATTEMPTS
    if not path.is_file():
        return 0.0
    return max(float(json.loads(line)["seconds"]) for line in path.read_text(encoding="utf-8").splitlines())
