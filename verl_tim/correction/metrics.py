"""Metrics that merge: totals add up, maxima take the maximum, and ratios are formed only at the end.

A :class:`MetricSums` stays on the device until :meth:`MetricSums.finalise`, the one place that waits for it. Merging
the
sums of micro-batches and ranks and finalising once gives what the whole batch would have given; averaging finished
metrics would not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

PREFIX = "rollout_corr/"


class Formula(NamedTuple):
    """How one reported number comes out of the merged totals and maxima; ``None`` from ``value`` leaves it out."""

    value: Callable[..., float | None]
    inputs: tuple[str, ...]


def _total(total: float) -> float:
    return total


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None


def _mean_minus_one(total: float, count: float) -> float | None:
    return total / count - 1 if count > 0 else None


def _deviation_around_one(total: float, squares: float, count: float) -> float | None:
    return math.sqrt(max(squares / count - (total / count - 1) ** 2, 0.0)) if count > 0 else None


def _effective_size(total: float, squares: float, count: float) -> float | None:
    if count <= 0:
        return None
    return total**2 / (count * squares) if squares > 0 else 0.0


def _maximum(value: float) -> float | None:
    return None if value == -math.inf else value


def _larger(maximum: float, negated_minimum: float) -> float | None:
    return _maximum(max(maximum, negated_minimum))


def _minimum(negated: float) -> float | None:
    return None if negated == -math.inf else -negated


def _is_zero(total: float) -> float:
    return float(total == 0)


@dataclasses.dataclass
class MetricSums:
    """Totals (fp64), maxima (fp64, -inf where nothing was seen), and the formulas that turn them into metrics.

    The set of names depends on the configuration only, never on the data, so every rank holds the same ones in the same
    order.
    """

    totals: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    formulas: dict[str, Formula] = dataclasses.field(default_factory=dict)

    # --- filling: `name` is the metric, totals and maxima are kept under names of their own ---------------------------

    def add_total(self, name: str, total: Tensor) -> None:
        """Keep a sum that formulas may use, without reporting it."""
        self.totals[name] = total.to(torch.float64)

    def count(self, name: str, total: Tensor) -> None:
        """Report a sum as it is."""
        self.add_total(name, total)
        self.formulas[name] = Formula(_total, (name,))

    def mean(self, name: str, total: Tensor, count: str, *, minus_one: bool = False) -> None:
        """Report total / count; left out while the count is 0."""
        self.add_total(f"{name}.sum", total)
        self.formulas[name] = Formula(_mean_minus_one if minus_one else _mean, (f"{name}.sum", count))

    def spread(self, name: str, total: Tensor, squares_around_one: Tensor, count: str) -> None:
        """Report ``<name>_mean`` and ``<name>_std`` (of the population) of weights.

        Weights crowd around 1: with the squares of w - 1, little cancels when the mean is taken off.
        """
        self.mean(f"{name}_mean", total, count)
        self.add_total(f"{name}.squares", squares_around_one)
        self.formulas[f"{name}_std"] = Formula(_deviation_around_one, (f"{name}_mean.sum", f"{name}.squares", count))

    def effective_size(self, name: str, total: Tensor, squares: Tensor, count: str) -> None:
        """Report (sum w)^2 / (n sum w^2); 0 when every weight is 0."""
        self.add_total(f"{name}.sum", total)
        self.add_total(f"{name}.squares", squares)
        self.formulas[name] = Formula(_effective_size, (f"{name}.sum", f"{name}.squares", count))

    def maximum(self, name: str, values: Tensor, where: Tensor) -> None:
        """Report the largest value where the mask is set; left out when it is set nowhere."""
        self.maxima[name] = masked_max(values, where)
        self.formulas[name] = Formula(_maximum, (name,))

    def minimum(self, name: str, values: Tensor, where: Tensor) -> None:
        """Report the smallest value where the mask is set; left out when it is set nowhere."""
        self.maxima[name] = -masked_min(values, where)
        self.formulas[name] = Formula(_minimum, (name,))

    def largest_size(self, name: str, maximum: str, minimum: str) -> None:
        """Report the largest absolute value of what an earlier :meth:`maximum` and :meth:`minimum` looked at."""
        self.formulas[name] = Formula(_larger, (maximum, minimum))

    def flag_zero(self, name: str, count: str) -> None:
        """Report 1 when the merged count is 0, else 0."""
        self.formulas[name] = Formula(_is_zero, (count,))

    # --- merging ----------------------------------------------------------------------------------------------------

    def merge(self, other: MetricSums) -> MetricSums:
        """The sums of both parts together.

        Raises:
            ValueError: the parts were made under different configurations.
        """
        if self.formulas.keys() != other.formulas.keys():
            odd = sorted(self.formulas.keys() ^ other.formulas.keys())
            raise ValueError(f"metrics of different configurations do not merge; only one side has {', '.join(odd)}")
        return MetricSums(
            {name: total + other.totals[name] for name, total in self.totals.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
            self.formulas,
        )

    def __add__(self, other: MetricSums) -> MetricSums:
        return self.merge(other)

    def flatten(self) -> tuple[Tensor, Tensor]:
        """All totals as one fp64 vector (to be summed over ranks) and all maxima as another (to be maximised)."""
        return _stack(self.totals), _stack(self.maxima)

    def unflatten(self, totals: Tensor, maxima: Tensor) -> MetricSums:
        """The same names with the values of two vectors laid out as :meth:`flatten` does."""
        return MetricSums(
            dict(zip(self.totals, totals.unbind(), strict=True)),
            dict(zip(self.maxima, maxima.unbind(), strict=True)),
            self.formulas,
        )

    def finalise(self) -> dict[str, float]:
        """Metric name -> finite number. Waits for the device once. What has no value is left out, nothing is NaN."""
        numbers = torch.cat(self.flatten()).tolist()
        merged: Mapping[str, float] = dict(zip([*self.totals, *self.maxima], numbers, strict=True))
        metrics = {}
        for name, formula in self.formulas.items():
            value = formula.value(*(merged[key] for key in formula.inputs))
            if value is not None:
                metrics[name if "/" in name else PREFIX + name] = value
        return metrics


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(values.values())) if values else torch.zeros(0, dtype=torch.float64)


def total(values: Tensor, where: Tensor | None = None) -> Tensor:
    """Sum in fp64 of finite values, over all elements or where the mask is set; a bool tensor is counted."""
    if values.dtype == torch.bool:
        return torch.count_nonzero(values if where is None else values & where)
    if where is not None:
        values = values * where  # a multiplication is several times faster on a CPU than torch.where
    # Rows first: the sum of a whole fp32 tensor in fp64 makes an fp64 copy of it, the sum of each row does not.
    return values.sum(dim=-1, dtype=torch.float64).sum() if values.dim() else values.to(torch.float64)


def row_total(values: Tensor, where: Tensor | None = None) -> Tensor:
    """Sum in fp64 of finite values over each row: (B, T) -> (B,)."""
    if where is not None:
        values = values * where
    return values.sum(dim=-1, dtype=torch.float64)


def masked_max(values: Tensor, where: Tensor) -> Tensor:
    """Largest value where the mask is set, -inf when it is set nowhere, as an fp64 scalar."""
    if values.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=values.device)
    lowest = torch.full((), -math.inf, dtype=values.dtype, device=values.device)
    return torch.where(where, values, lowest).amax().to(torch.float64)


def masked_min(values: Tensor, where: Tensor) -> Tensor:
    """Smallest value where the mask is set, inf when it is set nowhere, as an fp64 scalar."""
    if values.numel() == 0:
        return torch.full((), math.inf, dtype=torch.float64, device=values.device)
    highest = torch.full((), math.inf, dtype=values.dtype, device=values.device)
    return torch.where(where, values, highest).amin().to(torch.float64)
