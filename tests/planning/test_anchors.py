"""Predicted over measured, within the stated bands: memory 10 %, times 25 %."""

import pytest

from verl_tim.planning import anchors as module
from verl_tim.planning.anchors import MEMORY_BAND, TIME_BAND, anchors
from verl_tim.planning.rates import table


@pytest.mark.parametrize("anchor", anchors(), ids=lambda anchor: anchor.what)
def test_within_its_band(anchor):
    assert anchor.band == (MEMORY_BAND if anchor.unit == "GiB" else TIME_BAND)
    assert anchor.ratio == pytest.approx(1, abs=0.01 if anchor.fitted else anchor.band)
    assert anchor.good


def test_the_bands_are_as_stated_and_most_figures_are_predictions():
    assert (MEMORY_BAND, TIME_BAND) == (0.10, 0.25)
    found = anchors()
    # contract: 3 steps, 3 peaks; stock: 3 steps; four rollouts of each engine
    assert sum(not anchor.fitted for anchor in found) == 17


def test_a_wrong_formula_leaves_its_band(monkeypatch):
    real = module._peak
    monkeypatch.setattr(module, "_peak", lambda row, settings: 1.2 * real(row, settings))
    assert sum(not anchor.good for anchor in anchors()) == 3


def test_every_rate_says_where_it_is_from():
    for name, entry in table().items():
        if isinstance(entry, dict):
            assert entry["source"], name
            assert "date" in entry or entry["kind"] == "assumed", name


def test_measured_figures_stand_in_the_benchmarks(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for engine in ("vexact", "vllm"):
        for row in table()["rollout"][engine]:
            assert f"{row['sequences'] * row['output'] / row['seconds']:,.0f}" in text, (engine, row)
    for side in ("contract", "stock"):
        for row in table()["trainer"][side]:
            assert f"{row['step']:.3f} s" in text, (side, row)
            assert f"{row['peak_gib']} GiB" in text, (side, row)
    for row in table()["sparse_layer"]["rows"]:
        assert f"{row['seconds'] * 1e6:.0f} us" in text, row


def test_the_page_on_planning_shows_them(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "planning.md").read_text(encoding="utf-8")
    for anchor in anchors():
        if anchor.fitted or "stock" in anchor.what:
            continue
        digits = {"s": ".3f", "GiB": ".1f", "tokens/s": ",.0f"}[anchor.unit]
        for value in (anchor.measured, anchor.predicted):
            assert f"{value:{digits}} {anchor.unit}" in text, (anchor.what, value)
