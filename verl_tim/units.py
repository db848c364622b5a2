"""Sizes and counts for a reader, from a model that tests train to one of trillions."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def size(nbytes: float) -> str:
    """Bytes: 27.4 GiB, 512 KiB. Three figures, four above a hundred, where two sizes are held against each other."""
    return _with_unit(nbytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"), _figures)


def count(number: float) -> str:
    """Parameters, tokens, elements: 1.7 B, 25.4 M, 156 K. As models are called: a billion is B; one decimal below a
    hundred of a unit, none from there on."""
    return _with_unit(number, 1000.0, ("", "K", "M", "B", "T"), _tenths).rstrip()


def _with_unit(value: float, step: float, units: Sequence[str], figures: Callable[[float], str]) -> str:
    place, shown = 0, f"{value:,.0f}"
    # what is shown decides, since 999.96 is shown as 1000
    while place < len(units) - 1 and abs(float(shown.replace(",", ""))) >= step:
        value, place = value / step, place + 1
        shown = f"{value:,.0f}" if abs(value) >= step else figures(value)
    return f"{shown} {units[place]}"


def _figures(value: float) -> str:
    return f"{value:.{4 if abs(value) >= 100 else 3}g}"


def _tenths(value: float) -> str:
    # 99.96 is shown as 100, not as 100.0
    return f"{value:.1f}" if abs(round(value, 1)) < 100 else f"{value:.0f}"
