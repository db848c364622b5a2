"""Every speed of a plan, read from rates.yaml, scaled to a GPU, and with where it is from.

Two sums explain what was measured, and carry it to other sizes:

Decode step = bytes that it must read / bandwidth + excess. The excess (launches, small products, attention's and the
head's shortfall, sampling) was the same at a context of 384 and of 2,560 tokens and grows with the sequences, so it is
taken per layer, linear in the sequences between the two measured batches (and beyond the larger one), constant below.

Trainer's forward = linear FLOP / linear rate + attention FLOP / attention rate. Two forwards of one model at two
lengths give both rates; a step then is predicted, not fitted (`trainer_time`).

On another GPU, arithmetic scales with its specified bf16 rate and reading with its specified bandwidth; the excess
stays. Whatever is not the measured case is listed as a reason (`Speeds.reasons`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import yaml

from verl_tim.planning.gpu import GPUS, Gpu
from verl_tim.planning.shape import Shape, shape_of

KINDS = ("measured", "specified", "assumed")


@dataclass(frozen=True)
class Rate:
    """One number of rates.yaml."""

    value: float
    kind: str
    source: str
    date: str = ""


@cache
def table() -> Mapping[str, Any]:
    """rates.yaml as it stands, checked: every entry has a kind or a date, and a source."""
    text = resources.files("verl_tim.planning").joinpath("rates.yaml").read_text(encoding="utf-8")
    # PyYAML reads 4.3e12 as text (YAML 1.1 wants a sign), OmegaConf would not; numbers are made here
    content: dict[str, Any] = _numbers(yaml.safe_load(text))
    for name, entry in content.items():
        if isinstance(entry, dict):
            good = entry.get("kind") in KINDS if "value" in entry else "date" in entry
            assert good, f"rates.yaml: {name} lacks its kind or date"
            assert entry.get("source"), f"rates.yaml: {name} lacks its source"
    return content


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def rate(name: str) -> Rate:
    """A single rate by its name in rates.yaml."""
    entry = table()[name]
    return Rate(float(entry["value"]), entry["kind"], entry["source"], str(entry.get("date", "")))


def measured_gpu() -> Gpu:
    """The GPU that the rates were measured on."""
    return GPUS[table()["measured_on"]]


ENGINES = ("vexact", "vllm")
_SMALL = 3e8  # parameters


@dataclass(frozen=True)
class TrainerRates:
    """FLOP per second of linears (of a dense model, of one with experts) and of attention, on the measured GPU."""

    linear: float
    sparse_linear: float
    attention: float


@cache
def trainer_rates(numerics: str) -> TrainerRates:
    """From the measured forwards of `contract` or `stock`."""
    rows = table()["trainer"][numerics]
    work, seconds = [], []
    for row in rows:
        if row["role"] == "fit":
            work.append(_forward_work(row))
            seconds.append(row["forward"])
    inverse = np.linalg.solve(np.array(work), np.array(seconds))
    (sparse,) = (row for row in rows if row["role"] == "fit_sparse")
    linear, attention = _forward_work(sparse)
    of_linears = float(sparse["forward"] - attention * inverse[1])
    return TrainerRates(float(1 / inverse[0]), linear / of_linears, float(1 / inverse[1]))


def _forward_work(row: Mapping[str, Any]) -> tuple[float, float]:
    """(linear FLOP, attention FLOP) of a forward over a measured batch."""
    shape = measured_shape(row["shape"], row["layers"])
    sequences, length = row["sequences"], row["length"]
    return shape.linear_flops() * sequences * length, shape.attention_flops_per_square * sequences * length**2


@cache
def measured_shape(name: str, layers: int | None = None) -> Shape:
    return shape_of(name, layers=layers)


@cache
def _excess_points(engine: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(sequences, seconds per layer) of the measured rollouts that the excess is taken from."""
    group = table()["rollout"]
    shape = measured_shape(group["shape"])
    trainer, bandwidth = trainer_rates("stock" if engine == "vllm" else "contract"), rate("bandwidth").value
    points = []
    for row in group[engine]:
        if row["role"] != "fit":
            continue
        count, prompt, output = row["sequences"], row["prompt"], row["output"]
        prefill = count * prompt * shape.linear_flops(head=False) / trainer.linear
        prefill += count * prompt**2 * shape.attention_flops_per_square / trainer.attention
        step = (row["seconds"] - prefill) / output
        read = 2 * shape.touched_parameters(count) + count * (prompt + output / 2) * shape.kv_bytes
        points.append((count, (step - read / bandwidth) / shape.config.num_layers))
    points.sort()
    return tuple(float(x) for x, _ in points), tuple(float(y) for _, y in points)


@cache
def _sparse_points() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(sequences, seconds beyond reading) of one sparse layer's experts, router and dispatch."""
    group = table()["sparse_layer"]
    shape = measured_shape(group["shape"])
    moe = shape.config.moe
    assert moe is not None
    counts, seconds = [], []
    for row in group["rows"]:
        touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** row["sequences"])
        read = 2 * (touched * shape.expert_parameters + shape.config.hidden_size * moe.num_experts)
        counts.append(float(row["sequences"]))
        seconds.append(max(0.0, row["seconds"] - read / rate("bandwidth").value))
    return tuple(counts), tuple(seconds)


def _line(x: float, points: tuple[tuple[float, ...], tuple[float, ...]]) -> float:
    """Linear between the points and beyond the last, constant before the first."""
    xs, ys = points
    if x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return ys[-1] + max(0.0, slope) * (x - xs[-1])


@dataclass(frozen=True)
class Speeds:
    """The rates for one GPU."""

    gpu: Gpu

    @property
    def bandwidth(self) -> float:
        """Bytes per second that reading reaches: the measured share of the specified rate."""
        return rate("bandwidth").value * self.gpu.bandwidth / measured_gpu().bandwidth

    def linear(self, numerics: str, shape: Shape) -> float:
        """FLOP/s of a trainer's linears."""
        rates = trainer_rates(numerics)
        return (rates.sparse_linear if shape.sparse_layers else rates.linear) * self._arithmetic

    def attention(self, numerics: str) -> float:
        """FLOP/s of a trainer's attention, forward."""
        return trainer_rates(numerics).attention * self._arithmetic

    @property
    def _arithmetic(self) -> float:
        return self.gpu.bf16 / measured_gpu().bf16

    def decode_excess(self, engine: str, shape: Shape, sequences: float) -> float:
        """Seconds of a decode step beyond what it must read."""
        dense = _line(sequences, _excess_points(engine)) * shape.config.num_layers
        return dense + shape.sparse_layers * _line(sequences, _sparse_points())

    @property
    def link(self) -> float:
        """Bytes per second between GPUs of a node."""
        return self.gpu.link * rate("link_share").value

    def reasons(self, shape: Shape, *, training: bool = False) -> list[str]:
        """Why what is computed for this GPU and model is extrapolated; empty for the measured ones.

        training: of the trainer's arithmetic, which was measured with some layers of a model with experts, too.
        """
        found = []
        if self.gpu != measured_gpu():
            found.append(f"measured on {measured_gpu().name}, scaled to {self.gpu.name} by its data sheet")
        if _size(shape) != _size(measured_shape(table()["rollout"]["shape"])):
            source = measured_shape(table()["rollout"]["shape"]).name
            if training and shape.sparse_layers:
                (row,) = (row for row in table()["trainer"]["contract"] if row["role"] == "fit_sparse")
                source = measured_shape(row["shape"], row["layers"]).name
            found.append(f"measured with {source}, carried to {shape.name} by layers and FLOP")
        if shape.parameters < _SMALL:
            found.append("a model this small is bound by launches, which no rate here describes")
        return found


def _size(shape: Shape) -> tuple[object, ...]:
    c = shape.config
    return c.architecture, c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.vocab_size
