"""Ranks as threads of one process: the collective of `Shards` without processes, for tests of models and numerics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from verl_tim.numerics.shards import Shards

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[torch.Tensor | None] = [None] * size
        self.calls = 0

    def shards(self, rank: int) -> Shards:
        def gather(x: torch.Tensor) -> torch.Tensor:
            self.given[rank] = x
            self.barrier.wait()
            every = torch.stack([given for given in self.given if given is not None])
            self.barrier.wait()
            self.calls += rank == 0
            return every

        return Shards(rank, self.size, gather)


def on_ranks(size: int, run: Callable[[Shards], T]) -> list[T]:
    """What `run` gives on each of `size` ranks. The first error of any rank is raised."""
    meeting = _Meeting(size)
    results: list = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = run(meeting.shards(rank))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert meeting.calls, "no collective ran"
    return results
