"""Are two runs equal bit for bit? What their folders hold, value by value, and the first one that differs.

Compared is what the runs computed: samples, token dumps, batch dumps, metrics, and everything in their checkpoints.
What they were told and where they ran (config, manifest) explains a difference and decides nothing, so that runs may be
held against each other that are meant to agree though their settings differ: another number of nodes, a resumed run.

Left out, by name: what a clock or the machine's memory says (`CLOCK_METRICS`), how requests happened to fall into the
steps of the rollout engine (`SCHEDULE_METRICS`), and the names that verl draws at random for prompts (uid). The states
of a worker's random generators are counted apart, and decide only where both runs asked for `tim.deterministic`: verl
seeds no worker, so they differ between any two other runs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_tim.diagnosis import token_dump
from verl_tim.diagnosis.config_diff import diff_configs
from verl_tim.diagnosis.manifest import Difference, Manifest, diff, differing_keys, flatten
from verl_tim.diagnosis.metric_log import RESTARTS, MetricLog, RunFolderError
from verl_tim.diagnosis.restarts import as_json, restarts_of
from verl_tim.diagnosis.run_folder import METRICS_NAME, RunFolder, Sample, read_jsonl_metrics

CLOCK_METRICS = re.compile(
    r"timing_s/.* | timing_per_token_ms/.* | (.*/)?perf/(?!total_num_tokens$).* | .*_seconds", re.VERBOSE
)
"""Times, throughput and memory."""
SCHEDULE_METRICS = re.compile(
    rf"tim/rollout_(steps|preemptions|chunk_cuts|prefix_hit_tokens|max_.*|tokens_per_second)|{RESTARTS}"
)
"""How requests fell into steps and to replicas: they arrive when they arrive. Numbers of a batch-invariant engine do
not depend on it."""
COUNTS_OF_REPLICAS = ("tim/rollout_drawn_tokens", "tim/rollout_weight_updates")
"""Left out of a step with a restart, too: a replica that died took with it what it had counted."""

RANDOM_NAMES = ("uid",)
"""Columns of a token dump that hold names drawn at random; `group` says which rows belong to one prompt."""


@dataclass(frozen=True)
class Finding:
    """One value that differs.

    Attributes:
        step: of the run.
        name: of the metric, the field, the column or the tensor.
        first, second: what each run has, floats in hexadecimal too; None where one has nothing.
    """

    step: int
    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True)
class Section:
    """One kind of results.

    Attributes:
        name: "samples", "tokens", "dumps", "checkpoints", "generators" (of checkpoints) or "metrics".
        unit: what `compared` counts.
        compared: values that both runs have and that were compared.
        differing: those that differ or that one run lacks.
        first: the first of them, in the order of the steps.
        note: why nothing (or not everything) was compared, or decides nothing.
        decides: whether a difference makes the runs differ.
    """

    name: str
    unit: str
    compared: int = 0
    differing: int = 0
    first: Finding | None = None
    note: str = ""
    decides: bool = True


@dataclass(frozen=True)
class Sameness:
    """The answer.

    Attributes:
        runs: the two folders.
        sections: in the order in which a step computes things.
        left_out: metrics that were not compared.
        restarts: of each run, step -> rollout replicas that died in it and were started again; they decide nothing.
        config, facts: keys of config and manifest that differ (apart from names and places); they decide nothing.
    """

    runs: tuple[str, str]
    sections: tuple[Section, ...]
    left_out: tuple[str, ...] = ()
    config: tuple[Difference, ...] = ()
    facts: tuple[Difference, ...] = ()
    restarts: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))

    @property
    def equal(self) -> bool:
        return not any(section.differing for section in self.sections if section.decides)

    @property
    def first(self) -> tuple[str, Finding] | None:
        """Section and value that differ first: of the earliest step, and in it what is computed first. Of sections that
        decide nothing only where the others are equal."""
        for decides in (True, False):
            chosen = [section for section in self.sections if section.decides == decides]
            found = [(section.name, section.first) for section in chosen if section.first is not None]
            if found:
                return min(found, key=lambda one: one[1].step)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = self.first
        return {
            "equal": self.equal,
            "first": None if first is None else {"section": first[0], **asdict(first[1])},
            **asdict(self),
            "restarts": dict(zip(("first", "second"), map(as_json, self.restarts), strict=True)),
        }


def same_runs(first: str | Path, second: str | Path) -> Sameness:
    """Compare two run folders bit for bit.

    Raises:
        RunFolderError: one folder twice, one that holds no run or no metrics of its own, or a file in it is corrupt.
        TokenDumpError, ManifestError: a damaged token dump or manifest.
    """
    runs = (RunFolder(first), RunFolder(second))
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise RunFolderError(
            f"run folder given twice: {runs[0].path}; it equals itself, which says nothing", "give another run"
        )
    logs = (_log(runs[0]), _log(runs[1]))
    for run, log in zip(runs, logs, strict=True):
        if not log.steps:
            raise RunFolderError(f"{run.path}: the run logged no step, so there is nothing to compare")
    names = sorted({*logs[0].names(), *logs[1].names()})
    return Sameness(
        runs=(str(runs[0].path), str(runs[1].path)),
        sections=(_samples(*runs), _tokens(*runs), *_tensors(*runs), compare_metrics(*logs)),
        left_out=tuple(name for name in names if left_out(name)),
        config=tuple(_config(*runs)),
        facts=tuple(_facts(*runs)),
        restarts=(restarts_of(logs[0]), restarts_of(logs[1])),
    )


def _log(run: RunFolder) -> MetricLog:
    """The run's own metrics. What a tracker keeps is not them bit by bit (TensorBoard rounds to float32)."""
    log = read_jsonl_metrics(run.path)
    if log is None:
        raise RunFolderError(
            f"{run.path} has no {METRICS_NAME}, and a tracker's folder keeps neither samples nor every bit of a metric",
            "give the folder that tim.run_dir named, of a run whose trainer.logger lists 'file'",
        )
    return log


def left_out(metric: str) -> bool:
    """Whether a metric says something about a clock, the memory or the arrival of requests."""
    return bool(CLOCK_METRICS.fullmatch(metric) or SCHEDULE_METRICS.fullmatch(metric))


class Tally:
    """Counts comparisons of one section and keeps the first difference."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit = name, unit
        self._compared = self._differing = 0
        self._first: Finding | None = None

    def count(self, compared: int) -> None:
        """So many values were compared."""
        self._compared += compared

    def differs(self, step: int, name: str, values: Sequence[str | None], count: int = 1) -> None:
        """`count` values differ, and this is the first of them, as each run has it."""
        self._differing += count
        if self._first is None or step < self._first.step:
            first, second = values
            self._first = Finding(step, name, first, second)

    def section(self, note: str = "", *, decides: bool = True) -> Section:
        return Section(self._name, self._unit, self._compared, self._differing, self._first, note, decides)


def compare_metrics(first: MetricLog, second: MetricLog) -> Section:
    """Every value of every step, but what is `left_out`; a step or a value that one run lacks differs."""
    tally = Tally("metrics", "values")
    logs = [{record.step: record for record in log.records} for log in (first, second)]
    for step in sorted({*logs[0], *logs[1]}):
        one, other = (log.get(step) for log in logs)
        if one is None or other is None:
            tally.differs(step, "(whole step)", (_there(one), _there(other)))
            continue
        values = [{**record.data, **dict.fromkeys(record.nonfinite, float("nan"))} for record in (one, other)]
        restarted = any(side.get(RESTARTS, 0.0) > 0 for side in values)
        for name in sorted({*values[0], *values[1]}):
            if left_out(name) or (restarted and name in COUNTS_OF_REPLICAS):
                continue
            a, b = (side.get(name) for side in values)
            if a is None or b is None:
                tally.differs(step, name, (_float(a), _float(b)))
                continue
            tally.count(1)
            if _bits(a) != _bits(b):
                tally.differs(step, name, (_float(a), _float(b)))
    torn = [which for which, log in zip(("first", "second"), (first, second), strict=True) if log.torn]
    return tally.section(
        f"the last line of the {' and the '.join(torn)} run's metrics is cut off and was not compared" if torn else ""
    )


def _samples(first: RunFolder, second: RunFolder) -> Section:
    tally = Tally("samples", "samples")
    by_step: list[dict[int, list[Sample]]] = [{}, {}]
    for side, run in zip(by_step, (first, second), strict=True):
        for sample in run.samples():
            side.setdefault(sample.step, []).append(sample)
    if note := _one_sided(tally, "samples", (first, second), by_step):
        return tally.section(note)
    for step in sorted({*by_step[0], *by_step[1]}):
        one, other = (side.get(step, []) for side in by_step)
        for number in range(max(len(one), len(other))):
            if number >= min(len(one), len(other)):
                tally.differs(step, f"sample {number}", (_there(one[number:]), _there(other[number:])))
                continue
            tally.count(1)
            a, b = (_sample_values(side[number]) for side in (one, other))
            different = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
            if different:
                name = different[0]
                tally.differs(step, f"sample {number}: {name}", (a.get(name), b.get(name)))
    return tally.section()


def _sample_values(sample: Sample) -> dict[str, str]:
    """Field -> text, without the name of the row, in which verl's random uid stands."""
    fields = asdict(sample)
    extra = {name: value for name, value in fields.pop("extra").items() if name != "key"}
    return {
        name: float(value).hex() if isinstance(value, float) else repr(value)
        for name, value in {**fields, **extra}.items()
    }


def _tokens(first: RunFolder, second: RunFolder) -> Section:
    tally = Tally("tokens", "values")
    steps = [token_dump.dumped_steps(run.path) for run in (first, second)]
    if note := _one_sided(tally, "token dumps", (first, second), steps):
        return tally.section(note)
    for step in _common(tally, "(whole dump)", *steps):
        one, other = (token_dump.read_dumps(run.path, [step]) for run in (first, second))
        if len(one) != len(other):
            tally.differs(step, "number of tokens", (str(len(one)), str(len(other))))
            continue
        for name in one.column_names:
            if name in RANDOM_NAMES:
                continue
            a, b = (side.column(name).combine_chunks() for side in (one, other))
            tally.count(len(a))
            rows = _differing_rows(a, b)
            if len(rows):
                where = ", ".join(f"{key} {one.column(key)[int(rows[0])].as_py()}" for key in ("row", "position"))
                values = [_written(side[int(rows[0])].as_py()) for side in (a, b)]
                tally.differs(step, f"{name} of {where}", values, count=len(rows))
    return tally.section()


def _differing_rows(a: pa.Array, b: pa.Array) -> np.ndarray:
    """Rows of two arrays of one type and length whose bits, or whose absence, differ."""
    if pa.types.is_floating(a.type):
        null = [np.asarray(side.is_null()) for side in (a, b)]
        bits = [np.asarray(side.fill_null(0.0)).view(np.int32) for side in (a, b)]
        return np.nonzero((null[0] != null[1]) | (bits[0] != bits[1]))[0]
    if a.equals(b):
        return np.empty(0, np.int64)
    return np.array([row for row, (x, y) in enumerate(zip(a.to_pylist(), b.to_pylist(), strict=True)) if x != y])


def _tensors(first: RunFolder, second: RunFolder) -> Iterator[Section]:
    # torch is a second and more to import
    from verl_tim.diagnosis.same_tensors import checkpoint_files, compare_files, dump_files

    def compare(title: str, files: Callable[[RunFolder], dict[int, dict[str, Path]]], *tallies: Tally) -> str:
        found = [files(run) for run in (first, second)]
        note = _one_sided(tallies[0], title, (first, second), found)
        if not note:
            for step, file in _common_files(tallies[0], *found):
                compare_files(tallies[0], tallies[-1], step, file, found[0][step][file], found[1][step][file])
        return note

    dumps, weights, generators = (Tally(name, "values") for name in ("dumps", "checkpoints", "generators"))
    yield dumps.section(compare("batch dumps", dump_files, dumps))
    note = compare("checkpoints", checkpoint_files, weights, generators)
    yield weights.section(note)
    yield _generators(generators, note, first, second)


def _generators(tally: Tally, note: str, *runs: RunFolder) -> Section:
    if note or all(flatten(run.config() or {}).get("tim.deterministic") for run in runs):
        return tally.section(note)
    return tally.section("of the workers, which verl does not seed; nothing here decides", decides=False)


def _common_files(
    tally: Tally, first: dict[int, dict[str, Path]], second: dict[int, dict[str, Path]]
) -> Iterator[tuple[int, str]]:
    for step in _common(tally, "(all files)", sorted(first), sorted(second)):
        for file in sorted({*first[step], *second[step]}):
            a, b = first[step].get(file), second[step].get(file)
            if a is None or b is None:
                tally.differs(step, file, (_there(a), _there(b)))
            else:
                yield step, file


def _common(tally: Tally, name: str, first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    """Steps of both; those of one only are differences."""
    for step in sorted({*first, *second}):
        if step in first and step in second:
            yield step
        else:
            tally.differs(step, name, (_there(step in first), _there(step in second)))


# What a run's config says of how much of each it keeps; 0 and less: none.
_KEEPING = {
    "samples": "tim.samples.per_step",
    "token dumps": "tim.dump.tokens_per_step",
    "batch dumps": "tim.dump.every",
    "checkpoints": "trainer.save_freq",
}


def _one_sided(tally: Tally, what: str, runs: Sequence[RunFolder], kept: Sequence[Collection[int]]) -> str:
    """Why there is nothing to compare; empty where there is.

    A run that has none of what its config says it keeps has lost it, which is a difference.
    """
    if all(kept):
        return ""
    if not any(kept):
        return f"neither run kept {what}"
    has = 0 if kept[0] else 1
    note = f"only the {('first', 'second')[has]} run kept {what}"
    key = _KEEPING[what]
    wanted = flatten(runs[1 - has].config() or {}).get(key)
    if isinstance(wanted, (int, float)) and wanted <= 0:
        return f"{note}: the other has {key}={wanted}"
    tally.differs(min(kept[has]), f"(all {what})", [_there(side) for side in kept])
    return note


def _there(value: Any) -> str | None:
    return "there" if value else None


def _bits(value: float) -> bytes:
    return struct.pack(">d", value)


def _float(value: float | None) -> str | None:
    return None if value is None else f"{value!r} ({float(value).hex()})"


def _written(value: Any) -> str | None:
    if value is None:
        return None
    return _float(value) if isinstance(value, float) else repr(value)


def _config(first: RunFolder, second: RunFolder) -> list[Difference]:
    return _both(first, second, RunFolder.config, lambda sides: diff_configs(sides, include_rollout=True))


def _facts(first: RunFolder, second: RunFolder) -> list[Difference]:
    def differences(sides: dict[str, Manifest]) -> list[Difference]:
        answers = {name: flatten(manifest.deterministic) for name, manifest in sides.items()}
        asked = differing_keys(answers) if all(answers.values()) else []
        return [*diff(sides, include_rollout=True), *(replace(d, key=f"deterministic.{d.key}") for d in asked)]

    return _both(first, second, RunFolder.manifest, differences)


def _both(
    first: RunFolder,
    second: RunFolder,
    read: Callable[[RunFolder], Any],
    differences: Callable[[dict[str, Any]], Iterable[Difference]],
) -> list[Difference]:
    sides = {"first": read(first), "second": read(second)}
    return [] if None in sides.values() else list(differences(sides))
