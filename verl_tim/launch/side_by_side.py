"""Runs of a matrix side by side on one machine, within a time: each a process and a Ray cluster of its own.

For runs that are small beside their GPU. What a run takes of the GPU's memory is its recipe's to say
(`cluster=gpu1_shared`); here is only who runs when and on which GPUs, and that nothing is left behind when the time is
up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tim.diagnosis.metric_log import RunFolderError, read_json_lines
from verl_tim.diagnosis.run_folder import ATTEMPTS_NAME
from verl_tim.launch import restarts
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.exit_code import INTERRUPTED, TIME_IS_UP
from verl_tim.launch.gpus import VISIBLE, Gpus, gpus_asked, visible_gpus
from verl_tim.launch.matrix import Matrix, finished, record
from verl_tim.launch.process import END_SECONDS, Outcome, Step, VerlProcess, end_trees, stop_requests
from verl_tim.launch.record import held
from verl_tim.launch.run_folder import KEY, claim
from verl_tim.training.config import joins_a_cluster

# Between two starts: Ray and verl pick free ports and open them later.
_GAP_SECONDS = 5.0
_POLL_SECONDS = 0.25
# So long before the time is up the runs are told to end.
_END_SECONDS = END_SECONDS


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
        exit_code: None while it waits or runs, and of one that could not be started.
        cause: why it failed, the last time that it did.
        not_begun: (why, what to do) of one that waits at the end although time is left.
        gpus: that it was placed on, by the names of CUDA_VISIBLE_DEVICES; empty on a machine without, and before.
        earlier: it had finished before this call.
        stage: of its start, while it runs and has logged no step.
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
    gpus: tuple[str, ...] = ()
    earlier: bool = False
    stage: str = ""
    not_begun: tuple[str, str] | None = None

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
            "not_begun": None if self.not_begun is None else list(self.not_begun),
            "gpus": list(self.gpus),
            "earlier": self.earlier,
        }


@dataclass(frozen=True, order=True)
class Took:
    """How long a run took, and whether on this machine since it was last started."""

    seconds: float
    name: str
    here: bool = field(compare=False)


@dataclass
class _Job:
    config: DictConfig
    attempts: int = 0
    seconds: float = 0.0
    process: VerlProcess | None = None
    gpus: tuple[str, ...] = ()


def run_side_by_side(
    matrix: Matrix,
    configs: Mapping[str, DictConfig],
    *,
    at_once: int,
    seconds: float | None,
    on_change: Callable[[list[RunState]], None],
) -> tuple[list[RunState], int]:
    """Run what is still to be done, `at_once` at a time, and end whatever runs when the time is up.

    Each is placed on the GPUs with the fewest runs, and sees no others. A run is not begun where less time is left than
    the longest other one took on this machine, or has been running, unless it writes checkpoints to go on from; while
    none has finished here, what runs took on another machine counts. One that fails, or cannot be started, keeps none
    of the others from running; one whose process died is begun again as `tim.restarts` says.

    Args:
        configs: `matrix.prepared`.
        seconds: for all of it; None: as long as it takes.
        on_change: called with the state of every run of the matrix after each step and change.

    Returns:
        (states, exit code): 130 after Ctrl-C; 0 if all have finished, else the code of the first that failed (1 of one
        that could not be started), else `TIME_IS_UP`.

    Raises:
        LaunchError: a config that joins a Ray cluster, where runs would take each other's places; another command that
            does runs of the matrix's folder.
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
    with held(matrix.folder), stop_requests() as ignore_more:
        crew = _Crew(matrix, configs, at_once, seconds, on_change)
        try:
            crew.work()
        except BaseException as error:
            ignore_more()
            crew.stop()
            if not isinstance(error, KeyboardInterrupt):
                raise
            return crew.states(), INTERRUPTED
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
        self.deadline = None if seconds is None else time.monotonic() + seconds - _END_SECONDS
        self.jobs = {name: _Job(config) for name, config in configs.items()}
        self.waiting = list(configs)
        earlier, nothing = [took(matrix.folder / name) for name in finished(matrix)], Took(0.0, "", here=True)
        self.longest_here = max((each for each in earlier if each.here), default=nothing)
        self.longest_elsewhere = max((each for each in earlier if not each.here), default=nothing)
        left = {name: config.trainer.total_training_steps for name, config in configs.items()}
        self.of = {state.name: state for state in at_first(matrix, left)}
        self.gpus = Gpus(visible_gpus())
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
                self._leave()
                return
            for name in running:
                self._look_at(name)
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End what runs, with all its processes."""
        for name in self._running():
            self._look_at(name)  # one that has ended by itself since was not stopped
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
        # what runs now will take longer than it has
        running = (job.process.seconds for job in self.jobs.values() if job.process is not None)
        takes = max([self._longest().seconds, *running])
        return [n for n in self.waiting if left >= takes or self.jobs[n].config.trainer.save_freq > 0]

    def _leave(self) -> None:
        """Say of those that wait why they are not begun."""
        longest = self._longest()
        if self.deadline is None or not longest.seconds:
            return
        left = max(0.0, self.deadline - time.monotonic())
        where = "" if longest.here else ", on another machine"
        why = f"{left:.0f} s are left to run, and {longest.name} took {longest.seconds:.0f} s{where}"
        remedy = "give more --minutes, or trainer.save_freq, so that a run that is cut off goes on from a checkpoint"
        for name in self.waiting:
            self._set(name, not_begun=(why, remedy))

    def _longest(self) -> Took:
        """Of the runs on this machine; where there is none yet, of those on others."""
        return self.longest_here if self.longest_here.seconds else self.longest_elsewhere

    def _start_next(self) -> None:
        if len(self._running()) >= self.at_once:
            return
        if self.last_start is not None and time.monotonic() - self.last_start < _GAP_SECONDS:
            return
        for name in self._startable()[:1]:
            self.waiting.remove(name)
            try:
                self._start(name)
            except (LaunchError, OSError) as error:
                # a folder that was taken meanwhile, a full disk: of this run alone until another says the same
                self._let_go(name)
                self._set(name, state=State.FAILED, cause=tuple(str(error).splitlines()))

    def _start(self, name: str) -> None:
        job = self.jobs[name]
        if job.attempts == 0:
            job.config = restarts.again(job.config)
        job.attempts += 1
        self.last_start = time.monotonic()
        folder, count = claim(job.config).path, gpus_asked(job.config)
        job.gpus = self.gpus.take(count)
        variables = {VISIBLE: ",".join(job.gpus)} if job.gpus else {}
        job.process = VerlProcess(
            folder, partial(self._step, name), on_start=partial(self._begin, name), variables=variables
        )
        self._set(name, state=State.RUNNING, gpus=job.gpus)

    def _let_go(self, name: str) -> None:
        job = self.jobs[name]
        self.gpus.give_back(job.gpus)
        job.process, job.gpus = None, ()

    def _step(self, name: str, step: Step) -> None:
        seen = self.of[name].metrics or {}
        self._set(name, steps=step.number, metrics={**seen, **step.metrics}, stage="")

    def _begin(self, name: str, stage: str) -> None:
        self._set(name, stage=stage)

    def _look_at(self, name: str) -> None:
        job = self.jobs[name]
        if job.process is not None and not job.process.running():
            self._ended(name, stopped=False)

    def _ended(self, name: str, *, stopped: bool) -> None:
        job = self.jobs[name]
        assert job.process is not None
        outcome: Outcome = job.process.outcome(stopped=stopped)
        job.seconds += outcome.seconds
        self._let_go(name)
        state = State.STOPPED if stopped else State.FAILED
        cause = outcome.cause
        try:
            restarts.record(self.of[name].folder, outcome)
            if outcome.exit_code == 0:
                record(self.matrix, name)
        except OSError as error:
            # the others may still have room, and go on
            cause = (*cause, f"{error}: how this run ended is not written down")
        if outcome.exit_code == 0:
            state = State.FINISHED
            # one that went on from an earlier call's checkpoint took longer than this call saw
            if job.attempts > 1 or not outcome.steps or outcome.steps[0].number <= 1:
                self.longest_here = max(self.longest_here, Took(job.seconds, name, here=True))
        elif not stopped and job.attempts <= int(job.config.tim.restarts.limit) and restarts.is_infrastructure(outcome):
            state = State.WAITING
            job.config = restarts.resuming(job.config)
            self.waiting.insert(0, name)
        code = None if state is State.WAITING else outcome.exit_code
        self._set(name, state=state, exit_code=code, seconds=job.seconds, cause=cause, stage="")

    def _set(self, name: str, **changes: Any) -> None:
        self.of[name] = replace(self.of[name], **changes)
        self._say()

    def _say(self) -> None:
        self.on_change(self.states())


def at_first(matrix: Matrix, left: Mapping[str, int | None]) -> list[RunState]:
    """The state of every run before any is started.

    Args:
        left: those that are still to be done -> their last step, None where that is not known yet.
    """
    return [
        RunState(cell.name, matrix.folder / cell.name, State.WAITING, 0, left[cell.name])
        if cell.name in left
        else RunState(cell.name, matrix.folder / cell.name, State.FINISHED, 0, None, exit_code=0, earlier=True)
        for cell in matrix.cells
    ]


def took(folder: Path) -> Took:
    """How long the run in a folder took, all its attempts together; 0 where its folder does not tell.

    Raises:
        LaunchError: a damaged list of attempts.
    """
    path = folder / ATTEMPTS_NAME
    if not path.is_file():
        return Took(0.0, folder.name, here=False)
    try:
        entries, _ = read_json_lines(path)
        seconds = sum(float(entry["seconds"]) for _, entry in entries)
    except (RunFolderError, KeyError, TypeError) as error:
        raise LaunchError.of(
            KEY, f"{path} cannot be read: {error}", "remove that file; the run stays finished"
        ) from error
    machines = {entry.get("machine") for _, entry in entries}
    return Took(seconds, folder.name, here=machines <= {restarts.machine()})
