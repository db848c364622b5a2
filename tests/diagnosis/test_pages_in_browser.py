"""The pages in a real browser: every plot is drawn, nothing is wider than a phone, no script fails."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from fake_dumps import none, one_sign, write_dumps
from fake_runs import write_run

from verl_tim.diagnosis.calibrate import calibrate
from verl_tim.diagnosis.calibrate_page import render_calibration
from verl_tim.diagnosis.compare import compare
from verl_tim.diagnosis.page import render_page
from verl_tim.diagnosis.report import Report
from verl_tim.diagnosis.report_page import render_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")]

PHONE = 390
# Run inside the page: errors, plots placed and drawn, and what reaches beyond the right edge without scrolling.
WATCH = "<script>window.failed = []; window.onerror = (message) => failed.push(message);</script>"
PROBE = """<script>setTimeout(() => {
  const time = document.querySelector("[data-over=time]");
  if (time) time.click();
  document.getElementById("theme").click();
  const width = document.documentElement.clientWidth;
  const reaches = (e) => e.getBoundingClientRect().right > width + 1;
  const wide = [...document.querySelectorAll("main *")].filter((e) => reaches(e)
    && !e.closest(".scroll, details:not([open]), pre")).map((e) => e.outerHTML.slice(0, 80));
  window.probed = {failed, wide, placed: document.querySelectorAll(".plot").length,
    drawn: [...document.querySelectorAll(".plot")].filter((e) => e.querySelector(".main-svg")).length};
}, 2000)</script>
"""
FRAME = """<body style="margin:0">
<iframe id="page" src="page.html" style="width:{width}px;height:900px;border:0"></iframe>
<script>const wait = setInterval(() => {{
  const found = document.getElementById("page").contentWindow.probed;
  if (!found) return;
  clearInterval(wait);
  document.body.textContent = "RESULT" + JSON.stringify(found) + "END";
}}, 500)</script>"""


def probed(folder, page, width):
    """What PROBE finds in a page that is `width` pixels wide (a headless window itself is never below 500)."""
    folder.mkdir()
    head, body, tail = page.partition("<main>")
    (folder / "page.html").write_text(head + WATCH + body + tail.replace("</body>", PROBE + "</body>"))
    (folder / "frame.html").write_text(FRAME.format(width=width))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=90000",
        f"--window-size={width + 200},900",
    ]
    command += ["--dump-dom", f"file://{folder / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return json.loads(html.unescape(re.search(r"RESULT(.*)END", dom, re.DOTALL).group(1)))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    runs = [write_run(root / f"{r}-{s}", rollout=r, seed=s) for r in ("vexact", "stock") for s in (1, 2)]
    write_dumps(runs[2], one_sign(0.3, 0.02), steps=10, flips={1: 0.1})
    write_dumps(runs[0], none, steps=10)
    return {
        "compare": render_page(compare(runs)),
        "report": render_report(Report.read(runs[2])),
        "calibrate": render_calibration(calibrate(runs[2], runs[0], max_share=0.02)),
    }


@pytest.mark.parametrize("width", [PHONE, 1280])
@pytest.mark.parametrize("name", ["compare", "report", "calibrate"])
def test_a_page(pages, tmp_path, name, width):
    found = probed(tmp_path / "browser", pages[name], width)
    assert found["failed"] == []
    assert found["wide"] == []
    assert found["drawn"] == found["placed"] >= 2
