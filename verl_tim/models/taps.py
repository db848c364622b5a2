"""Intermediate results by name, on either side, so that two forwards can be laid side by side.

Both the engine's layers and the trainer's call `tap` at the same points with the same names. Nothing is kept, and
nothing is computed, unless a recording is open in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

ROTATED = "(projected, normalised, rotated)"

_open: list[Callable[[str, Tensor], None]] = []


def tap(name: str, value: Tensor) -> None:
    """Hand `value` (rows first) to the innermost open recording."""
    if _open:
        _open[-1](name, value)


def recording() -> bool:
    """Whether a recording is open, for taps whose value must be made first."""
    return bool(_open)


@contextmanager
def record(wanted: Callable[[str], bool] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect what `tap` is given inside the block, in forward order: {name: (rows, features)}.

    A name seen twice keeps the first.

    Args:
        wanted: which names to copy; None copies all, which takes memory for every layer.
    """
    taken: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        if name not in taken and (wanted is None or wanted(name)):
            taken[name] = value.detach().flatten(1).clone()

    with _receiving(keep):
        yield taken


@contextmanager
def record_calls(wanted: Callable[[str], bool]) -> Iterator[list[tuple[str, Tensor]]]:
    """Every call in the order of the calls, also those of a recomputation in backward: [(name, (rows, features))]."""
    calls: list[tuple[str, Tensor]] = []

    def keep(name: str, value: Tensor) -> None:
        if wanted(name):
            calls.append((name, value.detach().flatten(1).clone()))

    with _receiving(keep):
        yield calls


@contextmanager
def _receiving(keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    _open.append(keep)
    try:
        yield
    finally:
        _open.pop()
