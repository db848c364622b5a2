"""The pages' script, run by Node.js with as much of a browser as it touches, with a mouse and without."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from fake_runs import write_run

from verl_tim.diagnosis.compare import compare
from verl_tim.diagnosis.page import render_page

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")

# `plots` of the page are those of its figures; a press on the button that names the time axis, and what was drawn.
BROWSER = """
const page = JSON.parse(require("fs").readFileSync(0, "utf8"));
const plots = Object.keys(JSON.parse(page.data).figures).map((figure) => ({ dataset: { figure } }));
const drawn = {}, clicks = {};
const button = (over) => ({ dataset: { over }, setAttribute() {},
  addEventListener(_, act) { clicks[over] = act; } });
const buttons = [button("steps"), button("time")];
globalThis.document = {
  documentElement: { dataset: {} },
  getElementById: (id) => ({ data: { textContent: page.data }, theme: { addEventListener() {} } })[id] || null,
  querySelectorAll: (what) => what === ".plot" ? plots : what === "[data-over]" ? buttons : [],
};
globalThis.getComputedStyle = () => ({ getPropertyValue: () => " #123456" });
globalThis.matchMedia = (what) => ({ matches: what.includes("pointer") ? page.mouse : false, addEventListener() {} });
globalThis.Plotly = { react: (element, traces, layout) => { drawn[element.dataset.figure] = { traces, layout }; } };
new Function(page.script)();
const steps = JSON.parse(JSON.stringify(drawn));
clicks.time();
process.stdout.write(JSON.stringify({ steps, time: drawn }));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [write_run(root / "vexact", steps=20), write_run(root / "stock", rollout="stock", steps=12)]
    return compare(runs), render_page(compare(runs))


def drawn(page, *, mouse):
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    given = json.dumps({"data": data, "script": script, "mouse": mouse})
    done = subprocess.run([NODE, "-e", BROWSER], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mouse", [True, False])
def test_a_mouse_drags_to_zoom_along_the_steps_and_a_finger_scrolls(page, mouse):
    """1,000 steps are more than a plot shows apart; on a touch screen a plot that takes the drag holds the page."""
    for figure in drawn(page[1], mouse=mouse)["steps"].values():
        layout = figure["layout"]
        assert layout["dragmode"] == ("zoom" if mouse else False)
        assert layout["xaxis"]["fixedrange"] is not mouse
        assert layout["yaxis"]["fixedrange"] is True


def test_over_time_each_run_stands_at_its_own_seconds(page):
    comparison, text = page
    found = drawn(text, mouse=False)
    for at, run in enumerate(comparison.runs):
        (steps,), (time,) = (
            [trace for trace in found[axis]["reward"]["traces"] if trace["meta"] == {"run": at, "role": "line"}]
            for axis in ("steps", "time")
        )
        seconds = run.seconds()
        assert time["x"] == pytest.approx([seconds[step] for step in steps["x"]])
        assert time["y"] == steps["y"]
    assert found["time"]["reward"]["layout"]["xaxis"]["title"]["text"] == "seconds"
