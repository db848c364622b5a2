"""docs/scaling.md holds what the command prints, and its text the figures of its tables."""

import pytest

from verl_tim.planning.gpu import DEFAULT_GPU, find_gpu
from verl_tim.planning.scaling import GPU_COUNTS, forecasts, markdown


@pytest.fixture(scope="module")
def rows():
    return forecasts(find_gpu(DEFAULT_GPU))


def test_the_page_holds_the_tables(rows, pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert markdown(rows) in page


def test_every_case_is_there_and_fits(rows):
    assert len(rows) == 2 * 2 * len(GPU_COUNTS)
    assert all(row.plan.memory.fits for row in rows)
    for row in rows:
        assert row.plan.memory.settings.gpus == row.gpus


def test_what_the_text_says_of_the_tables(rows):
    def row(name, gpus, grown):
        return next(one for one in rows if name in one.case.name and one.gpus == gpus and one.grown == grown)

    small, large = row("1.7B", 512, False), row("30B", 512, False)
    assert small.plan.step.rollout.at_once == 8
    assert (round(small.plan.step.rollout.seconds), round(large.plan.step.rollout.seconds)) == (16, 195)
    wide, widest = row("1.7B", 512, True), row("30B", 512, True)
    assert (round(wide.seconds("verl's own work")), round(wide.plan.step.seconds)) == (64, 111)
    assert (round(widest.seconds("verl's own work")), round(widest.plan.step.seconds)) == (128, 773)
    assert small.seconds("weight sync") / small.plan.step.seconds == pytest.approx(0.03, abs=0.005)
    assert small.plan.step.update.network >= small.plan.step.update.arithmetic
    assert wide.plan.step.update.network < wide.plan.step.update.arithmetic


def test_more_gpus_take_less_time_and_use_it_worse(rows):
    for name in {row.case.name for row in rows}:
        fixed = [row for row in rows if row.case.name == name and not row.grown]
        seconds = [row.plan.step.seconds for row in fixed]
        speed = [row.tokens_per_gpu_second for row in fixed]
        assert seconds == sorted(seconds, reverse=True)
        assert speed == sorted(speed, reverse=True)
        grown = {row.gpus: row for row in rows if row.case.name == name and row.grown}
        assert grown[64].plan.step.seconds == pytest.approx(fixed[1].plan.step.seconds)
