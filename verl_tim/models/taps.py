"""Intermediate results by name, on either side, so that two forwards can be laid side by side.

Both the engine's layers and the trainer's call `tap` at the same points with the same names. Nothing is kept, and
nothing is computed, unless a `record()` block is open in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_open: list[dict[str, Tensor]] = []


def tap(name: str, value: Tensor) -> None:
    """Keep a copy of `value` (rows first) under `name` if a recording is open. A name seen twice keeps the first."""
    if _open:
        _open[-1].setdefault(name, value.detach().flatten(1).clone())


@contextmanager
def record() -> Iterator[dict[str, Tensor]]:
    """Collect what `tap` is given inside the block, in forward order: {name: (rows, features)}."""
    taken: dict[str, Tensor] = {}
    _open.append(taken)
    try:
        yield taken
    finally:
        _open.pop()
