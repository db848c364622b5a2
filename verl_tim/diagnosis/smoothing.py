"""Smoothing of curves for the eye: an exponential or a rolling mean. Tables and bands never see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from verl_tim.diagnosis.errors import DiagnosisError

FORMS = "ema:WEIGHT (0 < WEIGHT < 1) or rolling:STEPS (STEPS >= 2)"


@dataclass(frozen=True)
class Smoothing:
    """`ema`: y = amount * previous + (1 - amount) * value, unbiased at the start; `rolling`: centred mean of `amount`
    logged steps, fewer at the ends."""

    kind: Literal["ema", "rolling"]
    amount: float

    @classmethod
    def parse(cls, text: str) -> Smoothing | None:
        """From `ema:0.9`, `rolling:11`, or `off`.

        Raises:
            DiagnosisError: anything else.
        """
        if text == "off":
            return None
        kind, _, amount = text.partition(":")
        try:
            number = float(amount)
        except ValueError:
            number = -1.0
        if kind == "ema" and 0 < number < 1:
            return cls("ema", number)
        if kind == "rolling" and number >= 2 and number.is_integer():
            return cls("rolling", number)
        raise DiagnosisError(f"is {text!r}", f"give off, {FORMS}", key="--smooth")

    def apply(self, values: Sequence[float]) -> list[float]:
        """Smoothed values, as many as were given."""
        series = pd.Series(values, dtype="float64")
        if self.kind == "ema":
            return series.ewm(alpha=1 - self.amount).mean().tolist()
        return series.rolling(int(self.amount), center=True, min_periods=1).mean().tolist()

    def __str__(self) -> str:
        if self.kind == "ema":
            return f"exponential mean, weight {self.amount:g}"
        return f"mean of {self.amount:g} steps"
