"""Ranks one after another in one process, on one device: each collective's result is made from a run of every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from verl_tim.numerics.shards import Shards

T = TypeVar("T")


class _Pause(Exception):
    pass


def in_turns(size: int, run: Callable[[Shards], T]) -> list[T]:
    """What `run`, which must be repeatable, gives on each of `size` ranks."""
    known: list[torch.Tensor] = []  # results of the collectives so far
    while True:
        results: list[T] = []
        given: list[torch.Tensor] = []
        for rank in range(size):
            calls = iter(range(1 << 30))

            def gather(x: torch.Tensor, calls=calls, given=given) -> torch.Tensor:
                call = next(calls)
                if call < len(known):
                    return known[call].clone()
                given.append(x.clone())
                raise _Pause

            try:
                results.append(run(Shards(rank, size, gather)))
            except _Pause:
                continue
        if not given:
            assert known, "no collective ran"
            return results
        assert len(given) == size, "the ranks did not call the same collectives"
        known.append(torch.stack(given))
