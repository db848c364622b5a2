"""Which signal leaves the zero-mismatch baseline's band first: that order is what tells a cause from an effect.

Looked at are the steps that the run and the baseline both have, and of several seeds those that all of them have.

The band at a step, for a baseline of several seeds: their mean -+ z standard deviations, whose square is averaged over
the window, since two or three seeds say little at one step. For a baseline of one run: the mean of `CENTRE` steps -+ z
standard deviations of its noise from step to step, that of the differences of neighbours over the root of 2, so that
learning does not count as noise. It knows nothing of how far other seeds would go. A signal has left at the first of
`consecutive` logged steps that all lie outside; a value that is not finite lies outside.

A zero-mismatch baseline has skew, |d| and k3 of exactly 0, so that its band has no width and any mismatch at all leaves
it at once. For such a signal `changed` says more: the first step at which it leaves the band of the run's own first
`window` steps, whether the baseline went on for so long or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from verl_tim.diagnosis.curves import REWARD
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.groups import Group

# A constant curve's rolling mean is off by rounding; the band is this much wider, relative to it.
ROUNDING = 1e-9
# Steps of a single baseline run that are averaged.
CENTRE = 5


@dataclass(frozen=True)
class Signal:
    """An early-warning signal; the first name that a run logged is read."""

    label: str
    names: tuple[str, ...]


SIGNALS = (
    Signal("contribution skew", ("tim/contribution_skew",)),
    Signal("|d| p99", ("tim/delta_abs_p99",)),
    Signal("|d| max", ("tim/delta_abs_max",)),
    Signal("k3 of trainer / rollout", ("tim/k3",)),
    Signal("ppo_k3 of the loss's ratio", ("tim/ppo_k3",)),
    Signal("gradient norm", ("actor/grad_norm", "actor/grad_norm/mean")),
    Signal("reward", REWARD),
)

State = Literal["left", "stayed", "not logged", "too short"]


@dataclass(frozen=True)
class BandRule:
    """How the band is made and when it counts as left."""

    z: float = 3.0
    window: int = 21
    consecutive: int = 3

    def __post_init__(self) -> None:
        if not self.z > 0:
            raise DiagnosisError(f"is {self.z}", "give a positive number of standard deviations", key="--band-z")
        if self.window < 3:
            raise DiagnosisError(f"is {self.window}", "give at least 3 steps", key="--band-window")
        if self.consecutive < 1:
            raise DiagnosisError(f"is {self.consecutive}", "give at least 1 step", key="--band-steps")

    @property
    def steps_to_leave(self) -> int:
        """Logged steps that it takes to tell whether a signal leaves; a band alone takes three."""
        return max(3, self.consecutive)

    @property
    def steps_to_change(self) -> int:
        """Logged steps that it takes to tell whether a run leaves its own first ones."""
        return self.window + self.consecutive

    def text(self, seeds: int) -> str:
        """The definition in words."""
        of = f"mean ± {self.z:g} standard deviations over {seeds} seeds"
        if seeds == 1:
            of = f"mean of {CENTRE} steps ± {self.z:g} standard deviations of the noise from step to step"
        return f"{of}, left for {self.consecutive} logged steps in a row"


@dataclass(frozen=True)
class Departure:
    """What one signal of one run does against the baseline's band.

    Attributes:
        run: name of the run or group.
        step: where it leaves, None unless `state` is "left".
        value: there; None where it is not finite.
        band: there.
        sharp: the band has no width anywhere: the baseline is constant.
        changed: for a sharp band, the first step outside the band of the run's own first steps; None if it stays in
            it, or if there are too few steps behind those (`settled` False).
        settled: for a sharp band, whether the run is long enough to tell.
        steps: that logged the signal in the run, of several seeds in all of them.
    """

    run: str
    signal: str
    metric: str
    state: State
    step: int | None = None
    value: float | None = None
    band: tuple[float, float] | None = None
    sharp: bool = False
    changed: int | None = None
    settled: bool = True
    steps: int = 0


def band_of(baseline: Group, names: tuple[str, ...], rule: BandRule) -> pd.DataFrame:
    """The band per step (columns low, high); empty where the baseline has fewer than three values."""
    frame = baseline.shared(names)
    if len(frame) < 3:
        return pd.DataFrame({"low": [], "high": []})
    if frame.shape[1] > 1:
        mean = frame.mean(axis=1)
        variance = frame.var(axis=1, ddof=1).rolling(rule.window, center=True, min_periods=1).mean()
    else:
        values = frame.iloc[:, 0]
        mean = values.rolling(CENTRE, center=True, min_periods=1).mean()
        noise = values.diff().rolling(rule.window, center=True, min_periods=2).var(ddof=1) / 2
        # near the ends of a short run the centred window may hold too few: the nearest one stands in
        variance = noise.bfill().ffill()
    reach = rule.z * variance.clip(lower=0.0) ** 0.5 + ROUNDING * mean.abs()
    return pd.DataFrame({"low": mean - reach, "high": mean + reach}).dropna()


def departure(group: Group, baseline: Group, signal: Signal, rule: BandRule) -> Departure:
    """When one signal of `group` leaves the baseline's band, over the steps that both logged."""
    metric = next((n for n in signal.names for log in group.logs if log.series(n)[0]), signal.names[0])

    def found(state: State, **more: object) -> Departure:
        return Departure(group.name, signal.label, metric, state, steps=len(values), **more)  # type: ignore[arg-type]

    values = group.shared(signal.names).mean(axis=1)
    # a step where a run logged NaN or an infinity counts as one, even if another seed's value is finite
    broken = sorted({step for log in group.logs for step in log.nonfinite().get(metric, [])})
    values = pd.concat([values.drop(index=broken, errors="ignore"), pd.Series(float("nan"), index=broken)]).sort_index()
    band = band_of(baseline, signal.names, rule)
    if values.empty or baseline.frame(signal.names).empty:
        return found("not logged")
    shared = values.index.intersection(band.index)
    if len(shared) < rule.consecutive:
        return found("too short")
    band = band.loc[shared]
    sharp = bool((band.high - band.low <= 4 * ROUNDING * band.high.abs()).all())
    settled = len(values) >= rule.steps_to_change
    changed = _change(values, rule) if sharp and settled else None
    values = values[shared]
    step = _first_outside(values, band, rule)
    if step is None:
        return found("stayed", sharp=sharp)
    value = float(values[step])
    return found(
        "left",
        step=step,
        value=value if value == value else None,
        band=(float(band.low[step]), float(band.high[step])),
        sharp=sharp,
        changed=changed,
        settled=settled or not sharp,
    )


def _first_outside(values: pd.Series, band: pd.DataFrame, rule: BandRule) -> int | None:
    """The first of `consecutive` steps in a row that lie outside; NaN does."""
    inside = (values >= band.low) & (values <= band.high)
    outside_so_far = (~inside).astype("int64").rolling(rule.consecutive).sum()
    complete = outside_so_far[outside_so_far == rule.consecutive]
    if complete.empty:
        return None
    return int(values.index[values.index.get_loc(complete.index[0]) - rule.consecutive + 1])


def _change(values: pd.Series, rule: BandRule) -> int | None:
    """The first step after the first `window` that leaves their band."""
    start, rest = values.iloc[: rule.window], values.iloc[rule.window :]
    if start.isna().any():
        return None
    reach = rule.z * start.std(ddof=1) + ROUNDING * abs(start.mean())
    band = pd.DataFrame({"low": start.mean() - reach, "high": start.mean() + reach}, index=rest.index)
    return _first_outside(rest, band, rule)


def early_warning(groups: list[Group], baseline: Group, rule: BandRule) -> list[Departure]:
    """Every signal of every group but the baseline, ordered by the step at which it leaves; those that do not, last.

    At equal steps the one whose own change comes first stands first.
    """
    late = float("inf")

    def order(d: Departure) -> tuple[float, float]:
        return (late if d.step is None else d.step, late if d.changed is None else d.changed)

    rows: list[Departure] = []
    for group in groups:
        if group is not baseline:
            rows += sorted((departure(group, baseline, signal, rule) for signal in SIGNALS), key=order)
    return rows
