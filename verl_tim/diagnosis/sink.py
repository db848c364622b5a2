"""Collects metric values on their device and moves them to the host in one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PREFIX = "tim/"


class MetricSink:
    """Values by name. What rests on zero samples has no value and is left out; everything else must be finite."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._values: list[Tensor] = []
        self._counts: list[Tensor] = []

    def put(self, name: str, value: Tensor | float, count: Tensor | None = None) -> None:
        """Add `tim/<name>`. `count`: how many samples the value rests on; None means at least one."""
        self._names.append(PREFIX + name)
        self._values.append(torch.as_tensor(value, dtype=torch.float64, device=self._device))
        self._counts.append(torch.ones((), dtype=torch.int64, device=self._device) if count is None else count)

    def put_mean(self, name: str, values_N: Tensor, select_N: Tensor | None = None) -> None:
        """Add the mean of the (selected) values; left out when there are none."""
        if select_N is None:
            if values_N.numel():
                self.put(name, _total(values_N) / values_N.numel())
            return
        count = select_N.count_nonzero()
        selected_N = values_N & select_N if values_N.dtype == torch.bool else values_N.where(select_N, 0)
        self.put(name, _total(selected_N) / count.clamp_min(1), count)

    def put_bins(self, stem: str, labels: Sequence[str], sum_G: Tensor, count_G: Tensor) -> None:
        """Add `tim/<stem>_<label>` = sum / count for each bin with a count."""
        mean_G = sum_G / count_G.clamp_min(1)
        for label, mean, count in zip(labels, mean_G, count_G, strict=True):
            self.put(f"{stem}_{label}", mean, count)

    def finish(self) -> dict[str, float]:
        """All values as plain floats (+0.0 for zero).

        Raises:
            ArithmeticError: a value that rests on samples is not finite: a fault of the metric, never something to log.
        """
        if not self._names:
            return {}
        values = torch.stack(self._values).tolist()
        counts = torch.stack(self._counts).tolist()
        metrics = {name: value + 0.0 for name, value, count in zip(self._names, values, counts, strict=True) if count}
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise ArithmeticError(f"non-finite metrics: {', '.join(broken)}")
        return metrics


def _total(values_N: Tensor) -> Tensor:
    """0-d float64."""
    if values_N.dtype == torch.bool:
        return values_N.count_nonzero().to(torch.float64)
    return values_N.sum(dtype=torch.float64)
