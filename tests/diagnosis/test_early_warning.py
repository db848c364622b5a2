"""Which signal leaves the baseline's band when: planted departures, and curves that have no answer."""

from __future__ import annotations

import math
import random

import pytest

from verl_tim.diagnosis.early_warning import SIGNALS, BandRule, band_of, departure, early_warning
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.metric_log import MetricLog, Record

SIGNAL = {signal.names[0]: signal for signal in SIGNALS}
NAMES = list(SIGNAL)
REWARD, GRAD, SKEW, K3 = "critic/score/mean", "actor/grad_norm", "tim/contribution_skew", "tim/k3"
RULE = BandRule()


def log(curves, steps=60):
    """`curves`: name -> step -> value; NaN is logged as not finite."""
    records = []
    for step in range(1, steps + 1):
        values = {name: curve(step) for name, curve in curves.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        records.append(Record(step, finite, tuple(name for name in values if name not in finite)))
    return MetricLog(records)


def group(name, *curves, steps=60):
    return Group(name, tuple(range(len(curves))), tuple(log(each, steps) for each in curves))


def noisy(level, seed, size=0.01, trend=0.0):
    noise = random.Random(seed)
    values = [level + trend * step + noise.gauss(0, size) for step in range(400)]
    return lambda step: values[step]


def leaving(curve, step, by):
    return lambda at: curve(at) + (by if at >= step else 0.0)


def of(name, run, baseline, rule=RULE):
    return departure(run, baseline, SIGNAL[name], rule)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("step", [10, 33, 57])
def test_a_planted_departure_is_found_at_its_step(step, seeds):
    baseline = group("base", *({GRAD: noisy(1.0, seed)} for seed in range(seeds)))
    run = group("run", {GRAD: leaving(noisy(1.0, 77), step, 0.2)})
    found = of(GRAD, run, baseline)
    assert (found.state, found.step) == ("left", step)
    assert found.value > found.band[1]
    assert not found.sharp


@pytest.mark.parametrize("seeds", [1, 3])
def test_noise_of_the_same_size_stays(seeds):
    baseline = group("base", *({GRAD: noisy(1.0, seed)} for seed in range(seeds)), steps=300)
    for seed in range(20, 30):
        found = of(GRAD, group("run", {GRAD: noisy(1.0, seed)}, steps=300), baseline)
        assert (found.state, found.step) == ("stayed", None)


def test_a_trend_that_both_share_is_no_departure():
    baseline = group("base", {REWARD: noisy(0.2, 1, trend=0.01)})
    assert of(REWARD, group("run", {REWARD: noisy(0.2, 2, trend=0.01)}), baseline).state == "stayed"
    assert of(REWARD, group("run", {REWARD: noisy(0.2, 2)}), baseline).state == "left"


def test_a_single_spike_needs_company():
    baseline = group("base", {GRAD: noisy(1.0, 1)})
    spike = {GRAD: lambda step: 9.0 if step == 20 else noisy(1.0, 2)(step)}
    assert of(GRAD, group("run", spike), baseline).state == "stayed"
    assert of(GRAD, group("run", spike), baseline, BandRule(z=8, consecutive=1)).step == 20


def test_a_sharp_band_is_left_at_once_and_the_change_is_found():
    """Without mismatch skew and k3 are exactly 0: the own change tells when something happens."""
    baseline = group("base", {SKEW: lambda step: 0.0})
    run = group("run", {SKEW: leaving(noisy(0.0, 3, size=1e-4), 40, 2e-3)})
    found = of(SKEW, run, baseline)
    assert (found.step, found.sharp, found.changed, found.band) == (1, True, 40, (0.0, 0.0))
    steady = of(SKEW, group("run", {SKEW: noisy(0.0, 3, size=1e-4)}), baseline)
    assert (steady.step, steady.changed) == (1, None)
    exact = of(SKEW, group("run", {SKEW: lambda step: 0.0}), baseline)
    assert (exact.state, exact.sharp) == ("stayed", True)


def test_the_change_is_looked_for_where_the_baseline_has_ended():
    """The exact run was stopped early; at what step the other leaves its own first steps does not hang on it."""
    run = group("run", {K3: leaving(noisy(1e-3, 1, 1e-5), 50, 1e-2)}, steps=80)
    whole, short = (of(K3, run, group("base", {K3: lambda step: 0.0}, steps=steps)) for steps in (80, 12))
    assert (whole.step, whole.changed) == (short.step, short.changed) == (1, 50)


def test_too_few_steps_to_change_in_are_not_called_unchanged():
    base = group("base", {K3: lambda step: 0.0}, steps=80)
    assert not of(K3, group("run", {K3: noisy(1e-3, 1, 1e-5)}, steps=12), base).settled
    steady = of(K3, group("run", {K3: noisy(1e-3, 1, 1e-5)}, steps=80), base)
    assert (steady.settled, steady.changed) == (True, None)


@pytest.mark.parametrize("level", [1 / 3, 1.0, -0.1, 1e6])
def test_a_constant_other_than_zero_does_not_leave_itself(level):
    baseline = group("base", {REWARD: lambda step: level})
    assert of(REWARD, group("run", {REWARD: lambda step: level}), baseline).state == "stayed"
    assert of(REWARD, group("run", {REWARD: lambda step: level * 1.001}), baseline).step == 1


def test_what_is_not_finite_lies_outside():
    baseline = group("base", {GRAD: noisy(1.0, 1)})
    run = group("run", {GRAD: lambda step: math.nan if step >= 50 else noisy(1.0, 2)(step)})
    found = of(GRAD, run, baseline)
    assert (found.state, found.step, found.value) == ("left", 50, None)
    one_of_two = group("run", {GRAD: noisy(1.0, 5)}, {GRAD: lambda step: math.nan if step >= 50 else 1.0})
    assert of(GRAD, one_of_two, baseline).step == 50


def test_too_little_is_said_so():
    full, single = group("base", {GRAD: noisy(1.0, 1)}), group("run", {GRAD: noisy(1.0, 2)}, steps=1)
    assert of(GRAD, single, full).state == "too short"
    assert of(GRAD, full, single).state == "too short"
    assert of(SKEW, full, full).state == "not logged"
    assert of(GRAD, group("run", {}), full).state == "not logged"
    assert of(GRAD, Group("empty", (0,), (MetricLog([]),)), full).state == "not logged"


def test_the_order_is_that_of_the_steps_and_absent_signals_come_last():
    base = {name: noisy(1.0, at) for at, name in enumerate(NAMES)} | {SKEW: lambda s: 0.0, K3: lambda s: 0.0}
    run = dict(base) | {
        SKEW: leaving(noisy(0.0, 11, 1e-4), 30, 0.01),
        K3: leaving(noisy(1e-5, 12, 1e-6), 45, 1e-3),
        GRAD: leaving(base[GRAD], 50, 1.0),
        REWARD: leaving(base[REWARD], 55, -1.0),
    }
    del run["tim/delta_abs_p99"]
    baseline = group("base", base)
    rows = early_warning([baseline, group("run", run)], baseline, RULE)
    assert [(row.metric, row.step, row.changed) for row in rows[:4]] == [
        (SKEW, 1, 30),
        (K3, 1, 45),
        (GRAD, 50, None),
        (REWARD, 55, None),
    ]
    assert {row.state for row in rows[4:]} == {"stayed", "not logged"}
    assert {row.run for row in rows} == {"run"}


def test_seeds_make_the_band_and_their_mean_is_held_against_it():
    """Two seeds at 0.9 and 1.1: mean 1, standard deviation 0.1414 with n - 1."""
    baseline = group("base", {GRAD: lambda s: 0.9}, {GRAD: lambda s: 1.1})
    band = band_of(baseline, (GRAD,), BandRule(z=2))
    assert band.low[7] == pytest.approx(1 - 2 * 0.02**0.5)
    assert band.high[7] == pytest.approx(1 + 2 * 0.02**0.5)
    run = group("run", {GRAD: lambda s: 0.5}, {GRAD: lambda s: 1.5})
    assert of(GRAD, run, baseline, BandRule(z=2)).state == "stayed"


@pytest.mark.parametrize("wrong", [{"z": 0}, {"z": math.nan}, {"window": 2}, {"consecutive": 0}])
def test_a_rule_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="band"):
        BandRule(**wrong)
