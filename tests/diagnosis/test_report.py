"""The report's pictures and tables reveal mismatches of known size and shape."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_dumps import drift, heavy_tail, none, normal, offset, one_sign, write_dumps
from fake_runs import write_run
from test_compare_page import HOSTILE, Page
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.charts import heat_map, histogram
from verl_tim.diagnosis.report import MAX_STEPS, Report, spread
from verl_tim.diagnosis.report_page import render_report
from verl_tim.diagnosis.token_dump import TokenDumpError


def report_of(tmp_path, mismatch, **dumps):
    return Report.read(write_dumps(write_run(tmp_path / "run", rollout="stock", steps=4), mismatch, **dumps))


def figure(report, name):
    return Page(render_report(report)).data()["figures"][name]


def test_an_offset_is_one_bar_and_one_colour(tmp_path):
    report = report_of(tmp_path, offset(0.05))
    assert report.tail["p50"] == pytest.approx(0.05, rel=1e-4)
    assert report.tail["max"] == pytest.approx(0.05, rel=1e-4)
    assert (report.tail["above 0.01"], report.tail["above 0.1"]) == (1.0, 0.0)
    (bars,) = figure(report, "histogram")["data"]
    filled = [(x, y) for x, y in zip(bars["x"], bars["y"], strict=True) if y]
    assert [y for _, y in filled] == [len(report.known)]
    assert abs(filled[0][0] - math.log10(0.05)) <= 0.125
    (heat,) = figure(report, "heat")["data"]
    values = [z for row in heat["z"] for z in row if z is not None]
    assert values == pytest.approx([0.05] * len(values), rel=1e-4)


def test_a_heavy_tail_stands_apart_in_the_histogram(tmp_path):
    report = report_of(tmp_path, heavy_tail(1.5, 0.01))
    assert report.tail["p50"] < 1e-3
    assert report.tail["above 1"] == pytest.approx(0.01, abs=0.005)
    (bars,) = figure(report, "histogram")["data"]
    tail = sum(y or 0 for x, y in zip(bars["x"], bars["y"], strict=True) if x > 0)
    assert tail == int((report.known["delta"] > 1).sum()) > 0
    assert all(token.delta == pytest.approx(1.5, abs=1e-5) for token in report.worst)


def test_drift_with_the_place_shows_in_the_heat_map(tmp_path):
    report = report_of(tmp_path, drift(0.01), lengths=(10, 40))
    (heat,) = figure(report, "heat")["data"]
    for row in heat["z"]:
        values = [z for z in row if z is not None]
        assert values == sorted(values)
        assert values[-1] > values[0]
    # place 20 has d = 0.2, whatever the length
    column = next(j for j, edge in enumerate(heat["x"][1:]) if edge > 20)
    edges = heat["x"][column : column + 2]
    expected = 0.01 * np.mean(range(int(edges[0]), int(edges[1])))
    assert heat["z"][-1][column] == pytest.approx(expected, rel=0.05)


def test_exact_runs_have_a_bar_of_zeros_and_no_worst_token(tmp_path):
    report = report_of(tmp_path, none)
    assert report.worst == []
    assert report.tail["max"] == 0
    (bars,) = figure(report, "histogram")["data"]
    assert bars["text"][0].startswith("|d| exactly 0:")
    assert bars["y"][0] == len(report.known)
    assert not any(bars["y"][1:])
    assert "d is 0 on every dumped token" in Page(render_report(report)).text


def test_router_flips_per_layer(tmp_path):
    report = report_of(tmp_path, normal(1e-3), flips={3: 0.0, 5: 0.1, 7: 0.4}, prompts=32)
    assert report.flips_from == "dumps"
    assert list(report.flips) == [3, 5, 7]
    assert report.flips[3] == 0
    assert report.flips[5] == pytest.approx(0.1, abs=0.02)
    assert report.flips[7] == pytest.approx(0.4, abs=0.03)
    (bars,) = figure(report, "layers")["data"]
    assert bars["x"] == [3, 5, 7]
    assert bars["y"] == pytest.approx(list(report.flips.values()))


def test_router_flips_from_the_metrics_where_no_routes_were_dumped(tmp_path):
    run = write_run(tmp_path / "run", rollout="stock", steps=2)
    with open(run / "metrics.jsonl", "a") as file:
        for step, share in ((1, 0.1), (2, 0.3)):
            file.write(json.dumps({"step": step, "data": {"tim/router_flip_rate/layer_4": share}}) + "\n")
    report = Report.read(write_dumps(run, normal(1e-3)))
    assert report.flips == {4: pytest.approx(0.2)}
    assert "the metrics' mean over steps" in Page(render_report(report)).text


def test_one_sign_of_advantage_skews_and_rejection_mends_it(tmp_path):
    report = report_of(tmp_path, one_sign(0.5, 0.1), prompts=64, kept=lambda d: np.full(len(d), abs(d.mean()) < 0.25))
    effect = {each.label: each for each in report.effects}
    skew = effect["contribution skew"]
    assert skew.valid == pytest.approx((math.exp(0.5) - 1) * 0.1, rel=0.3)
    assert abs(skew.kept) < 1e-3
    assert effect["rejected with negative advantage"].valid == pytest.approx(0.1, abs=0.03)
    assert effect["rejected with positive advantage"].valid == 0
    assert effect["|d| max, nats"].kept < 0.01 < effect["|d| max, nats"].valid


def test_the_worst_token_stands_in_its_text(tmp_path):
    def spike(place_N, advantage, noise):
        return np.where(place_N == 3, 0.7, 0.0) if advantage > 0 else 0.0 * place_N

    report = report_of(tmp_path, spike, steps=1, prompts=1, per_prompt=2, lengths=(8, 9))
    (token,) = report.worst
    assert (token.before, token.text, token.after) == ("3+4", "=", "7 so the answer")
    assert token.delta == pytest.approx(0.7, rel=1e-5)
    assert token.old_log_prob - token.rollout_log_prob == pytest.approx(token.delta)
    assert (token.step, token.row, token.position, token.length) == (1, 1, 3, 8)
    page = render_report(report)
    assert "3+4<mark>=</mark>7 so the answer" in page


def test_what_a_tool_wrote_moves_no_place(tmp_path):
    """Of eight tokens the model wrote the last is the eighth, wherever in the response it stands."""

    def last(place_N, advantage, noise):
        return np.where(place_N == 7, 0.7, 0.0)

    report = report_of(tmp_path, last, steps=1, prompts=1, per_prompt=2, lengths=(8, 9), gap=500)
    assert {(token.place, token.length, token.position) for token in report.worst} == {(7, 8, 507)}
    page = render_report(report)
    assert "<td>8 of 8</td>" in page
    assert "508" not in page[: page.index("<script>")]
    heat = heat_map(*(report.known[name].to_numpy("int64") for name in ("place", "length")), np.ones(len(report.known)))
    assert max(heat.figure.data[0].x) == 8


def test_the_command_shows_the_worst_tokens_and_layers(tmp_path):
    def spike(place_N, advantage, noise):
        return np.where(place_N == 3, 0.7, 0.0) if advantage > 0 else 0.0 * place_N

    text = ("[red]", "+", "4", "=[/]", "7", " so")
    run = write_run(tmp_path / "run", rollout="stock", steps=2)
    write_dumps(run, spike, steps=1, prompts=1, per_prompt=2, lengths=(8, 9), text=text, flips={0: 0.0, 5: 1.0})
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.replace("│", " ").split())
    assert "[red]+4=[/]7 so" in shown
    assert "1, 1, 4" in shown
    assert "of 2 layers: layer 5 100 %, layer 0 0 %" in shown


def test_context_ends_at_the_sequence(tmp_path):
    report = report_of(tmp_path, offset(0.1), steps=1, prompts=2, per_prompt=2, lengths=(4, 5))
    assert all(token.before + token.text + token.after == "3+4=" for token in report.worst)


def test_text_of_tokens_never_becomes_markup(tmp_path):
    page = render_report(report_of(tmp_path, offset(0.1), steps=1, text=(HOSTILE,)))
    assert "<img src=x" not in page.split('id="data"')[0]
    assert len(Page(page).of("script")) == 3


def test_a_run_without_dumps_says_how_to_get_them(tmp_path):
    report = Report.read(write_run(tmp_path / "run", steps=3))
    assert "set tim.dump.tokens_per_step above 0" in Page(render_report(report)).text
    assert report.to_dict()["dumped_tokens"] == 0
    with pytest.raises(TokenDumpError, match="no token dumps"):
        Report.read(report.comparison.runs[0].path, steps=[1])


def test_bypass_dumps_without_old_log_probs_say_so(tmp_path):
    report = report_of(tmp_path, offset(0.1), fields=("rollout_log_prob_N",))
    assert "no token with both log-probs" in Page(render_report(report)).text
    assert report.effects == []


def test_tokens_without_a_log_prob_are_left_out(tmp_path):
    def holes(place_N, advantage, noise):
        return np.where(place_N % 2, np.nan, 0.1)

    report = report_of(tmp_path, holes)
    assert set(report.known["position"] % 2) == {0}
    assert report.tail["max"] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(("steps", "metrics"), [(1, True), (0, True), (3, False)])
def test_short_and_empty_runs_render(tmp_path, steps, metrics):
    run = write_run(tmp_path / "run", steps=max(steps, 1), drop=() if metrics else ("critic/", "tim/", "actor/"))
    if steps == 0:
        (run / "metrics.jsonl").write_text("")
    write_dumps(run, offset(0.1), steps=1, prompts=1, per_prompt=1, lengths=(1, 2))
    page = Page(render_report(Report.read(run)))
    assert "From 1 tokens of the dumped steps 1;" in page.text


def test_dumped_steps_are_spread_over_the_run():
    assert spread([7]) == [7]
    assert spread(list(range(1, 101)))[:: MAX_STEPS - 1] == [1, 100]
    assert len(spread(list(range(1, 101)))) == MAX_STEPS


def test_histogram_and_heat_map_of_one_token():
    assert histogram(np.array([0.0])).figure.data[0].y[0] == 1
    drawing = heat_map(np.array([0]), np.array([1]), np.array([0.3]))
    assert drawing.figure.data[0].z == ((0.3,),) or drawing.figure.data[0].z[0][0] == 0.3


def test_the_command(tmp_path):
    run = write_dumps(write_run(tmp_path / "run", steps=3), offset(0.1))
    runner = CliRunner()
    result = runner.invoke(app, ["report", str(run), "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tail"]["max"] == pytest.approx(0.1, rel=1e-5)
    assert (tmp_path / "out" / "report.html").exists()
    missing = runner.invoke(app, ["report", str(run), "--step", "99", "--out", str(tmp_path)])
    assert missing.exit_code == 2
    assert "no dump of step 99" in " ".join(missing.stderr.split())
    assert runner.invoke(app, ["report", str(tmp_path / "nothing")]).exit_code == 2


def test_no_table_of_the_command_has_an_empty_row_of_heads(tmp_path):
    run = write_dumps(write_run(tmp_path / "run", rollout="stock", steps=4), offset(0.05))
    shown = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "out")]).stdout
    assert "statistic" in shown
    assert not [line for line in shown.splitlines() if line.startswith("┃") and not line.replace("┃", "").strip()]
