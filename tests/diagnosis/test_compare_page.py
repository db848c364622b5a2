"""The page: one offline file, nothing injected, every plot fed, zeros shown as zeros."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest
from fake_runs import write_run

from verl_tim.diagnosis.compare import Options, compare
from verl_tim.diagnosis.curves import PLOTS
from verl_tim.diagnosis.figures import build_sections, draw, run_colors, zero_row
from verl_tim.diagnosis.page import render_page, sample_rows
from verl_tim.diagnosis.run_folder import RunFolder, Sample
from verl_tim.diagnosis.smoothing import Smoothing

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
VOID = {"meta", "br", "img", "input", "link", "hr", "wbr"}


class Page(HTMLParser):
    """Parses a page; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.scripts, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif data.strip() and self.open[-1] != "style":
            self.words.append(" ".join(data.split()))

    @property
    def text(self):
        return " ".join(self.words)

    def of(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]

    def data(self):
        (data,) = [s for s in self.scripts if s.startswith('{"figures"')]
        return json.loads(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / "vexact"),
        write_run(root / "stock", rollout="stock"),
        write_run(root / "longer", rollout="stock", correction="bypass_ppo", steps=50, drop=("actor/entropy",)),
    ]


@pytest.fixture(scope="module")
def pair_page(runs):
    return Page(render_page(compare(runs[:2])))


def test_needs_no_network_and_holds_plotly_once(pair_page):
    assert not [
        attrs
        for tag in ("script", "link", "img", "iframe")
        for attrs in pair_page.of(tag)
        if attrs.get("src") or attrs.get("href")
    ]
    assert len([script for script in pair_page.scripts if len(script) > 1_000_000]) == 1
    assert "plotly.js v" in pair_page.scripts[0][:400]


def test_the_head_says_what_the_runs_show_and_what_differs(pair_page, runs):
    text = pair_page.text
    assert compare(runs[:2]).verdict.lead in text
    assert "as is expected at this size (612 K parameters, 30 steps); the mismatch shows in the log-probs" in text
    assert "Nothing but the rollout differs between the runs" in text
    assert text.index("What differs besides the rollout") < text.index("Learning") < text.index("Summary")
    differing = Page(render_page(compare(runs))).text
    assert "other settings besides the rollout" in differing
    assert "Nothing but the rollout differs between the runs" not in differing


def test_every_plot_has_its_figure_and_the_required_ones_are_there(pair_page):
    placed = [attrs["data-figure"] for attrs in pair_page.of("div") if "data-figure" in attrs]
    assert len(placed) == len(set(placed))
    assert set(placed) == pair_page.data()["figures"].keys()
    assert {
        "reward",
        "validation",
        "mismatch",
        "exact_fraction",
        "grad_norm",
        "entropy",
        "response_length",
        "step_time",
    } <= set(placed)


def test_each_run_keeps_its_colour_everywhere(runs):
    data = Page(render_page(compare(runs))).data()
    for figure in data["figures"].values():
        for trace in figure["data"]:
            assert trace["line"]["color"] == run_colors(trace["meta"]["run"])[0]
    assert len({run_colors(at) for at in range(8)}) == 8


def test_runs_of_different_length_share_one_step_axis(runs):
    figures = Page(render_page(compare(runs))).data()["figures"]
    assert {tuple(figure["layout"]["xaxis"]["range"]) for figure in figures.values()} == {(-1.0, 51.0)}
    by_run = {trace["meta"]["run"]: trace["x"] for trace in figures["grad_norm"]["data"]}
    assert by_run[0][-1] == 30
    assert by_run[2][-1] == 50


def test_a_metric_that_one_run_lacks_is_said_so(runs):
    comparison = compare(runs)
    page = Page(render_page(comparison))
    entropy = page.data()["figures"]["entropy"]
    assert {trace["meta"]["run"] for trace in entropy["data"]} == {0, 1}
    legend = next(d for s in build_sections(comparison.groups) for d in s.drawings if d.plot.id == "entropy").legend
    assert [bool(entry.last) for entry in legend] == [True, True, False]
    assert "not logged" in page.text


def test_plots_nobody_logged_are_named_and_not_drawn(tmp_path):
    page = Page(render_page(compare([write_run(tmp_path / "run", drop=("tim/",))])))
    assert not {"mismatch", "exact_fraction"} & page.data()["figures"].keys()
    assert "top-1 flips" not in page.data()["figures"]
    assert "mismatch not measured" in page.text


def test_exact_zeros_have_a_row_of_their_own_on_the_log_axis(pair_page):
    figure = pair_page.data()["figures"]["mismatch"]
    axis = figure["layout"]["yaxis"]
    assert axis["type"] == "log"
    row = axis["tickvals"][0]
    assert axis["ticktext"][0] == "0"
    exact = [trace for trace in figure["data"] if trace["meta"]["run"] == 0]
    assert len(exact) == 3
    for trace in exact:
        assert set(trace["y"]) == {row}
        assert set(trace["text"]) == {"0"}
    rest = [y for trace in figure["data"] if trace["meta"]["run"] == 1 for y in trace["y"]]
    assert min(rest) >= 10 * row
    assert axis["range"][0] < math.log10(row)
    assert [shape["name"] for shape in figure["layout"]["shapes"]] == ["band", "zero"]


def test_zero_row():
    assert zero_row([0.0, 2e-3, 0.1]) == pytest.approx(1e-4)
    assert zero_row([2e-3, 0.1]) is None
    assert zero_row([0.0, 0.0]) is None


def test_all_exact_runs_are_drawn_on_a_plain_zero(tmp_path):
    figure = Page(render_page(compare([write_run(tmp_path / "vexact")]))).data()["figures"]["mismatch"]
    assert figure["layout"]["yaxis"].get("type") != "log"
    assert figure["layout"]["yaxis"]["ticktext"] == ["0"]
    assert {y for trace in figure["data"] for y in trace["y"]} == {0.0}


def test_nothing_from_a_run_becomes_markup(tmp_path):
    path = write_run(tmp_path / "run", steps=2, samples=False, config={"data.note": HOSTILE})
    RunFolder(path).add_samples([Sample(step=1, prompt=HOSTILE, response=HOSTILE, reward=0.0, ground_truth=HOSTILE)])
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "data": {f"val-core/{HOSTILE}/reward/mean@1": 0.5}}) + "\n")
    other = write_run(tmp_path / "other", steps=2)
    text = render_page(compare([path, other], names=[HOSTILE, "other"]))
    page = Page(text)
    assert len(page.of("script")) == 3
    assert not page.of("img")
    assert HOSTILE in page.text
    assert "<script>alert" not in text.replace("\\u003c", "<").split('id="data"')[0]


def test_one_run_is_a_report_without_a_comparison(tmp_path):
    page = Page(render_page(compare([write_run(tmp_path / "vexact")])))
    assert "What differs besides the rollout" not in page.text
    assert page.text.startswith("vexact — verl-tim verl-tim report")


def test_many_runs_render(tmp_path):
    paths = [write_run(tmp_path / f"run{i}", rollout="stock", steps=12, delta=1e-3 * (i + 1)) for i in range(10)]
    page = Page(render_page(compare(paths)))
    assert len([attrs for attrs in page.of("article") if "run" in attrs.get("class", "").split()]) == 10


def test_a_run_without_a_step_still_renders(tmp_path):
    empty = write_run(tmp_path / "empty")
    (empty / "metrics.jsonl").write_text("")
    page = Page(render_page(compare([empty, write_run(tmp_path / "vexact")])))
    assert "Rewards cannot be compared" in page.text


def test_all_metrics_are_listed(pair_page, runs):
    names = set(compare(runs[:2]).to_dict()["runs"][1]["metrics"])
    text = re.sub(r"\s+", "", pair_page.text)
    assert all(name in text for name in names)


def test_samples_stand_side_by_side(runs):
    rows = sample_rows(compare(runs[:2]).runs)
    assert sorted({row.step for row in rows}) == [1, 15, 30]
    assert all(len(row.responses) == 2 and all(row.responses) for row in rows)
    lone = sample_rows(compare(runs).runs)
    assert all(row.responses[0].prompt == row.prompt for row in lone)


def test_a_prompt_that_one_run_lacks_has_a_gap(tmp_path):
    one, two = (RunFolder(write_run(tmp_path / name, steps=2, samples=False)) for name in ("one", "two"))
    one.add_samples([Sample(step=1, prompt="a", response="x")])
    two.add_samples([Sample(step=2, prompt="b", response="y", reward=0.5)])
    comparison = compare([one.path, two.path])
    assert [[bool(r) for r in row.responses] for row in sample_rows(comparison.runs)] == [[True, False], [False, True]]
    assert "no sample of this prompt" in Page(render_page(comparison)).text


def test_several_validation_sets_have_a_plot_each(tmp_path):
    path = write_run(tmp_path / "run", steps=6)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["data"]["val-core/gsm_symbolic/acc/mean@4"] = 0.1
        line["data"]["val-core/gsm_symbolic/acc/best@4/mean"] = 0.3
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(render_page(compare([path])))
    assert {"validation", "validation_1"} <= page.data()["figures"].keys()
    assert "Validation: chain_sum" in page.text
    assert "Validation: gsm_symbolic" in page.text


def test_short_runs_have_whole_steps(tmp_path, pair_page):
    page = Page(render_page(compare([write_run(tmp_path / "run", steps=3)])))
    figure = page.data()["figures"]["reward"]
    assert figure["layout"]["xaxis"]["dtick"] == 1
    assert "dtick" not in pair_page.data()["figures"]["reward"]["layout"]["xaxis"]


def test_smoothing_is_off_by_default_and_stated_on_every_plot(runs, pair_page):
    assert {t["meta"]["role"] for f in pair_page.data()["figures"].values() for t in f["data"]} <= {"line", "band"}
    assert "Bold:" not in pair_page.text
    page = Page(render_page(compare(runs[:2], options=Options(smoothing=Smoothing.parse("ema:0.5")))))
    figures = page.data()["figures"]
    for figure in figures.values():
        assert any(trace["meta"]["role"] == "smooth" for trace in figure["data"])
    assert page.text.count("Bold: exponential mean, weight 0.5 over the faint values.") == len(figures)
    raw, smooth = (
        next(t["y"] for t in figures["reward"]["data"] if t["meta"] == {"run": 0, "role": role})
        for role in ("line", "smooth")
    )
    assert smooth[1] == pytest.approx((raw[0] * 0.5 + raw[1]) / 1.5)


def test_draw_is_none_without_data(runs):
    from verl_tim.diagnosis.curves import Line, Plot

    assert draw(Plot("x", "X", (Line(("nothing",)),)), compare(runs[:1]).groups) is None


def test_size_is_sane(runs):
    assert len(render_page(compare(runs))) < 6_500_000


def test_runs_that_call_one_thing_by_different_names_share_its_plot(tmp_path):
    """A run that leaves the pass for the old log-probs out has no `actor/entropy`, and the update's instead."""
    paths = [write_run(tmp_path / "vexact"), write_run(tmp_path / "stock", rollout="stock")]
    file = paths[1] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"actor/entropy"', '"actor/entropy_loss"'))
    comparison = compare(paths)
    drawing = draw(next(p for _, plots in PLOTS for p in plots if p.id == "entropy"), comparison.groups)
    assert [trace.meta["run"] for trace in drawing.figure.data] == [0, 1]
    assert all(entry.last for entry in drawing.legend)
    assert drawing.metrics == ["actor/entropy", "actor/entropy_loss"]
