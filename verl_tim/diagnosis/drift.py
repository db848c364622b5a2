"""Where curves do not part: after how many steps one would expect it, from what was measured.

Two estimates, of different make:

- **From the reward.** The difference to the zero-mismatch baseline as a straight line over the steps (least squares
  on means of blocks, so that neighbouring steps count once). Runs of one seed see the same prompts in the same order,
  and are compared with each other: what sets seeds apart is then no difference between settings. It leaves the
  baseline's seed band, of half-width h, where the line reaches h. It assumes that what the reward does goes on as it
  did.
- **From the skew.** The contribution skew s is the part of the loss's pull that comes from the mismatch and not from
  the advantage; P, the mean |A| over tokens of positive advantage plus that over tokens of negative advantage, is the
  whole pull. If that part, rho = |s| / P, moves the policy as fast as its share of the pull, always in one direction,
  and all of it costs reward, then after n steps the reward is off by rho * v * n, with v the fastest gain per step that
  the baseline shows: n = h / (rho * v). Each of the three is the worst case, so this is the earliest step of a *linear*
  drift. What it leaves out can make it earlier: a policy that has drifted mismatches more (the paper's runs collapse
  so), and it is one number for all tokens.

Intervals are of 95 % (Student's t, for seeds are two or three). A mean whose interval holds 0 gives no expected step,
only an earliest one, from the interval's far end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from verl_tim.diagnosis.curves import REWARD
from verl_tim.diagnosis.early_warning import BandRule, band_of
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.verdict import student_t

SKEW = ("tim/contribution_skew",)
BLOCKS = 10
# Steps of the window in which the baseline's gain per step is taken, and of which the band's half-width is the mean.
WINDOW = 21


class DriftError(DiagnosisError):
    """The runs do not allow an estimate; the problem says why."""


@dataclass(frozen=True)
class Measured:
    """A mean or a slope with its standard error.

    Attributes:
        freedom: degrees of freedom of the error: independent values less what was fitted to them; 0: one value, and
            nothing is known of its error.
    """

    value: float
    error: float
    freedom: int

    @property
    def half_width(self) -> float:
        """Of the 95 % interval; infinite where there is one value."""
        return student_t(self.freedom) * self.error if self.freedom else math.inf

    @property
    def seen(self) -> bool:
        """Whether it is told from 0."""
        return abs(self.value) > self.half_width

    @property
    def most(self) -> float:
        """The far end of its size."""
        return abs(self.value) + self.half_width


@dataclass(frozen=True)
class Forecast:
    """When the reward would leave the baseline's seed band.

    Attributes:
        steps: the last that all runs of both logged.
        band: half-width of the band over the last steps, in units of the reward.
        gap: difference of the two rewards over the last block (run - baseline), with its error over seeds.
        paired: how many seeds were compared each with itself; 0: means of all.
        slope: of that difference, per step; its error from how it lies about the line or, where that is more, from how
            far the seeds' slopes lie apart.
        skew: mean contribution skew; pull: P above; speed: v above, per step.
        by_reward, by_skew: expected step; None where slope or skew is not told from 0.
        earliest_by_reward, earliest_by_skew: from the upper ends; infinite where that is 0.
    """

    run: str
    baseline: str
    steps: int
    band: float
    gap: Measured
    paired: int
    slope: Measured
    skew: Measured
    pull: float
    speed: float
    by_reward: float | None
    earliest_by_reward: float
    by_skew: float | None
    earliest_by_skew: float

    @property
    def parted(self) -> bool:
        """Whether the difference is beyond the band at the end of the runs."""
        return abs(self.gap.value) > self.band

    @property
    def share(self) -> Measured:
        """rho: of the pull, what the mismatch makes."""
        return Measured(abs(self.skew.value) / self.pull, self.skew.error / self.pull, self.skew.freedom)

    @property
    def factor(self) -> float:
        """How many times larger the skew, or longer the run, would have to be for the skew's own estimate to fall on
        the last step; of its upper end."""
        return self.earliest_by_skew / self.steps

    def response_length(self, mean_length: float) -> float:
        """Tokens per response at which these runs would part by their last step, if the lean adds up along a response:
        d of one sign on every token makes a sequence's log-ratio grow with its length.

        Args:
            mean_length: of the measured runs, tokens.
        """
        return mean_length * max(1.0, self.factor)


def forecast(
    group: Group,
    baseline: Group,
    *,
    pull: float,
    rule: BandRule | None = None,
    same_seed: Sequence[tuple[int, int]] = (),
) -> Forecast:
    """Estimate when the reward of `group` leaves the band of `baseline`.

    Args:
        same_seed: (place in `group.logs`, place in `baseline.logs`) of runs with the same seed; only these are then
            compared with each other. Empty: the mean of all with the mean of all.
        pull: P, from `pull_of` or, of advantages whitened to a spread of 1, about 1.6 (normal ones: 2 * 0.8).
        rule: of the band.

    Raises:
        DriftError: fewer than 2 * BLOCKS steps that all runs of both logged, no reward or skew, or a baseline of one
            run: its band knows nothing of other seeds.
    """
    rule = rule or BandRule()
    if len(baseline.logs) < 2:
        raise DriftError(f"{baseline.name}: one run has no seed band", "run at least two seeds")
    if not pull > 0:
        raise DriftError(f"pull is {pull}", "give the mean |advantage| over both signs, above 0")
    of_group, of_baseline = _common(group, baseline)
    if len(of_group) < 2 * BLOCKS:
        raise DriftError(
            f"{group.name}: {len(of_group)} steps that all its runs and those of {baseline.name} logged a reward of, "
            f"at least {2 * BLOCKS} needed"
        )
    skew = mean_of(group.frame(SKEW), group.name)
    band = band_of(baseline, REWARD, rule)
    half_width = float(((band.high - band.low) / 2).tail(WINDOW).mean())
    if same_seed:
        mine, others = (list(places) for places in zip(*same_seed, strict=True))
        differences = pd.DataFrame(of_group.iloc[:, mine].to_numpy() - of_baseline.iloc[:, others].to_numpy())
        differences.index = of_group.index
        gap = _over_seeds(_at_end(differences))
        difference = differences.mean(axis=1)
        slopes = _over_seeds(np.array([slope_of(differences[seed]).value for seed in differences]))
    else:
        difference = of_group.mean(axis=1) - of_baseline.mean(axis=1)
        each = _over_seeds(_at_end(of_group)), _over_seeds(_at_end(of_baseline))
        freedom = min(one.freedom for one in each)  # of the two, the fewer: never too narrow
        gap = Measured(each[0].value - each[1].value, math.hypot(each[0].error, each[1].error), freedom)
        slopes = None
    slope = slope_of(difference)
    if slopes is not None and slopes.freedom and slopes.half_width > slope.half_width:
        slope = slopes
    last = int(of_group.index[-1])
    speed = fastest_gain(of_baseline.mean(axis=1))
    left = max(half_width - abs(gap.value), 0.0)

    def after(rate: float) -> float:
        return last + left / rate if rate > 0 else (math.inf if left else float(last))

    def from_start(size: float) -> float:
        rate = size / pull * speed
        return half_width / rate if rate > 0 else math.inf

    # a line that runs back to the baseline never leaves on this side
    leaving = slope.seen and (slope.value * gap.value > 0 or abs(gap.value) < half_width)
    return Forecast(
        run=group.name,
        baseline=baseline.name,
        steps=last,
        band=half_width,
        gap=gap,
        paired=len(same_seed),
        slope=slope,
        skew=skew,
        pull=pull,
        speed=speed,
        by_reward=after(abs(slope.value)) if leaving else None,
        earliest_by_reward=after(slope.most),
        by_skew=from_start(abs(skew.value)) if skew.seen else None,
        earliest_by_skew=from_start(skew.most),
    )


def mean_of(frame: pd.DataFrame, name: str) -> Measured:
    """Mean over steps and seeds; its error from means of blocks of steps of each seed.

    Raises:
        DriftError: a seed with fewer values than blocks.
    """
    blocks: list[float] = []
    for column in frame:
        values = frame[column].dropna().to_numpy()
        if len(values) < BLOCKS:
            raise DriftError(f"{name}: {len(values)} logged values of {SKEW[0]}, at least {BLOCKS} needed")
        blocks += [float(part.mean()) for part in np.array_split(values, BLOCKS)]
    if not blocks:
        raise DriftError(f"{name} logged no {SKEW[0]}")
    return Measured(float(np.mean(blocks)), float(np.std(blocks, ddof=1)) / math.sqrt(len(blocks)), len(blocks) - 1)


def slope_of(series: pd.Series) -> Measured:
    """Slope per step of a series over steps, by least squares on means of blocks."""
    x = np.array([part.mean() for part in np.array_split(series.index.to_numpy(dtype=float), BLOCKS)])
    y = np.array([part.mean() for part in np.array_split(series.to_numpy(), BLOCKS)])
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    return Measured(slope, math.sqrt(float((rest**2).sum()) / (BLOCKS - 2) / spread), BLOCKS - 2)


def fastest_gain(reward: pd.Series) -> float:
    """The largest gain per step of the reward, smoothed over `WINDOW` steps, across as many; 0 where it never gains."""
    smooth = reward.rolling(WINDOW, center=True, min_periods=1).mean()
    span = min(WINDOW, len(smooth) - 1)
    gains = (smooth.to_numpy()[span:] - smooth.to_numpy()[:-span]) / (
        smooth.index.to_numpy(dtype=float)[span:] - smooth.index.to_numpy(dtype=float)[:-span]
    )
    return max(float(gains.max()), 0.0)


def pull_of(advantage_N: np.ndarray) -> float:
    """P of the finite advantages of tokens (N,).

    Raises:
        DriftError: a sign is missing.
    """
    finite_N = advantage_N[np.isfinite(advantage_N)]
    signs = finite_N[finite_N > 0], -finite_N[finite_N < 0]
    if not all(part.size for part in signs):
        raise DriftError("advantages of one sign only: there is no skew between signs")
    return float(sum(part.mean() for part in signs))


def _common(group: Group, baseline: Group) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(step, run) rewards of both over the steps that every run has: where a seed ends early, the mean of the others
    jumps by what sets them apart, and that is no drift."""
    frames = group.frame(REWARD).dropna(), baseline.frame(REWARD).dropna()
    steps = frames[0].index.intersection(frames[1].index)
    return frames[0].loc[steps], frames[1].loc[steps]


def _at_end(frame: pd.DataFrame) -> np.ndarray:
    """(run,) mean of each column over the last block of steps."""
    return np.array_split(frame.to_numpy(), BLOCKS)[-1].mean(axis=0)


def _over_seeds(value_S: np.ndarray) -> Measured:
    """Mean and standard error over seeds; of one seed nothing is known of others."""
    seeds = len(value_S)
    error = float(value_S.std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else 0.0
    return Measured(float(value_S.mean()), error, seeds - 1)
