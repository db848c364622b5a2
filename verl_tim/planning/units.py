"""Sizes and counts for a reader, from a model that tests train to one of trillions: three figures and a unit (four
above a hundred, where two sizes are held against each other)."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Bytes: 27.4 GiB, 512 KiB."""
    return _with_unit(nbytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def count(number: float) -> str:
    """Parameters, elements: 1.72 G, 156 k."""
    return _with_unit(number, 1000.0, ("", "k", "M", "G", "T")).rstrip()


def _with_unit(value: float, step: float, units: Sequence[str]) -> str:
    place = 0
    while place < len(units) - 1 and abs(value) >= step:
        value, place = value / step, place + 1
    figures = f"{value:,.0f}" if place == 0 or abs(value) >= step else f"{value:.{4 if abs(value) >= 100 else 3}g}"
    return f"{figures} {units[place]}"
