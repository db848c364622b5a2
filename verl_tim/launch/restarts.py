"""A run that starts again by itself when what it runs on has failed: `tim.restarts`, `verl-tim train --restarts N`.

Only a process or a node that died is worth a second try: the run goes on from its last checkpoint in the same folder.
What the run itself decided (a gate), or what would happen again (a config, an error in the code), ends it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from verl_tim.diagnosis.run_folder import ATTEMPTS_NAME
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.exit_code import INTERRUPTED
from verl_tim.launch.process import Outcome, Step, exception_names
from verl_tim.launch.run_folder import KEY, State, has_checkpoint, state_of, write_whole
from verl_tim.training.checkpoints import TRACKER

PAUSE_SECONDS = 5.0
"""Between two attempts: Ray takes back what the last one held."""

# A process that the kernel or somebody ended by force; a stop that was asked for (SIGINT, SIGTERM) is none.
_KILLED = tuple(
    128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
)

# Last exceptions of a run whose processes, nodes or connections are gone; by class, for they come as text from a log.
_GONE = frozenset(
    {
        "ProcessDied",  # verl_tim.training.processes
        "ReplicaAwayError",  # verl_tim.rollout.away, where no trainer names the processes yet
        # ray.exceptions
        "ActorDiedError",
        "ActorUnavailableError",
        "LocalRayletDiedError",
        "NodeDiedError",
        "ObjectLostError",
        "OutOfMemoryError",
        "OwnerDiedError",
        "RayActorError",
        "WorkerCrashedError",
        # torch.distributed
        "DistBackendError",
        "DistNetworkError",
    }
)
# Ray's actor error for a constructor that raised: the same again at the next start.
_NEVER_STARTED = "error raised in its creation task"


def is_infrastructure(outcome: Outcome) -> bool:
    """Whether an attempt ended because a process, a node or a connection was lost."""
    if outcome.exit_code in _KILLED:
        return True
    if outcome.exit_code in (0, INTERRUPTED) or any(_NEVER_STARTED in line for line in outcome.cause):
        return False
    names = exception_names(outcome.cause)
    return bool(names) and names[-1] in _GONE


def run_with_restarts(
    config: DictConfig, run_once: Callable[[DictConfig], Outcome], say: Callable[[str], None]
) -> Outcome:
    """Run, and start again after a failure of infrastructure, at most `tim.restarts.limit` times.

    Args:
        config: of the run, ready.
        run_once: takes the run folder and runs verl to its end.
        say: a line for who watches.

    Returns:
        How the last attempt ended, with the steps and the seconds of all, and their number.
    """
    folder, limit = Path(config.tim.run_dir), int(config.tim.restarts.limit)
    steps: tuple[Step, ...] = ()
    seconds, attempt = 0.0, 1
    while True:
        outcome = run_once(config)
        try:
            record(folder, outcome)
        except OSError as error:
            # a full disk, which may be what ended it: the cause is worth more than the list
            say(f"{error}: how this attempt ended is not written down")
        steps, seconds = joined(steps, outcome.steps), seconds + outcome.seconds
        again = attempt <= limit and is_infrastructure(outcome)
        if not again:
            if limit and outcome.exit_code not in (0, INTERRUPTED):
                why = "all restarts are used up" if attempt > limit else "this is no failure of the infrastructure"
                say(f"not started again: {why} (tim.restarts.limit={limit})")
            return dataclasses.replace(outcome, steps=steps, seconds=seconds, attempts=attempt)
        reason = outcome.cause[-1] if outcome.cause else f"exit code {outcome.exit_code}"
        say(f"attempt {attempt} died after step {_last(steps)}: {reason}")
        config = resuming(config)
        say(f"starting again from {checkpoint_in_words(config)}: restart {attempt} of {limit}")
        attempt += 1
        time.sleep(PAUSE_SECONDS)


def again(config: DictConfig) -> DictConfig:
    """The config for a run whose folder may hold it, not known to have ended well: it goes on from the last checkpoint
    there; without one what is there is removed, and the run begins anew.

    Raises:
        LaunchError: what is there cannot be removed.
    """
    folder = Path(config.tim.run_dir)
    if state_of(config, resumable=True)[0] not in (State.UNFINISHED, State.FINISHED):
        return config
    if has_checkpoint(config):
        return resuming(config)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise LaunchError.of(
            KEY, f"a run that was cut off cannot be removed: {error}", f"remove {folder}, or give another {KEY}"
        ) from error
    return config


def resuming(config: DictConfig) -> DictConfig:
    """The config of the next attempt: it goes on from the last checkpoint of the run folder, if there is one.

    The checkpoint's step was validated, or was not to be, when it was written.
    """
    config = copy.deepcopy(config)
    found = has_checkpoint(config)
    with open_dict(config):
        # a run that began from a checkpoint elsewhere, and wrote none yet, begins there again
        if found or config.trainer.resume_mode == "disable":
            config.trainer.resume_mode = "auto"
        if found:
            config.trainer.val_before_train = False
    return config


def checkpoint_in_words(config: DictConfig) -> str:
    """What the next attempt begins with."""
    if config.trainer.resume_mode == "resume_path":
        return str(config.trainer.resume_from_path)
    tracker = Path(config.trainer.default_local_dir) / TRACKER
    return f"the checkpoint of step {tracker.read_text().strip() or '?'}" if tracker.exists() else "the beginning"


def joined(earlier: Sequence[Step], later: Sequence[Step]) -> tuple[Step, ...]:
    """Steps of two attempts: what the later one did again counts once, as the later did it."""
    if not later:
        return tuple(earlier)
    return (*(step for step in earlier if step.number < later[0].number), *later)


def _last(steps: Sequence[Step]) -> int:
    return steps[-1].number if steps else 0


def machine() -> str:
    """This machine since it was last started; a lent one may bear the name of the one before."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname()


def record(folder: Path, outcome: Outcome) -> None:
    """Adds an attempt to the run folder's list."""
    path = folder / ATTEMPTS_NAME
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # a full disk may have cut the last one off
    text = text[: text.rfind("\n") + 1]
    number = 1 + text.count("\n")
    entry: dict[str, Any] = {
        "attempt": number,
        "exit_code": outcome.exit_code,
        "first_step": outcome.steps[0].number if outcome.steps else None,
        "last_step": outcome.steps[-1].number if outcome.steps else None,
        "seconds": round(outcome.seconds, 1),
        "cause": list(outcome.cause),
        "machine": machine(),
    }
    write_whole(path, text + json.dumps(entry, ensure_ascii=False) + "\n")
