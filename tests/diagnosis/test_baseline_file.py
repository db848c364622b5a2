"""Baselines: the levels of known runs, and every reason why runs or a file give none."""

from __future__ import annotations

import json

import pytest
from fake_runs import write_run
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.baseline import MAX_METRIC, METRICS, Baseline, BaselineError, baseline_of
from verl_tim.diagnosis.run_folder import METRICS_NAME, RunFolder

runner = CliRunner()


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / f"run{seed}", rollout="stock", steps=8, seed=seed) for seed in (1, 2)]


def test_levels_are_those_of_all_steps(runs, tmp_path):
    baseline = baseline_of(runs)
    for name in METRICS[:4]:
        values = [value for run in runs for value in RunFolder(run).metrics().series(name)[1]]
        level = baseline.metrics[name]
        assert level.mean == pytest.approx(sum(values) / len(values))
        assert level.largest == max(values)
        assert level.reference == (level.largest if name == MAX_METRIC else level.mean)
    assert baseline.metrics.keys() == set(METRICS[:4])  # these runs recorded neither top-1 ids nor routes
    assert (baseline.steps, baseline.runs) == (16, ["run1", "run2"])
    assert (baseline.setup.rollout, baseline.setup.dtype, baseline.setup.parameters) == ("stock", "bfloat16", 612_480)
    assert Baseline.read(baseline.write(tmp_path / "baseline.json")) == baseline
    assert baseline_of(runs, skip=3).steps == 10


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parameters": 7}, "parameters is 7, there 612480"),
        ({"trainer": "stock"}, "trainer_numerics is 'stock', there 'contract'"),
        ({"facts": {"compute_dtype": "float32"}}, "dtype is 'float32', there 'bfloat16'"),
        ({"facts": {"device": "NVIDIA H200"}}, "device is 'NVIDIA H200'"),
        ({"manifest": False}, "has no manifest.json"),
        ({"drop": ("tim/",)}, "logged no tim/delta_abs_mean"),
    ],
)
def test_runs_of_other_set_ups_are_refused(runs, tmp_path, changes, named):
    other = write_run(tmp_path / "other", rollout="stock", steps=4, **changes)
    with pytest.raises(BaselineError, match=named):
        baseline_of([*runs, other])


def test_exact_runs_and_no_runs_are_refused(tmp_path):
    with pytest.raises(BaselineError, match=r"bits \(tim.gate.exact\)"):
        baseline_of([write_run(tmp_path / "exact", steps=4)])
    with pytest.raises(BaselineError, match="no runs"):
        baseline_of([])
    run = write_run(tmp_path / "short", rollout="stock", steps=4)
    with pytest.raises(BaselineError, match="after 9 steps"):
        baseline_of([run], skip=9)


def spoiled(content, **changes):
    return json.dumps({**content, **changes})


def test_bad_files_are_named(runs, tmp_path):
    path = baseline_of(runs).write(tmp_path / "baseline.json")
    good = json.loads(path.read_text())
    level = {"mean": 0.0, "largest": 0.0, "reference": 0.0}
    with pytest.raises(BaselineError, match="there is no file"):
        Baseline.read(tmp_path / "none.json")
    for text, named in (
        ("{", "is not JSON"),
        ("[]", "no baseline of format 1"),
        (spoiled(good, format=2), "no baseline of format 1"),
        (spoiled(good, setup={"model": "x"}), "no whole baseline"),
        (spoiled(good, metrics={"tim/delta_abs_mean": {"mean": 1}}), "no whole baseline"),
        (spoiled(good, metrics={"tim/delta_abs_mean": {**level, "mean": -1.0}}), "finite number of at least 0"),
        (spoiled(good, metrics={"tim/delta_abs_mean": level}), "every level is 0"),
    ):
        path.write_text(text)
        with pytest.raises(BaselineError, match=named):
            Baseline.read(path)


def test_the_command_writes_and_tells(runs, tmp_path):
    out = tmp_path / "out" / "b.json"
    result = runner.invoke(app, ["baseline", *map(str, runs), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(out.read_text())
    table = runner.invoke(app, ["baseline", str(runs[0]), "--out", str(out)])
    assert f"tim.gate.baseline={out}" in table.stdout.replace("\n", "")
    (runs[0] / METRICS_NAME).unlink()
    failed = runner.invoke(app, ["baseline", str(runs[0]), "--out", str(out)])
    assert failed.exit_code == 2
    assert "logged nothing" in failed.stderr.replace("\n", " ")


def spoil(run, changes, tail=""):
    """Another value for a metric of some steps; ... takes it out."""
    path = run / METRICS_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name, value in changes.get(line["step"], {}).items():
            if value is ...:
                del line["data"][name]
            else:
                line["data"][name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def test_steps_without_a_finite_value_and_a_torn_line_are_counted_and_named(runs, tmp_path):
    whole = baseline_of(runs)
    assert whole.left_out == []
    mean, largest = METRICS[0], MAX_METRIC
    # verl's file logger writes NaN and infinity as null
    spoil(runs[0], {1: {mean: None}, 3: {mean: None, largest: None}, 5: {largest: ...}}, tail='{"step": 9, "da')
    baseline = baseline_of(runs)
    assert baseline.steps == whole.steps - 2
    assert [(one.run, one.metric, one.nonfinite, one.missing) for one in baseline.left_out] == [
        ("run1", mean, [1, 3], []),
        ("run1", largest, [3], [5]),
        ("run1", None, [], []),
    ]
    assert Baseline.read(baseline.write(tmp_path / "baseline.json")) == baseline
    # the first step does not count as skipped because its value is none
    assert baseline_of(runs, skip=1).left_out[0].nonfinite == [3]
    result = runner.invoke(app, ["baseline", *map(str, runs), "--out", str(tmp_path / "b.json")])
    assert result.exit_code == 0, result.output
    for words in (
        "run1: tim/delta_abs_mean not finite at 2 steps (1, 3)",
        "run1: tim/delta_abs_max not finite at 1 step (3), not logged at 1 step (5)",
        "run1: the last line of its metrics is cut off",
    ):
        assert f"- left out: {words}" in result.stderr


def test_a_run_without_any_finite_step_is_refused(runs):
    spoil(runs[0], {step: {METRICS[0]: None} for step in range(9)})
    with pytest.raises(BaselineError, match="none of it finite"):
        baseline_of(runs)


def test_a_file_of_before_reads_as_nothing_left_out(runs, tmp_path):
    path = baseline_of(runs).write(tmp_path / "baseline.json")
    content = json.loads(path.read_text())
    del content["left_out"]
    path.write_text(json.dumps(content))
    assert Baseline.read(path).left_out == []
