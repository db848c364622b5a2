"""The worker processes of split engines, as their driver sees them: started, told, watched, ended.

A crew serves any number of engines of one split, one verb at a time, since processes and communicators cost seconds.

A worker that raises says so with its traceback and ends; one that dies is noticed by its socket. Either is a loss: the
driver's exchanges with it are let go (gloo notices by itself, NCCL is aborted), and the next call of the driver raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_tim.engine.config import EngineConfig
from verl_tim.engine.device import Device, rank_device
from verl_tim.engine.errors import EngineDeadError
from verl_tim.engine.link import Link, LinkClosed
from verl_tim.engine.parallel import TIMEOUT, Ranks, make_store

logger = logging.getLogger(__name__)

_GRACE = 10.0  # seconds that a worker gets to end by itself
_NEWS = 5.0  # seconds until a lost worker's own account of it has arrived


@dataclass(frozen=True)
class Split:
    """How engines are split: ranks of a stage, stages, and the first rank's device, `EngineConfig.device`."""

    tensor: int
    stages: int
    device: str

    @classmethod
    def of(cls, config: EngineConfig) -> Split:
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size, config.device)

    def ranks(self, rank: int, store: dist.Store) -> Ranks:
        """This process's place; waits for all others."""
        return Ranks(self.tensor, self.stages, rank, store, rank_device(self.device, rank))


@dataclass(frozen=True)
class Hello:
    """What a worker is told first. port: of the driver's store; threads: torch's."""

    split: Split
    rank: int
    port: int
    threads: int


class _Worker:
    def __init__(self, rank: int, crew: Crew) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "verl_tim.engine.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.link = Link(
            ours.detach(),
            on_message=lambda message: crew._heard(rank, message),
            on_end=lambda: crew._ended(self),
        )


class Crew:
    """Ranks 1, 2, ... of engines whose driver, rank 0, is this process.

    Attributes:
        split: of its engines; ranks: this process's place.

    Raises:
        EngineDeadError: a worker did not start; the message holds its traceback.
        EngineConfigError: fewer GPUs than ranks.
    """

    def __init__(self, split: Split) -> None:
        rank_device(split.device, split.tensor * split.stages - 1)
        self.split = split
        self._lock = threading.Lock()
        self._loss: str | None = None
        self._closing = False
        self._on_loss: Callable[[], None] = lambda: None
        self._engines = 0
        self._dismissed: list[int] = []
        store = make_store()
        self._workers: list[_Worker] = []
        try:
            for rank in range(1, split.tensor * split.stages):
                self._workers.append(_Worker(rank, self))
            for worker in self._workers:
                self._send(worker, Hello(split, worker.rank, store.port, torch.get_num_threads()))
            self.replies("here")
            self.ranks = split.ranks(0, store)
        except BaseException as error:
            lost = self.dead() if self.lost(wait=True) else None
            self.close(at_once=True)
            if lost is not None:
                raise lost from error
            raise
        self._on_loss = self.ranks.abort

    def enlist(self, config: EngineConfig, device: Callable[[], Device] | None) -> int:
        """Workers begin to make an engine, which answers "ready": its number.

        Args:
            device: makes the device of each rank's graph runner; importable, since it travels.
        """
        self._let_go()
        self._engines += 1
        self.tell("engine", self._engines, config, device)
        return self._engines

    def dismiss(self, number: int) -> None:
        """Workers let go of an engine, before the next verb: this may be called by a garbage collection, in the middle
        of an exchange."""
        self._dismissed.append(number)

    def order(self, number: int, verb: str, *arguments: Any) -> None:
        """Every worker runs a verb of an engine."""
        self._let_go()
        self.tell("verb", number, verb, *arguments)

    def _let_go(self) -> None:
        while self._dismissed:
            self.tell("drop", self._dismissed.pop())

    # Talking.

    def tell(self, kind: str, *content: Any) -> None:
        """Every worker the same message."""
        self.tell_each([(kind, *content)] * len(self._workers))

    def tell_each(self, messages: Sequence[tuple[Any, ...]]) -> None:
        """Each worker a message of its own, in rank order."""
        self.check()
        for worker, message in zip(self._workers, messages, strict=True):
            self._send(worker, message)

    def _send(self, worker: _Worker, message: Any) -> None:
        try:
            worker.link.send(message)
        except LinkClosed:
            raise self.dead() from None

    def replies(self, kind: str) -> list[Any]:
        """Each worker's next reply of that kind, in rank order.

        Raises:
            EngineDeadError: a worker is lost, or says nothing for ten minutes.
        """
        found = []
        for worker in self._workers:
            while True:
                try:
                    said, value = worker.link.receive(TIMEOUT.total_seconds())
                except LinkClosed:
                    raise self.dead() from None
                except queue.Empty:
                    self._lose(f"rank {worker.rank} gave no answer for {TIMEOUT}")
                    raise self.dead() from None
                if said == kind:
                    found.append(value)
                    break
        return found

    # Losses.

    def check(self) -> None:
        """Raises EngineDeadError if a worker is lost, or all were ended."""
        if self.is_over:
            raise self.dead()

    @property
    def is_over(self) -> bool:
        """Whether no engine can run here any more: a worker is lost, or all were ended."""
        return self._loss is not None or self._closing

    def lost(self, wait: bool = False) -> bool:
        """Whether a worker is lost; with `wait`, after a moment in which the news may arrive."""
        until = time.monotonic() + (_NEWS if wait else 0)
        while self._loss is None and time.monotonic() < until:
            time.sleep(0.02)
        return self._loss is not None

    def dead(self) -> EngineDeadError:
        """Why there is no crew."""
        self.lost(wait=not self._closing)
        return EngineDeadError(self._loss or "the engine was closed")

    def _heard(self, rank: int, message: tuple[str, Any]) -> bool:
        if message[0] == "failed":
            self._lose(f"rank {rank} failed:\n{message[1]}")
            return False
        return True

    def _ended(self, worker: _Worker) -> None:
        if self._closing:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_GRACE)
        self._lose(f"rank {worker.rank} (process {worker.process.pid}) ended with exit code {worker.process.poll()}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._loss is not None or self._closing:
                return
            self._loss = reason
        logger.critical("a rank of the engine is lost: %s", reason)
        try:
            self._on_loss()
        except Exception:
            logger.exception("letting go of the lost rank's exchanges failed")
        for worker in self._workers:
            worker.link.interrupt()

    # The end.

    @property
    def processes(self) -> list[subprocess.Popen]:
        """Of the workers, in rank order."""
        return [worker.process for worker in self._workers]

    def close(self, *, at_once: bool = False) -> None:
        """End all workers. Idempotent.

        Args:
            at_once: they may be in the middle of an exchange that nobody will join.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for worker in self._workers:
            with contextlib.suppress(LinkClosed):
                if self._loss is None and not at_once:
                    worker.link.send(("close",))
                else:
                    worker.process.terminate()
        until = time.monotonic() + _GRACE
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end by itself: killed", worker.rank)
                worker.process.kill()
                worker.process.wait()
            worker.link.close()
        if self._loss is None:
            self._on_loss()  # nobody is left to exchange with; on a GPU that gives memory back
