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
    figures = _figures(value, whole=True)
    # what is shown decides, since 999.96 is shown as 1000
    while place < len(units) - 1 and abs(float(figures.replace(",", ""))) >= step:
        value, place = value / step, place + 1
        figures = _figures(value, whole=abs(value) >= step)
    return f"{figures} {units[place]}"


def _figures(value: float, *, whole: bool) -> str:
    return f"{value:,.0f}" if whole else f"{value:.{4 if abs(value) >= 100 else 3}g}"
