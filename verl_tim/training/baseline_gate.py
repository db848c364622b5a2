"""The gate of a run that mismatches: `tim.gate: {baseline: FILE, warn: 2, stop: 10}`.

Every step's `tim/*` are held against the set-up's usual values (`verl-tim baseline`). A metric above `warn` times its
level is reported, above `stop` times it the run ends, but only after a checkpoint was written: the trainers ask
`stop_reason` where verl saves, and raise when the step's metrics have been logged. A run that must agree bit for bit
has the exact gate instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_tim.diagnosis.baseline import Baseline, BaselineError, Setup
from verl_tim.diagnosis.formats import short
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.training.config import ConfigError, GateConfig

logger = logging.getLogger(__name__)

FACTOR_METRIC = "tim/baseline_factor_max"

# Rates of sampled choices, and how many each rests on: where those are few, a single flip is many times its level.
SAMPLED = {
    "tim/top1_flip_rate": "tim/top1_tokens",
    "tim/router_flip_rate": "tim/router_compared",
    "tim/router_expert_mismatch": "tim/router_compared",
}
CHANCE = 3.0  # standard deviations of a count that chance is given


class BaselineExceeded(RuntimeError):
    """A metric left the baseline by the factor of `tim.gate.stop`. Names step, metric, both values and checkpoint."""


@dataclass(frozen=True)
class Excess:
    """A metric and its level.

    Attributes:
        sample: how many choices a sampled rate rests on; None for what is measured on every token.
    """

    metric: str
    value: float
    reference: float
    sample: float | None = None

    @property
    def sure(self) -> float:
        """The value; of a sampled rate what is left when chance has taken `CHANCE` standard deviations of the count."""
        if self.sample is None:
            return self.value
        count = self.value * self.sample
        return max(0.0, count - CHANCE * math.sqrt(count)) / self.sample

    @property
    def factor(self) -> float:
        return self.sure / self.reference

    def __str__(self) -> str:
        sampled = "" if self.sample is None else f" (of {self.sample:,.0f}: at least {short(self.sure)})"
        times = f"{short(self.factor)} times the baseline's {short(self.reference)}"
        return f"{self.metric} is {short(self.value)}{sampled}, {times}"


class BaselineGate:
    """Watches a run.

    Args:
        baseline: the set-up's usual values.
        gate: the factors, and the file's name for messages.
    """

    def __init__(self, baseline: Baseline, gate: GateConfig) -> None:
        self.gate = gate
        self.references = {name: level.reference for name, level in baseline.metrics.items() if level.reference > 0}
        self.stop_step: int | None = None
        self.stop_reason: str | None = None

    @classmethod
    def of(cls, gate: GateConfig) -> BaselineGate | None:
        """The gate of a config; None where it names no baseline.

        Raises:
            ConfigError: the file is missing or no baseline.
        """
        return None if gate.baseline is None else cls(read_baseline(gate), gate)

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Hold one step's metrics against the baseline; the largest factor, as a metric.

        What the step did not log (routes and top-1 ids are sampled) is not held against anything.
        """
        found = [
            Excess(name, metrics[name], reference, metrics.get(SAMPLED.get(name, "")) or None)
            for name, reference in self.references.items()
            if name in metrics
        ]
        if not found:
            return {}
        worst = max(found, key=lambda excess: excess.factor)
        above = [excess for excess in found if excess.factor > self.gate.warn]
        where = f"(tim.gate.baseline={self.gate.baseline}, warn: {self.gate.warn:g}, stop: {self.gate.stop:g})"
        if above:
            logger.warning("step %d: %s %s", step, "; ".join(map(str, above)), where)
        if worst.factor > self.gate.stop and self.stop_step is None:
            self.stop_step, self.stop_reason = step, f"step {step}: {worst} {where}"
        return {FACTOR_METRIC: worst.factor}

    def raise_if_stopped(self, checkpoint: str | None) -> None:
        """End the run if a step asked for it.

        Args:
            checkpoint: the folder that was written, for the message.

        Raises:
            BaselineExceeded: a step was above `stop`.
        """
        if self.stop_reason is not None:
            raise BaselineExceeded(f"{self.stop_reason}; checkpoint: {checkpoint}")


def read_baseline(gate: GateConfig) -> Baseline:
    """The baseline that a gate names; ConfigError where the file is missing or no baseline."""
    assert gate.baseline is not None
    try:
        return Baseline.read(gate.baseline)
    except BaselineError as error:
        raise ConfigError(f"tim.gate.baseline: {error}") from error


def check_setup(gate: GateConfig, manifest: Manifest) -> None:
    """Refuse a baseline of another set-up than the one that runs.

    Raises:
        ConfigError: names every difference.
    """
    if gate.baseline is None:
        return
    differing = Setup.of(manifest).differences(read_baseline(gate).setup)
    if differing:
        raise ConfigError(
            f"tim.gate.baseline={gate.baseline} is of another set-up than this run: {'; '.join(differing)}; make one "
            "from runs like this one (verl-tim baseline RUN), or set tim.gate.baseline=null"
        )


class StopAfterCheckpoint:
    """What both trainers do about a gate: write a checkpoint in the step that asked for a stop, raise in the next.

    A mixin in front of verl's trainer, which has `global_steps`, `config` and `_save_checkpoint`; `observer` is ours.
    """

    _saved_step: int | None = None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        step = self.global_steps  # type: ignore[attr-defined]
        if self._saved_step == step:
            return None  # verl's own save of a step that the gate has saved
        saved = super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._saved_step = step
        return saved

    def _baseline_gate(self) -> BaselineGate | None:
        observer = getattr(self, "observer", None)
        return None if observer is None else observer.baseline

    def _save_if_stopped(self) -> None:
        """Where verl saves a step's checkpoint."""
        gate = self._baseline_gate()
        if gate is not None and gate.stop_step == self.global_steps:  # type: ignore[attr-defined]
            self._save_checkpoint()

    def _raise_if_stopped(self, *, at_end: bool = False) -> None:
        """Before a step's first rollout, and at the end of training."""
        gate = self._baseline_gate()
        if gate is None or gate.stop_step is None:
            return
        if at_end or self.global_steps > gate.stop_step:  # type: ignore[attr-defined]
            folder = f"{self.config.trainer.default_local_dir}/global_step_{gate.stop_step}"  # type: ignore[attr-defined]
            gate.raise_if_stopped(folder)
