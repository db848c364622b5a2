"""The exactness gate: two log-prob tensors bit by bit, and the ladder of scenarios that a rollout has to climb."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor

from verl_tim.diagnosis.bits import bit_patterns, ulp_distance
from verl_tim.diagnosis.ladder_table import LadderTable
from verl_tim.diagnosis.tokens import as_mask, finite_fp32

SIDES = ("trainer", "rollout")
LOG_PROBS = "log-probs"
LOW_PRECISION = (torch.bfloat16, torch.float16)


class GateError(ValueError):
    """The comparison cannot be made, so nothing was shown: wrong shapes or dtypes, no token, non-finite values."""


@dataclass(frozen=True)
class FirstDifference:
    """The first differing token in row-major order. Log-probs in nats; `ulp` counts fp32 steps between the two."""

    row: int
    token: int
    train: float
    rollout: float
    ulp: int

    def __str__(self) -> str:
        return self.describe()

    def describe(self, sides: tuple[str, str] = SIDES) -> str:
        """In words; `sides` names the two compared tensors."""
        return (
            f"row {self.row}, token {self.token}: {sides[0]} {self.train:.9g}, {sides[1]} {self.rollout:.9g}, "
            f"{self.ulp:,} ulp apart"
        )


@dataclass(frozen=True)
class BitReport:
    """Outcome of `compare_bits`. `max_ulp` and `max_abs` (nats) are over the compared tokens."""

    tokens: int
    differing: int
    max_ulp: int
    max_abs: float
    first: FirstDifference | None

    @property
    def passed(self) -> bool:
        """Something was compared and no bit differs."""
        return self.tokens > 0 and self.differing == 0

    @property
    def exact_fraction(self) -> float:
        return (self.tokens - self.differing) / self.tokens

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exact_fraction": self.exact_fraction, "passed": self.passed}

    def __str__(self) -> str:
        return self.describe()

    def describe(self, what: str = LOG_PROBS, sides: tuple[str, str] = SIDES) -> str:
        """In words; `what` was compared, and `sides` names the two tensors."""
        if self.first is None:
            return f"all {self.tokens:,} {what} agree bit for bit"
        unit = " nats" if what == LOG_PROBS else ""
        return (
            f"{self.differing:,} of {self.tokens:,} {what} differ (max |d| {self.max_abs:.3g}{unit}, "
            f"max {self.max_ulp:,} ulp); first at {self.first.describe(sides)}"
        )

    @staticmethod
    def merge(reports: Iterable[tuple[BitReport, int]]) -> BitReport:
        """One report from those of consecutive batches, each with the row its batch starts at.

        Raises:
            GateError: no reports.
        """
        merged: BitReport | None = None
        for report, row_offset in reports:
            first = report.first
            if first is not None and row_offset:
                first = FirstDifference(first.row + row_offset, first.token, first.train, first.rollout, first.ulp)
            if merged is None:
                merged = BitReport(report.tokens, report.differing, report.max_ulp, report.max_abs, first)
            else:
                merged = BitReport(
                    tokens=merged.tokens + report.tokens,
                    differing=merged.differing + report.differing,
                    max_ulp=max(merged.max_ulp, report.max_ulp),
                    max_abs=max(merged.max_abs, report.max_abs),
                    first=merged.first or first,
                )
        if merged is None:
            raise GateError("no reports to merge: nothing was compared, so nothing is shown")
        return merged


def compare_bits(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor | None = None) -> BitReport:
    """Compare two log-prob tensors by their fp32 bit patterns.

    Args:
        train_log_probs, rollout_log_probs: one shape, (B, T) or (T,) (taken as one row), fp32. One side may be bf16 or
            fp16: it is up-cast, and so fails unless its values are the other's. Both sides in 16 bit are refused,
            because rounding has then removed what is to be compared; so is fp64, whose rounding to fp32 could hide a
            difference.
        response_mask: same shape, bool, int or float of 0 and 1; None compares every element. Values at 0 are never
            read.

    Returns:
        BitReport; rows and tokens are indices into the given tensors.

    Raises:
        GateError: nothing to compare (empty tensors or mask), shapes or dtypes as above, or a NaN or infinite value at
            a compared token, named by side, row and token. None of these may ever read as a pass.
    """
    for name, x in (("train_log_probs", train_log_probs), ("rollout_log_probs", rollout_log_probs)):
        if not isinstance(x, Tensor) or x.is_nested:
            raise GateError(f"{name} must be a dense torch.Tensor, got {type(x).__name__}")
        if x.dim() not in (1, 2):
            raise GateError(f"{name} must be (rows, tokens) or (tokens,), got shape {tuple(x.shape)}")
        if x.dtype not in (torch.float32, *LOW_PRECISION):
            raise GateError(
                f"{name} is {x.dtype}: the gate compares fp32 bit patterns; give the recorded fp32 log-probs"
            )
    if train_log_probs.shape != rollout_log_probs.shape:
        raise GateError(
            f"train_log_probs {tuple(train_log_probs.shape)} and rollout_log_probs {tuple(rollout_log_probs.shape)} "
            "differ in shape: both sides must score the same tokens"
        )
    if train_log_probs.dtype in LOW_PRECISION and rollout_log_probs.dtype in LOW_PRECISION:
        raise GateError(
            f"both sides are 16 bit ({train_log_probs.dtype}, {rollout_log_probs.dtype}): rounding hides differences; "
            "record log-probs in fp32"
        )
    device = train_log_probs.device
    train = torch.atleast_2d(train_log_probs.detach()).to(torch.float32)
    rollout = torch.atleast_2d(rollout_log_probs.detach().to(device)).to(torch.float32)
    if response_mask is None:
        mask = torch.ones_like(train, dtype=torch.bool)
    else:
        if response_mask.shape != train_log_probs.shape:
            raise GateError(
                f"response_mask has shape {tuple(response_mask.shape)}, log-probs have {tuple(train_log_probs.shape)}"
            )
        mask = torch.atleast_2d(as_mask(response_mask.to(device)))
    tokens = int(mask.count_nonzero())
    if tokens == 0:
        raise GateError("nothing to compare: no token has mask 1; a gate that compared nothing shows nothing")
    for name, x in (("train_log_probs", train), ("rollout_log_probs", rollout)):
        broken = mask & ~finite_fp32(x)
        if bool(broken.any()):
            row, token = broken.nonzero()[0].tolist()
            raise GateError(
                f"{name} is {float(x[row, token])} at row {row}, token {token} "
                f"({int(broken.count_nonzero()):,} of {tokens:,} not finite): "
                "a missing or broken log-prob cannot pass"
            )
    differs = (bit_patterns(train) != bit_patterns(rollout)) & mask
    if not bool(differs.any()):
        return BitReport(tokens=tokens, differing=0, max_ulp=0, max_abs=0.0, first=None)
    where_D2 = differs.nonzero()  # row by row
    train_D, rollout_D = train[differs], rollout[differs]
    ulp_D = ulp_distance(train_D, rollout_D)
    row, token = where_D2[0].tolist()
    return BitReport(
        tokens=tokens,
        differing=len(where_D2),
        max_ulp=int(ulp_D.max()),
        max_abs=float((train_D.to(torch.float64) - rollout_D.to(torch.float64)).abs().max()),
        first=FirstDifference(row, token, float(train_D[0]), float(rollout_D[0]), int(ulp_D[0])),
    )


@dataclass(frozen=True)
class ScenarioResult:
    """What one scenario showed.

    Attributes:
        name: what was done ("preempted", "chunk of 3", "T = 0.6").
        report: the comparison; None only with an error.
        counts: proof that the scenario did what its name says: preemptions, chunk cuts, prefix hits, graph replays,
            weight updates, tokens per temperature ("tokens at T=0.6"), ...
        required: names in `counts` that must be above 0. A scenario that did not happen fails.
        exact: a differing bit fails the scenario; False reports its size instead (vllm, stock).
        parted_at: the first op or module where the two forwards part, if that was looked for.
        error: why the scenario could not be carried out, or what it found beside the report.
        what, sides: what the report's numbers are, and the names of the two compared.
        seconds: its duration.
    """

    name: str
    report: BitReport | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    required: Sequence[str] = ()
    exact: bool = True
    parted_at: str | None = None
    error: str | None = None
    seconds: float = 0.0
    what: str = LOG_PROBS
    sides: tuple[str, str] = SIDES

    @property
    def failures(self) -> list[str]:
        """Every reason why this scenario does not pass."""
        reasons = [self.error] if self.error else []
        if self.report is None and not self.error:
            reasons.append("nothing was compared")
        if self.report is not None and self.exact and not self.report.passed:
            parted = f"; the forwards part at {self.parted_at}" if self.parted_at else ""
            reasons.append(f"{self.report.describe(self.what, self.sides)}{parted}")
        reasons += [f"{name}: 0, the scenario did not happen" for name in self.required if not self.counts.get(name)]
        return reasons

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "exact": self.exact,
            "failures": self.failures,
            "report": self.report.to_dict() if self.report else None,
            "counts": dict(self.counts),
            "required": list(self.required),
            "parted_at": self.parted_at,
            "what": self.what,
            "sides": list(self.sides),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder: a name and the scenarios that decide it, run in order."""

    name: str
    scenarios: Sequence[tuple[str, Callable[[], ScenarioResult]]]


@dataclass
class RungResult:
    """A rung's outcome; no results and `skipped` when an earlier rung failed."""

    name: str
    results: list[ScenarioResult] = field(default_factory=list)
    skipped: bool = False

    @property
    def passed(self) -> bool:
        return not self.skipped and bool(self.results) and all(result.passed for result in self.results)


@dataclass
class LadderResult:
    """All rungs in order. No rung implies another, and a ladder without a single result does not pass."""

    rungs: list[RungResult]

    @property
    def passed(self) -> bool:
        return bool(self.rungs) and all(rung.passed for rung in self.rungs)

    @property
    def exit_code(self) -> int:
        """0 when every rung passed, else 1."""
        return 0 if self.passed else 1

    def totals(self) -> dict[str, int]:
        """Sum of every count over all scenarios."""
        totals: dict[str, int] = {}
        for rung in self.rungs:
            for result in rung.results:
                for name, count in result.counts.items():
                    totals[name] = totals.get(name, 0) + count
        return totals

    def first_failure(self) -> tuple[RungResult, ScenarioResult | None] | None:
        """The first failing rung and its failing scenario (None: the rung has no results), or None when all passed."""
        for rung in self.rungs:
            if not rung.passed and not rung.skipped:
                return rung, next((result for result in rung.results if not result.passed), None)
        return None

    def summary(self) -> str:
        """One sentence for the end of the output."""
        reports = [(r.what == LOG_PROBS, r.report) for rung in self.rungs for r in rung.results if r.report]
        tokens, others = (sum(report.tokens for own, report in reports if own is wanted) for wanted in (True, False))
        failure = self.first_failure()
        if failure is not None:
            rung, result = failure
            reason = "no scenario ran" if result is None else f"{result.name}: {result.failures[0]}"
            return f"FAIL at {rung.name}, {reason}"
        if not self.passed:
            return "FAIL: no rung ran"
        scenarios = sum(len(rung.results) for rung in self.rungs)
        sized = [r for rung in self.rungs for r in rung.results if not r.exact and r.report and r.report.differing]
        if sized:
            largest = max((r.report.max_abs for r in sized if r.report and r.what == LOG_PROBS), default=0.0)
            return (
                f"sizes reported, not judged: {len(sized)} of {scenarios} scenarios differ, max |d| {largest:.3g} nats"
            )
        more = f" and {others:,} other values" if others else ""
        return f"PASS: {scenarios} scenarios, {tokens:,} log-probs{more} compared, 0 bits differ"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "passed": self.passed,
            "exit_code": self.exit_code,
            "summary": self.summary(),
            "totals": self.totals(),
            "rungs": [
                {
                    "name": rung.name,
                    "passed": rung.passed,
                    "skipped": rung.skipped,
                    "scenarios": [result.to_dict() for result in rung.results],
                }
                for rung in self.rungs
            ],
        }

    def table(self, title: str = "verl-tim verify") -> RenderableType:
        """For the terminal."""
        return LadderTable(title, self.rungs)


def climb(
    rungs: Sequence[Rung],
    on_result: Callable[[str, ScenarioResult], None] | None = None,
    *,
    on_begin: Callable[[str, str], None] | None = None,
) -> LadderResult:
    """Run rungs in order and stop after the first that fails; every scenario of a rung runs.

    A scenario that cannot compare (`GateError`) fails with that message; any other exception is a fault of the program
    and propagates.

    Args:
        rungs: at least one, each with at least one scenario.
        on_result: called with the rung's name after each scenario (progress).
        on_begin: called with the rung's and the scenario's name before each.
    Raises:
        ValueError: no rungs, or a rung without scenarios.
    """
    if not rungs or not all(rung.scenarios for rung in rungs):
        raise ValueError("a ladder needs rungs, and each rung at least one scenario")
    outcome = LadderResult([])
    for rung in rungs:
        result_of_rung = RungResult(rung.name, skipped=bool(outcome.rungs) and not outcome.rungs[-1].passed)
        outcome.rungs.append(result_of_rung)
        if result_of_rung.skipped:
            continue
        for name, run in rung.scenarios:
            if on_begin is not None:
                on_begin(rung.name, name)
            started = time.perf_counter()
            try:
                result = run()
            except GateError as error:
                result = ScenarioResult(name, error=str(error), seconds=time.perf_counter() - started)
            result_of_rung.results.append(result)
            if on_result is not None:
                on_result(rung.name, result)
    return outcome
