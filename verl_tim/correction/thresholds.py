"""Thresholds and bands as users write them: numbers, ``[lo, hi]`` lists, and verl's ``"lo_hi"`` text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from .errors import CONFIG_PATH, ConfigError

IS_KEY, RS_KEY = "rollout_is_threshold", "rollout_rs_threshold"
THRESHOLD_KEYS = (IS_KEY, RS_KEY)

# float() would take "0.5_5" as 0.55, the very slip that YAML makes; so underscores never reach it.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_OPEN = ("null", "none", "~")
_BAND_HELP = 'Write a band as [lo, hi] (null for an open end) or as the quoted text "lo_hi"'


class Band(NamedTuple):
    """A closed interval of ratios; ``None`` is an open end. Keep iff lower <= r <= upper."""

    lower: float | None
    upper: float | None

    @property
    def log_lower(self) -> float | None:
        return None if self.lower is None else math.log(self.lower)

    @property
    def log_upper(self) -> float | None:
        return None if self.upper is None else math.log(self.upper)

    def __str__(self) -> str:
        return f"[{_show(self.lower)}, {_show(self.upper)}]"


def _show(end: float | None) -> str:
    return "null" if end is None else f"{end:.10g}"


def is_number(value: Any) -> bool:
    """A real number that is not a bool (YAML's ``true`` must not become 1)."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def parse_number(value: Any, key: str, whole: Any) -> float:
    """A positive finite number, given as a number or as text.

    Args:
        value: the part to read. key, whole: the setting it came from, for the error.
    """
    if not is_number(value) and not (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
        raise ConfigError(key, whole, f"{value!r} is not a number", _BAND_HELP)
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond fp64's range
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(
            key, whole, f"{value!r} is not a positive finite number", "Thresholds are positive and finite"
        )
    return number


def _split(value: Any, key: str, whole: Any) -> Any:
    """The two ends of ``[lo, hi]`` or ``"lo_hi"``, or the value itself when it is a single number."""
    if isinstance(value, str) and "_" in value:
        ends = value.strip().split("_")
    elif is_list(value):
        ends = list(value)
    else:
        return value
    if len(ends) != 2:
        raise ConfigError(key, whole, f"{value!r} is no pair", _BAND_HELP)
    return [None if end is None or (isinstance(end, str) and end.strip().lower() in _OPEN) else end for end in ends]


def _band(ends: Sequence[Any], key: str, whole: Any) -> Band:
    lower, upper = (None if end is None else parse_number(end, key, whole) for end in ends)
    if lower is None and upper is None:
        raise ConfigError(key, whole, "a band with both ends open bounds nothing", "Give at least one end")
    if lower is not None and upper is not None and lower > upper:
        raise ConfigError(
            key, whole, f"lower end {lower:g} is above upper end {upper:g}", "Write [lo, hi] with lo <= hi"
        )
    return Band(lower, upper)


def parse_is_threshold(value: Any) -> float | Band:
    """``rollout_is_threshold``: a number truncates weights at it; a pair zeroes weights outside the band.

    Raises:
        ConfigError: not a positive finite number, nor a band of such.
    """
    parts = _split(value, IS_KEY, value)
    return _band(parts, IS_KEY, value) if isinstance(parts, list) else parse_number(parts, IS_KEY, value)


def parse_band_on_ratio(value: Any, rule: str, whole: Any = None) -> Band:
    """The band of a K1 rule; a single x >= 1 means [1/x, x]."""
    whole = value if whole is None else whole
    parts = _split(value, RS_KEY, whole)
    if isinstance(parts, list):
        return _band(parts, RS_KEY, whole)
    number = parse_number(parts, RS_KEY, whole)
    if number < 1:
        raise ConfigError(
            RS_KEY,
            whole,
            f"{rule} takes a band on the ratio, and the single number {number:g} is below 1",
            f"For |log r| <= x write [exp(-x), exp(x)], here [{math.exp(-number):.6g}, {math.exp(number):.6g}]; "
            "a single x >= 1 means [1/x, x]",
        )
    return Band(1 / number, number)


def parse_upper_bound(value: Any, rule: str) -> float:
    """The upper bound of every rule that is not K1."""
    if isinstance(_split(value, RS_KEY, value), list):
        raise ConfigError(RS_KEY, value, f"{rule} takes one upper bound, not a band", "Give a single positive number")
    return parse_number(value, RS_KEY, value)


def one_per_rule(value: Any, takes_band: Sequence[bool], names: Sequence[str]) -> list[Any]:
    """Split ``rollout_rs_threshold`` into one entry per rule (one entry alone serves all).

    Bands nest (``[[0.6, 1.4], 0.05]``); verl's text form separates rules by commas (``"0.6_1.4,0.05"``). A flat pair is
    a band when there is one rule, one number per rule when one of two rules takes no band, and refused as ambiguous for
    two K1 rules.
    """
    count = len(names)
    if isinstance(value, str):
        entries: list[Any] = [part.strip() for part in value.split(",")]
    elif is_list(value):
        entries = list(value)
        flat_pair = len(entries) == 2 and not any(is_list(e) or (isinstance(e, str) and "_" in e) for e in entries)
        if flat_pair and all(takes_band):
            if count == 2:
                lo, hi = entries
                raise ConfigError(
                    RS_KEY,
                    value,
                    f"a flat pair for the two K1 rules {', '.join(names)} is ambiguous",
                    f"Write [[{lo}, {hi}], [{lo}, {hi}]] for a band each, or one band per rule",
                )
            entries = [entries]
        elif flat_pair and count == 1:
            raise ConfigError(RS_KEY, value, f"{names[0]} takes one upper bound, not a band", "Give a single number")
    elif value is None:
        raise ConfigError(
            RS_KEY,
            None,
            f"rollout_rs={','.join(names)} needs a threshold and there is no default",
            f"Give one per rule, or one for all: {CONFIG_PATH}.{RS_KEY}={'[0.5,2.0]' if takes_band[0] else '0.05'}",
        )
    else:
        entries = [value]
    if len(entries) == 1:
        return entries * count
    if len(entries) != count:
        raise ConfigError(
            RS_KEY,
            value,
            f"{len(entries)} thresholds for {count} rule{'s' if count > 1 else ''} ({', '.join(names)})",
            "Give one per rule, or one for all; a band nests: [[lo, hi], x]",
        )
    return entries
