"""Seeds of one setting as one curve: which runs belong together, and what is shown of them."""

from __future__ import annotations

import json
import statistics

import pytest
from fake_runs import write_run

from verl_tim.diagnosis.compare import Options, compare
from verl_tim.diagnosis.figures import build_sections
from verl_tim.diagnosis.groups import Group, named_groups
from verl_tim.diagnosis.metric_log import MetricLog, Record
from verl_tim.diagnosis.page import overlay_of, render_page
from verl_tim.diagnosis.smoothing import Smoothing


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    root = tmp_path_factory.mktemp("six")
    return [
        write_run(root / f"{rollout}-s{seed}", rollout=rollout, seed=seed)
        for rollout in ("stock", "vexact")
        for seed in (1, 2, 3)
    ]


def test_runs_equal_but_for_the_seed_are_grouped(six):
    comparison = compare(six)
    assert [(g.name, g.members) for g in comparison.groups] == [
        ("stock (3 seeds)", (0, 1, 2)),
        ("vexact (3 seeds)", (3, 4, 5)),
    ]
    assert comparison.baseline.name == "vexact (3 seeds)"
    assert comparison.what.settings == []
    assert comparison.to_dict()["groups"][0] == {
        "name": "stock (3 seeds)",
        "runs": ["stock-s1", "stock-s2", "stock-s3"],
    }


def test_another_setting_is_not_grouped(tmp_path, six):
    other = write_run(tmp_path / "other", rollout="stock", seed=4, config={"actor_rollout_ref.actor.optim.lr": 1e-4})
    assert [g.name for g in compare([*six[:3], other]).groups] == ["stock (3 seeds)", "other"]
    assert len(compare(six, options=Options(by_seed=False)).groups) == 6


def test_runs_without_manifest_stand_alone_unless_named(tmp_path):
    paths = [write_run(tmp_path / f"stock-{seed}", rollout="stock", seed=seed, manifest=False) for seed in (1, 2)]
    assert len(compare(paths).groups) == 2
    (group,) = compare(paths, options=Options(groups=("both=stock-*",))).groups
    assert (group.name, group.members) == ("both", (0, 1))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["stock"], "LABEL=PATTERN"),
        (["=a*"], "LABEL=PATTERN"),
        (["x=nothing*"], "matches no run"),
        (["x=a*", "y=*1"], "which group 'x' has already"),
        (["b1=a*"], "give labels that differ"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        named_groups(["a1", "a2", "b1"], rules)


def test_mean_and_spread():
    logs = [
        MetricLog([Record(s, {"x": float(s * k)}) for s in range(1, last + 1)]) for k, last in ((1, 3), (2, 3), (3, 2))
    ]
    curve = Group("g", (0, 1, 2), tuple(logs)).curve(("x",))
    assert curve.steps == [1, 2, 3]
    assert curve.values == [2.0, 4.0, 4.5]
    spreads = [statistics.stdev(values) for values in ((1, 2, 3), (2, 4, 6), (3, 6))]
    assert curve.low == pytest.approx([m - s for m, s in zip(curve.values, spreads, strict=True)])
    assert curve.high == pytest.approx([m + s for m, s in zip(curve.values, spreads, strict=True)])


def test_pooled_metrics_keep_extremes_and_counts():
    logs = tuple(
        MetricLog([Record(1, {"tim/delta_abs_max": x, "tim/valid_tokens": 10.0, "critic/score/mean": x})])
        for x in (0.2, 0.6)
    )
    (record,) = Group("g", (0, 1), logs).log().records
    assert record.data == {"tim/delta_abs_max": 0.6, "tim/valid_tokens": 20.0, "critic/score/mean": pytest.approx(0.4)}


def test_the_page_draws_one_mean_with_a_band_per_setting(six):
    comparison = compare(six)
    (reward,) = (
        d
        for s in build_sections(comparison.groups, overlay_of(comparison))
        for d in s.drawings
        if d.plot.id == "reward"
    )
    roles = [(trace.meta["run"], trace.meta["role"]) for trace in reward.figure.data]
    assert roles == [(0, "band"), (0, "line"), (1, "band"), (1, "line")]
    assert "The baseline's shade is its band (table above)." in reward.notes
    page = render_page(comparison)
    assert "stock-s1, stock-s2, stock-s3" in page


def cut(run, step):
    """The run as it is when it is killed: `metrics.jsonl` ends within the line after `step`."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[step + 1][:40])


def test_a_seed_that_ended_early_moves_no_conclusion(tmp_path):
    """Of three seeds with rewards apart by 0.1 the lowest is killed: the mean of the other two jumps, and means
    nothing."""
    paths = [
        write_run(tmp_path / f"{rollout}-s{seed}", rollout=rollout, steps=60, seed=seed, start=0.1 * seed)
        for rollout in ("stock", "vexact")
        for seed in (1, 2, 3)
    ]
    cut(paths[0], 25)
    comparison = compare(paths)
    stock = comparison.groups[0]
    assert len(stock.shared(("critic/score/mean",))) == 25
    assert stock.curve(("critic/score/mean",)).steps[-1] == 60  # drawn to the end
    assert "Rewards end equal within noise" in comparison.verdict.lead
    (note,) = [note for note in comparison.verdict.notes if "ended before" in note]
    assert "stock-s1 at step 25 ended before step 60" in note
    assert "ended before step 60" in render_page(comparison)
    assert {d.signal: d.state for d in comparison.warnings}["reward"] == "stayed"


def test_a_baseline_seed_that_ended_early_makes_no_departure(tmp_path):
    paths = [
        write_run(tmp_path / f"{rollout}-s{seed}", rollout=rollout, steps=60, seed=seed, start=0.2 * seed, gain=0.05)
        for rollout in ("stock", "vexact")
        for seed in (1, 2)
    ]
    cut(paths[2], 25)
    warnings = {d.signal: d for d in compare(paths).warnings}
    assert warnings["reward"].state == "stayed"


def test_a_baseline_can_be_named_and_a_wrong_one_is_refused(six):
    assert compare(six[:1]).baseline is None
    assert compare(six[:4], options=Options(baseline="stock (3 seeds)")).baseline.members == (0, 1, 2)
    with pytest.raises(ValueError, match=r"--baseline: 'vllm' is none of .*: choose one of stock \(3 seeds\)"):
        compare(six, options=Options(baseline="vllm"))


def test_without_a_zero_mismatch_run_it_is_said(six):
    comparison = compare(six[:3], options=Options(by_seed=False))
    assert comparison.warnings == []
    assert "name the baseline (--baseline RUN)" in render_page(comparison)


def test_training_time_is_the_sum_of_step_times(six):
    run = compare(six[:1]).runs[0]
    _, seconds = run.log.series("timing_s/step")
    assert run.seconds()[1] == pytest.approx(seconds[0])
    assert run.seconds()[30] == pytest.approx(sum(seconds))
    page = json.loads(render_page(compare(six)).split('id="data">')[1].split("</script>")[0].replace("\\u003c", "<"))
    assert len(page["clocks"]) == 2
    assert page["clocks"][0]["30"] == pytest.approx(
        statistics.fmean(sum(compare([p]).runs[0].log.series("timing_s/step")[1]) for p in six[:3])
    )


def test_a_run_without_step_times_has_no_time_axis(tmp_path, six):
    silent = write_run(tmp_path / "silent", drop=("timing_s/", "perf/"))
    assert "training time</button>" not in render_page(compare([six[0], silent]))
    assert "training time</button>" in render_page(compare([six[0], six[3]]))


@pytest.mark.parametrize("text", ["ema", "ema:1", "ema:0", "rolling:1", "rolling:2.5", "median:5", "ema:x"])
def test_smoothing_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="give off, ema"):
        Smoothing.parse(text)


def test_rolling_is_centred():
    ramp = [float(i) for i in range(12)]
    smooth = Smoothing.parse("rolling:5").apply(ramp)
    assert smooth[2:-2] == pytest.approx(ramp[2:-2])
    assert Smoothing.parse("off") is None
