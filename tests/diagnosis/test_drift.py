"""The forecast finds the step at which runs with a known drift part, and says less where less is known."""

import math

import numpy as np
import pandas as pd
import pytest

from verl_tim.diagnosis.curves import REWARD
from verl_tim.diagnosis.drift import (
    SKEW,
    DriftError,
    fastest_gain,
    forecast,
    mean_of,
    pull_of,
    slope_of,
)
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.metric_log import MetricLog, Record

PULL = 1.6


def group(name, reward, *, skew=0.0, seeds=3, steps=200, noise=0.01, skew_noise=0.0, seed=0):
    """Runs whose reward is a function of the step, with noise of its own per seed."""
    random = np.random.default_rng(seed)
    logs = []
    for _ in range(seeds):
        rewards = [reward(step) + random.normal(0, noise) for step in range(1, steps + 1)]
        skews = [skew + random.normal(0, skew_noise) for _ in range(steps)]
        logs.append(
            MetricLog(
                [
                    Record(at, {REWARD[0]: r, SKEW[0]: s})
                    for at, (r, s) in enumerate(zip(rewards, skews, strict=True), 1)
                ]
            )
        )
    return Group(name, tuple(range(seeds)), tuple(logs))


def learning(step):
    """From 0.2 to 0.8, fastest at first."""
    return 0.8 - 0.6 * math.exp(-step / 50)


@pytest.fixture(scope="module")
def baseline():
    return group("vexact", learning, seed=1)


def test_a_straight_drift_is_continued_to_the_band(baseline):
    per_step = 5e-5
    found = forecast(group("vllm", lambda s: learning(s) - per_step * s, seed=2), baseline, pull=PULL)
    # the band of three seeds with noise 0.01
    assert found.band == pytest.approx(0.03, rel=0.4)
    assert not found.parted
    assert found.slope.seen
    assert found.slope.value == pytest.approx(-per_step, rel=0.4)
    assert found.by_reward == pytest.approx(found.band / per_step, rel=0.4)
    assert 200 < found.earliest_by_reward < found.by_reward


def test_curves_that_have_parted_are_said_to(baseline):
    found = forecast(group("vllm", lambda s: learning(s) - 2e-3 * s, seed=2), baseline, pull=PULL)
    assert found.parted
    assert found.by_reward == found.earliest_by_reward == 200
    better = forecast(group("vllm", lambda s: learning(s) + 2e-3 * s, seed=2), baseline, pull=PULL)
    assert better.parted, "the band has two sides"


def test_without_a_drift_there_is_only_an_earliest_step(baseline):
    found = forecast(group("vllm", learning, seed=3), baseline, pull=PULL)
    assert not found.parted
    assert found.by_reward is None
    assert 200 < found.earliest_by_reward < math.inf


def test_the_skews_share_of_the_pull_drifts_at_the_speed_of_learning(baseline):
    found = forecast(group("vllm", learning, skew=-0.016, skew_noise=1e-3, seed=3), baseline, pull=PULL)
    assert found.share.value == pytest.approx(0.01, rel=0.02)
    # at first 0.6 / 50 per step, smoothed over 21 steps and taken across as many somewhat less
    assert 0.007 < found.speed < 0.012
    assert found.by_skew == pytest.approx(found.band / (0.01 * found.speed), rel=0.02)
    assert found.earliest_by_skew < found.by_skew
    ten = forecast(group("vllm", learning, skew=0.16, skew_noise=1e-3, seed=3), baseline, pull=PULL)
    assert ten.by_skew == pytest.approx(found.by_skew / 10, rel=0.02), "its sign does not matter"
    assert found.factor == pytest.approx(found.earliest_by_skew / 200)
    assert found.response_length(20) == pytest.approx(20 * found.factor)
    assert ten.response_length(20) == 20, "never shorter than what was measured"


def test_a_skew_within_its_error_gives_no_expected_step(baseline):
    found = forecast(group("vllm", learning, skew=0.0, skew_noise=0.01, seed=3), baseline, pull=PULL)
    assert found.by_skew is None
    assert found.earliest_by_skew < math.inf
    exact = forecast(group("exact", learning, seed=4), baseline, pull=PULL)
    assert exact.by_skew is None
    assert exact.earliest_by_skew == math.inf == exact.factor


def test_steps_that_hang_together_count_once():
    """A random walk's level moves; the error of its mean must say so."""
    random = np.random.default_rng(0)
    covered = {"blocks": 0, "steps": 0}
    for _ in range(200):
        noise = random.normal(0, 1, 420)
        series = np.convolve(noise, np.ones(21) / 21, "valid")
        found = mean_of(pd.DataFrame({0: series}), "x")
        covered["blocks"] += abs(found.value) <= 2 * found.error
        covered["steps"] += abs(found.value) <= 2 * series.std(ddof=1) / math.sqrt(len(series))
    assert covered["blocks"] > 0.8 * 200 > 0.6 * 200 > covered["steps"]


def test_slope_and_gain_of_known_lines():
    line = pd.Series(0.1 + 0.002 * np.arange(1, 101), index=range(1, 101))
    found = slope_of(line)
    assert found.value == pytest.approx(0.002)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert fastest_gain(line) == pytest.approx(0.002, rel=0.05)
    assert fastest_gain(-line) == 0


def test_pull_is_the_size_of_the_advantages_by_sign():
    assert pull_of(np.array([1.0, 3.0, -1.0, 0.0, np.nan])) == 3.0
    with pytest.raises(DriftError, match="one sign"):
        pull_of(np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("other", "base", "pull", "message"),
    [
        ({}, {"seeds": 1}, PULL, "one run has no seed band"),
        ({"steps": 12}, {}, PULL, "12 steps that all its runs"),
        ({}, {}, 0.0, "pull is 0.0"),
    ],
)
def test_what_allows_no_estimate_is_said(other, base, pull, message):
    with pytest.raises(DriftError, match=message):
        forecast(group("vllm", learning, **other), group("vexact", learning, **base), pull=pull)


def test_a_seed_that_ends_early_makes_no_drift(baseline):
    """Its reward lies below the others', so the mean of those that are left is higher."""
    low = group("vllm", lambda s: learning(s) - 0.05, seeds=1, seed=2, noise=1e-3).logs[0]
    others = group("vllm", lambda s: learning(s) + 0.025, seeds=2, seed=3, noise=1e-3).logs
    ended = MetricLog([record for record in low.records if record.step <= 120])
    found = forecast(Group("vllm", (0, 1, 2), (ended, *others)), baseline, pull=PULL)
    assert found.steps == 120
    assert abs(found.gap.value) < 0.005
    assert not found.parted
    whole = forecast(Group("vllm", (0, 1, 2), (low, *others)), baseline, pull=PULL)
    assert whole.gap.value == pytest.approx(found.gap.value, abs=0.01)


def shifted(log, by):
    """The run, its reward higher by `by` at every step."""
    return MetricLog([Record(r.step, {**r.data, REWARD[0]: r.data[REWARD[0]] + by}) for r in log.records])


def test_runs_of_one_seed_are_compared_with_each_other():
    """What a seed's prompts do to its reward is a hundred times what the setting does, and is the same in both."""
    random = np.random.default_rng(5)
    exact = [
        shifted(group("x", lambda s: learning(s) + random.normal(0, 0.1), seeds=1, seed=seed).logs[0], offset)
        for seed, offset in enumerate((-0.1, 0.0, 0.1))
    ]
    baseline = Group("vexact", (0, 1, 2), tuple(exact))
    logs = [shifted(log, -by) for log, by in zip(exact, (0.001, 0.002, 0.003), strict=True)]
    # other places, and a seed that the baseline alone has
    two = Group("vllm", (3, 4), (logs[2], logs[0]))
    found = forecast(two, baseline, pull=PULL, same_seed=[(0, 2), (1, 0)])
    assert found.paired == 2
    assert found.gap.value == pytest.approx(-0.002)
    assert found.gap.error == pytest.approx(0.001)
    assert found.slope.value == pytest.approx(0, abs=1e-9)
    means = forecast(two, baseline, pull=PULL)
    assert means.paired == 0
    assert means.gap.error > 20 * found.gap.error
    one = forecast(Group("vllm", (3,), (logs[2],)), baseline, pull=PULL, same_seed=[(0, 2)])
    assert (one.gap.value, one.gap.half_width) == (pytest.approx(-0.003), math.inf)


@pytest.mark.parametrize("seeds", [2, 3])
def test_an_interval_of_few_seeds_holds_the_truth_as_often_as_it_says(seeds):
    """Seeds drift apart, the setting does nothing: gap and slope are told from 0 in one of twenty."""
    random = np.random.default_rng(seeds)
    told = {"gap": 0, "slope": 0}
    places = [(place, place) for place in range(seeds)]
    for _ in range(200):
        exact = group("vexact", learning, seeds=seeds, steps=60, seed=int(random.integers(1 << 30)))
        slopes = random.normal(0, 1e-3, seeds)
        logs = tuple(
            MetricLog([Record(r.step, {**r.data, REWARD[0]: r.data[REWARD[0]] + slope * r.step}) for r in log.records])
            for log, slope in zip(exact.logs, slopes, strict=True)
        )
        found = forecast(Group("vllm", exact.members, logs), exact, pull=PULL, same_seed=places)
        told["gap"] += found.gap.seen
        told["slope"] += found.slope.seen
    assert max(told.values()) < 0.1 * 200


def test_a_reward_that_is_not_finite_ends_what_is_compared(baseline):
    logs = group("vllm", learning, seed=2).logs
    broken = MetricLog([r if r.step <= 100 else Record(r.step, {SKEW[0]: 0.0}, (REWARD[0],)) for r in logs[0].records])
    assert forecast(Group("vllm", (0, 1, 2), (broken, *logs[1:])), baseline, pull=PULL).steps == 100


def test_a_run_without_skew_is_refused(baseline):
    logs = tuple(
        MetricLog([Record(r.step, {REWARD[0]: r.data[REWARD[0]]}) for r in log.records]) for log in baseline.logs
    )
    with pytest.raises(DriftError, match="contribution_skew"):
        forecast(Group("vllm", (0, 1, 2), logs), baseline, pull=PULL)
