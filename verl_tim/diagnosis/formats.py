"""How numbers are written for people."""

from __future__ import annotations

import math

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(value: float | None, digits: int = 3) -> str:
    """Three significant digits; exact zero as "0"; very small and very large with a power of ten."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if float(value).is_integer() and size < 1e6:
        return f"{int(value):,}".replace("-", "−")
    if size < 10**-(digits) or size >= 1e6:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPT)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}".replace("-", "−")


def percent(share: float | None) -> str:
    """A share of 1 as a percentage. 100 % and 0 % stand for exactly all and exactly none."""
    if share is None:
        return "–"
    if share == 0 or share == 1:
        return f"{share:.0%}".replace("%", " %")
    value = 100 * share
    if value > 99.9:
        return "> 99.9 %"
    if value < 0.1:
        return "< 0.1 %"
    return f"{value:.1f} %"


def written(value: float | None, kind: str) -> str:
    """A metric's value as text: a share as a percentage, anything else as a number."""
    return percent(value) if kind == "share" else short(value)


def one_line(text: str) -> str:
    """What a model wrote, for a cell of a table: line breaks as arrows."""
    return text.replace("\n", "↵")


def listed(words: list[str]) -> str:
    """a; a and b; a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
