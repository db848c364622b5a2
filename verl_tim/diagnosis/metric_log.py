"""A run's metrics: one record per step, and the JSON lines that verl's `file` logger writes.

`{"step": n, "data": {name: value}}` per logged step (verl 0.9.1, utils/tracking.py, FileLogger).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.errors import DiagnosisError

RESTARTS = "tim/rollout_restarts"
"""Rollout servers that died in a step, and were started again."""
MAX_STEP = 2**31 - 1  # a dump's column `step` is int32


class RunFolderError(DiagnosisError):
    """A run folder that cannot be used as asked; the message says what to change."""


@dataclass(frozen=True)
class Record:
    """Metrics logged for one step.

    Attributes:
        data: finite numbers.
        nonfinite: names whose value was NaN or infinite (verl's file logger writes both as null). Text values are left
            out.
    """

    step: int
    data: dict[str, float]
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricLog:
    """A run's metrics, one record per step, ascending.

    Attributes:
        records: a step logged twice (validation at the end; a resumed run that repeats steps) is merged, later values
            win.
        torn: the last line was cut off in the middle of a write and is not included.
    """

    records: list[Record]
    torn: bool = False

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    def names(self) -> list[str]:
        """Every metric name, sorted."""
        return sorted(set().union(*(record.data.keys() for record in self.records)))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values where the metric was logged; empty lists for a metric that never was."""
        points = [(record.step, record.data[name]) for record in self.records if name in record.data]
        return [step for step, _ in points], [value for _, value in points]

    def nonfinite(self) -> dict[str, list[int]]:
        """Metric name -> steps at which its value was not finite."""
        steps: dict[str, list[int]] = {}
        for record in self.records:
            for name in record.nonfinite:
                steps.setdefault(name, []).append(record.step)
        return steps

    @classmethod
    def merged(cls, records: Iterable[Record], torn: bool = False) -> MetricLog:
        """From records in the order they were written."""
        by_step: dict[int, dict[str, float | None]] = {}
        for record in records:
            by_step.setdefault(record.step, {}).update({**record.data, **dict.fromkeys(record.nonfinite)})
        merged = []
        for step, values in sorted(by_step.items()):
            data = {name: value for name, value in values.items() if value is not None}
            merged.append(Record(step, data, tuple(name for name, value in values.items() if value is None)))
        return cls(merged, torn)


def read_json_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """(line number, object) of every line, and whether the last line is torn.

    A torn line is one without its newline that is no complete JSON object: a writer was stopped or is still writing. It
    is left out.

    Raises:
        RunFolderError: any other line that is not a JSON object; the message names file and line.
    """
    return parse_json_lines(path.read_bytes(), str(path))


def parse_json_lines(content: bytes, path: str) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """`read_json_lines` of a file's content; `path`: its name in messages."""
    entries: list[tuple[int, dict[str, Any]]] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        unfinished = number == len(lines)  # split() leaves an empty last part after a final newline
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if unfinished:
                return entries, True
            raise RunFolderError(f"{path}:{number} is not JSON ({error}): the file is corrupt") from error
        if not isinstance(entry, dict):
            if unfinished:
                return entries, True
            raise RunFolderError(f"{path}:{number} must be a JSON object, got {type(entry).__name__}")
        entries.append((number, entry))
    return entries, False


def read_metrics_file(path: Path) -> tuple[list[Record], bool]:
    """Records of one metrics file in the order written, and whether its last line is torn.

    Raises:
        RunFolderError: a corrupt line, or one that is not `{"step": int, "data": {...}}`.
    """
    records = []
    entries, torn = read_json_lines(path)
    for number, entry in entries:
        step, data = entry.get("step"), entry.get("data")
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(data, dict) or abs(step) > MAX_STEP:
            raise RunFolderError(f'{path}:{number} is not a metrics line: expected {{"step": n, "data": {{...}}}}')
        numbers = {name: value for name, value in data.items() if value is None or isinstance(value, (int, float))}
        try:
            finite = {
                name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)
            }
        except OverflowError as error:
            raise RunFolderError(f"{path}:{number} holds a whole number beyond float64: the file is corrupt") from error
        records.append(Record(step, finite, tuple(name for name in numbers if name not in finite)))
    return records, torn
