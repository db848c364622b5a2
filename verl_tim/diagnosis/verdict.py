"""What a comparison shows, in sentences computed from the data: nothing is said that no number of the runs says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import TYPE_CHECKING, Literal

from verl_tim.diagnosis.curves import DELTA_MAX, DELTA_MEAN, EXACT_FRACTION, PROBS_MAX, REWARD, first_logged
from verl_tim.diagnosis.ends import end_steps
from verl_tim.diagnosis.formats import listed, percent, short
from verl_tim.diagnosis.metric_log import MetricLog
from verl_tim.diagnosis.restarts import in_words, restarts_of
from verl_tim.units import count

if TYPE_CHECKING:
    from verl_tim.diagnosis.run import Run
    from verl_tim.diagnosis.what_differs import WhatDiffers

Seeds = Mapping[str, Mapping[str, MetricLog]]  # what a curve stands for -> its runs by name, one or several

SMALL_MODEL = 100_000_000  # parameters; below it a mismatch is not expected to reach the reward within a short run
MIN_SHARED_STEPS = 6
# Two-sided 95 % points of Student's t by degrees of freedom; of more than these it falls to 1.96.
_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Exactness:
    """How a run's rollout log-probs stand to the trainer's.

    Attributes:
        kind: "exact" (every compared log-prob agrees), "mismatch", or "unmeasured".
        steps: steps that logged it.
        tokens: tokens compared over those steps, if logged.
        missing: tokens without a usable log-prob on one side, if logged.
        exact_fraction: share of all compared tokens that agree bit for bit, if logged.
        delta_mean, delta_max: mean over tokens and largest |d| in nats, if logged.
        first_step: the first step with a difference.
        bits: bit patterns were compared, not only differences.
    """

    kind: Literal["exact", "mismatch", "unmeasured"]
    steps: int = 0
    tokens: int | None = None
    missing: int = 0
    exact_fraction: float | None = None
    delta_mean: float | None = None
    delta_max: float | None = None
    first_step: int | None = None
    bits: bool = False


def exactness(log: MetricLog) -> Exactness:
    """Read a run's exactness from its `tim/*` metrics. A step at which they were not finite is no exact one."""
    fraction = dict(zip(*log.series(EXACT_FRACTION[0]), strict=True))
    largest = dict(zip(*log.series(DELTA_MAX[0]), strict=True))
    means = dict(zip(*log.series(DELTA_MEAN[0]), strict=True))
    nonfinite = log.nonfinite()
    unreadable = {step for name in (EXACT_FRACTION[0], DELTA_MAX[0]) for step in nonfinite.get(name, ())}
    steps = sorted(fraction.keys() | largest.keys() | unreadable)
    missing = int(sum(log.series("tim/missing_tokens")[1]))
    if not steps:
        return Exactness("unmeasured", missing=missing)
    tokens = dict(zip(*log.series("tim/valid_tokens"), strict=True))
    weighted = all(step in tokens for step in steps)
    weight = {step: tokens[step] if weighted else 1.0 for step in steps}
    broken = [
        step for step in steps if step in unreadable or fraction.get(step, 1.0) != 1.0 or largest.get(step, 0.0) != 0.0
    ]

    def mean_over_tokens(values: dict[int, float]) -> float | None:
        total = sum(weight[step] for step in values)
        return sum(value * weight[step] for step, value in values.items()) / total if total else None

    return Exactness(
        kind="mismatch" if broken else "exact",
        steps=len(steps),
        tokens=int(sum(weight.values())) if weighted else None,
        missing=missing,
        exact_fraction=mean_over_tokens(fraction),
        delta_mean=mean_over_tokens({step: value for step, value in means.items() if step in weight}),
        delta_max=max(largest.values(), default=None),
        first_step=broken[0] if broken else None,
        bits=len(fraction) == len(steps),
    )


@dataclass(frozen=True)
class RewardComparison:
    """How the rewards of several runs end, over the last steps that all of them have.

    Attributes:
        kind: "equal" (no pair differs by more than noise), "identical" (the same at every shared step), "apart",
            "too_short", or "missing" (some run logged no reward).
        shared: number of steps that all runs, and all seeds of each, have; `window` of them, the last, are compared.
        ends: run -> mean over the window.
        gap: largest difference of two means; `noise`: the half-width of its 95 % interval, from paired steps or, where
            both have several seeds and that is more, from how far the seeds of one setting end apart.
    """

    kind: Literal["equal", "identical", "apart", "too_short", "missing"]
    shared: int = 0
    window: int = 0
    ends: dict[str, float] | None = None
    gap: float = 0.0
    noise: float = 0.0


def compare_rewards(runs: Seeds) -> RewardComparison:
    """Compare how rewards end, paired by step, since runs of one seed see the same problems in one order."""
    logs = [log for seeds in runs.values() for log in seeds.values()]
    name = first_logged(REWARD, logs)
    of_seeds = {
        run: [dict(zip(*log.series(name), strict=True)) if name else {} for log in seeds.values()]
        for run, seeds in runs.items()
    }
    if not all(curve for curves in of_seeds.values() for curve in curves):
        return RewardComparison("missing")
    shared = sorted(set.intersection(*(set(curve) for curves in of_seeds.values() for curve in curves)))
    curves = {run: {s: fmean(one[s] for one in each) for s in shared} for run, each in of_seeds.items()}
    if len(shared) < MIN_SHARED_STEPS:
        return RewardComparison("too_short", len(shared))
    window = shared[-end_steps(len(shared)) :]
    ends = {run: fmean(curve[step] for step in window) for run, curve in curves.items()}
    high, low = max(ends, key=lambda run: ends[run]), min(ends, key=lambda run: ends[run])
    if all(len({curve[step] for curve in curves.values()}) == 1 for step in shared):
        return RewardComparison("identical", len(shared), len(window), ends)
    paired = [curves[high][step] - curves[low][step] for step in window]
    noise = student_t(len(window) - 1) * stdev(paired) / math.sqrt(len(window))
    noise = max(noise, _seed_noise(*([fmean(c[s] for s in window) for c in of_seeds[run]] for run in (high, low))))
    gap = ends[high] - ends[low]
    return RewardComparison("apart" if gap > noise else "equal", len(shared), len(window), ends, gap, noise)


def student_t(freedom: int) -> float:
    """Half-width of a 95 % interval in standard errors, for at least one degree of freedom; a little wide for many."""
    return _STUDENT_T[min(freedom, len(_STUDENT_T)) - 1]


def _seed_noise(one: Sequence[float], other: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the difference of two means over seeds (Student, pooled variance); 0 where one
    of them has a single seed, which says nothing of others."""
    if min(len(one), len(other)) < 2:
        return 0.0
    freedom = len(one) + len(other) - 2
    pooled = (variance(one) * (len(one) - 1) + variance(other) * (len(other) - 1)) / freedom
    return student_t(freedom) * math.sqrt(pooled * (1 / len(one) + 1 / len(other)))


@dataclass(frozen=True)
class Verdict:
    """`lead`: one sentence. `notes`: what qualifies it. `alerts`: what is wrong."""

    lead: str
    notes: list[str]
    alerts: list[str]


def judge(runs: Sequence[Run], what: WhatDiffers, seeds: Seeds) -> Verdict:
    """Say what the runs show.

    Args:
        runs: at least one, with distinct names.
        what: what differs between them.
        seeds: of each run, by its name, what it stands for.
    """
    states = {run.name: exactness(run.log) for run in runs}
    alerts = [
        f"{run.name} should be exact (rollout {run.rollout}, trainer contract) and is not: its log-probs differ "
        f"from the trainer's from step {states[run.name].first_step} on."
        for run in runs
        if run.rollout == "vexact" and run.trainer_numerics == "contract" and states[run.name].kind == "mismatch"
    ]
    notes = []
    for run in runs:
        missing = states[run.name].missing
        if missing:
            notes.append(
                f"{run.name}: {missing:,} response tokens had no usable log-prob on one side and are in no statistic."
            )
        nonfinite = run.log.nonfinite()
        # A correlation that has no value is left out by this package; verl itself logs such values as NaN.
        if nonfinite:
            worst = max(nonfinite, key=lambda name: len(nonfinite[name]))
            more = f" and {len(nonfinite) - 1} other metrics" if len(nonfinite) > 1 else ""
            notes.append(
                f"{run.name}: {worst} was not finite at {len(nonfinite[worst])} of {len(run.log.records)} logged "
                f"steps{more}; those points are left out."
            )
        if run.log.torn:
            notes.append(f"{run.name}: the last line of its metrics is cut off; the run was stopped or is still going.")
    # of each seed: a group's pooled log has means
    for name, log in (each for of_run in seeds.values() for each in of_run.items()):
        if restarts := restarts_of(log):
            notes.append(f"{name}: {in_words(restarts)}.")
    notes += [note for run in runs if (note := _uneven(run.name, seeds[run.name])) is not None]
    if len(runs) == 1:
        return Verdict(_one_run(runs[0], states[runs[0].name]), notes, alerts)
    rewards = compare_rewards(seeds)
    if (told := what.note()) is not None:
        notes.insert(0, told)
    elif rewards.kind == "apart" and min(map(len, seeds.values())) > 1:
        notes.insert(
            0,
            f"The gap of {short(rewards.gap)} is above the ±{short(rewards.noise)} that steps and seeds explain (95 % "
            "interval).",
        )
    elif rewards.kind == "apart":
        why = (
            "nothing that was compared differs between the runs, so nothing but chance is known to have made it."
            if what.one_rollout
            else "runs with other seeds would tell whether it is the rollout or chance."
        )
        notes.insert(
            0, f"The gap of {short(rewards.gap)} is above the step-to-step noise of ±{short(rewards.noise)}; {why}"
        )
    lengths = {run.name: run.steps for run in runs}
    if len(set(lengths.values())) > 1:
        told = listed([f"{name} {steps}" for name, steps in lengths.items()])
        notes.append(
            f"The runs have different lengths (steps: {told}); rewards are compared over the {rewards.shared} shared, "
            "signals over those that a run shares with the baseline."
        )
    return Verdict(f"{_rewards(runs, rewards)}; {_mismatches(states, rewards)}.", notes, alerts)


def _uneven(name: str, seeds: Mapping[str, MetricLog]) -> str | None:
    """A warning where some seeds of one curve ended before others."""
    ends = {seed: max(log.steps, default=0) for seed, log in seeds.items()}
    first, last = min(ends.values()), max(ends.values())
    if first == last:
        return None
    ended = listed([f"{seed} at step {step}" for seed, step in ends.items() if step < last])
    return (
        f"{name}: {ended} ended before step {last}. Behind step {first} its curves and figures are of the seeds left, "
        "which need not be like those that ended; rewards and signals are compared up to there."
    )


def _size(runs: Sequence[Run]) -> int | None:
    """Parameters of the largest model, if every run tells."""
    sizes = [run.manifest.parameters if run.manifest else None for run in runs]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(runs) else None


def _rewards(runs: Sequence[Run], rewards: RewardComparison) -> str:
    if rewards.kind == "missing":
        return "Rewards cannot be compared, since not every run logged one"
    if rewards.kind == "too_short":
        return f"With {rewards.shared} shared step{'s' * (rewards.shared != 1)} it is too early to compare rewards"
    assert rewards.ends is not None
    ends = rewards.ends
    if rewards.kind == "apart":
        ordered = sorted(ends, key=lambda name: -ends[name])
        told = listed([f"{name} {short(ends[name])}" for name in ordered])
        return f"Rewards end apart ({told}, over the last {rewards.window} shared steps)"
    if rewards.kind == "identical":
        said, after = f"Rewards are identical at all {rewards.shared} shared steps", ""
    else:
        told = listed([short(end) for end in ends.values()])
        said = f"Rewards end equal within noise ({told}, over the last {rewards.window} shared steps)"
        after = f" after {rewards.shared} shared steps"
    size = _size(runs)
    if size is not None and size < SMALL_MODEL:
        return f"{said}, as is expected at this size ({count(size)} parameters, {rewards.shared} steps)"
    return said + after


def _mismatches(states: dict[str, Exactness], rewards: RewardComparison) -> str:
    exact = [name for name, state in states.items() if state.kind == "exact"]
    apart = {name: state for name, state in states.items() if state.kind == "mismatch"}
    unmeasured = [name for name, state in states.items() if state.kind == "unmeasured"]
    silent = f"{listed(unmeasured)} logged no mismatch metrics (tim/*)" if unmeasured else ""
    if not exact and not apart:
        return "no run logged mismatch metrics (tim/*)"
    parts = []
    if exact:
        parts.append(
            f"{listed(exact)} equal{'s' * (len(exact) == 1)} the trainer {_how_exact([states[n] for n in exact])}"
        )
    if len(apart) <= 2:
        parts += [f"{name} {_how_far(state)}" for name, state in apart.items()]
    else:
        sizes = [
            f"{name} {short(state.delta_mean)} (largest {short(state.delta_max)})" for name, state in apart.items()
        ]
        over = "tokens" if all(state.tokens is not None for state in apart.values()) else "steps"
        parts.append(f"mean |d| over all {over}, in nats, is {listed(sizes)}")
    told = ", while ".join(parts) if len(parts) == 2 else listed(parts)
    if exact and apart:
        where = "the mismatch shows in the log-probs" if rewards.kind in ("equal", "identical") else "in the log-probs"
        told = f"{where}, {told}" if where.startswith("in") else f"{where}: {told}"
    elif exact and not unmeasured:
        told += ", so there is no mismatch to see"
    elif len(apart) == 2 and not unmeasured:
        told += _ratio(apart)
    return f"{told}; {silent}" if silent else told


def _how_exact(states: Sequence[Exactness]) -> str:
    how = "bit for bit" if all(state.bits for state in states) else "with |d| = 0"
    tokens = [state.tokens for state in states if state.tokens is not None]
    if len(tokens) == len(states):
        return f"{how} on all {sum(tokens):,} tokens"
    steps = sum(state.steps for state in states)
    return f"{how} at all {steps} measured steps"


def _how_far(state: Exactness) -> str:
    parts = []
    if state.delta_mean is not None:
        parts.append(f"by {short(state.delta_mean)} nats on average")
    if state.delta_max is not None:
        parts.append(f"by up to {short(state.delta_max)}" + (" nats" if not parts else ""))
    size = " and ".join(parts)
    if state.exact_fraction is None:
        return f"differs {size}".rstrip()
    tokens = "tokens" if state.tokens is None else f"{state.tokens:,} tokens"
    return f"differs on {percent(1 - state.exact_fraction)} of its {tokens}{', ' * bool(size)}{size}"


def _ratio(apart: dict[str, Exactness]) -> str:
    (low, low_state), (high, high_state) = sorted(apart.items(), key=lambda item: item[1].delta_mean or 0.0)
    if not low_state.delta_mean or not high_state.delta_mean:
        return ""
    factor = high_state.delta_mean / low_state.delta_mean
    return f" ({high}'s mean |d| is {short(factor, 2)} times {low}'s)" if factor >= 1.1 else " (much the same mean |d|)"


def _one_run(run: Run, state: Exactness) -> str:
    name = first_logged(REWARD, [run.log])
    values = run.log.series(name)[1] if name else []
    if len(values) >= MIN_SHARED_STEPS:
        window = end_steps(len(values))
        first, last = fmean(values[:window]), fmean(values[-window:])
        moved = last - first
        spread = math.sqrt((stdev(values[:window]) ** 2 + stdev(values[-window:]) ** 2) / window)
        verb = "rises" if moved > 2 * spread else "falls" if -moved > 2 * spread else "stays level"
        ends = f"from {short(first)} to {short(last)} (means of the first and last {window} steps)"
        said = f"Reward {verb} {ends} over {run.steps} steps"
    elif values:
        said = f"Reward is {short(values[-1])} after {len(values)} step{'s' * (len(values) != 1)}"
    else:
        said = "No reward was logged"
    if state.kind == "unmeasured":
        largest = run.log.series(PROBS_MAX[0])[1]
        if largest:
            reach = short(max(largest))
            return f"{said}; no tim/* metrics were logged, and verl's own probability difference reaches {reach}."
        return f"{said}; no mismatch metrics (tim/*) were logged."
    if state.kind == "exact":
        return f"{said}; the rollout equals the trainer {_how_exact([state])}."
    return f"{said}; the rollout {_how_far(state)}."
