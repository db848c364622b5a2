"""A command that works for minutes shows it: a bar on a terminal, lines in a log file."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import progress, verify
from verl_tim.commands.progress import RunProgress, Work
from verl_tim.commands.several import RunsProgress, runs_table
from verl_tim.diagnosis.gate import GateError, Rung, ScenarioResult
from verl_tim.launch.process import Step
from verl_tim.launch.side_by_side import RunState, State

runner = CliRunner()


@pytest.fixture
def clock(monkeypatch):
    """A time that stands still unless it is told to go on."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def work_through(clock):
    with Work("label [x]", 3) as work:
        work.doing("first")
        work.ended("first: passed")
        work.advance()
        work.advance()
        clock[0] += 31
        work.advance()


def test_lines_where_there_is_no_terminal(capsys, clock):
    work_through(clock)
    out, err = capsys.readouterr()
    assert out == ""
    # what is small has a line now and then
    assert err.splitlines() == ["label [x]", "label [x]: first: passed", "label [x]: 3 of 3"]


def test_a_bar_and_no_lines_on_a_terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=shown, force_terminal=True, width=100))
    with Work("label", 3) as work:
        work.doing("first")
        work.ended("first: passed")
        work.advance()
    assert "label: first" in shown.getvalue()
    assert "1/3" in shown.getvalue()
    assert "passed" not in shown.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_server_that_died_meanwhile_is_told_of(terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    with RunProgress(console, "run", 3) as steps:
        for number, restarts in ((1, 0.0), (2, 1.0), (3, 0.0)):
            steps.on_step(Step(number, {"critic/score/mean": 0.5, "tim/rollout_restarts": restarts}))
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert said.count("a rollout server died and was started again (1 in this step)") == 1
    assert "step 2: a rollout server died" in said


def test_a_ladder_has_a_line_per_scenario_as_it_begins_and_as_it_ends(capsys):
    said = []

    def scenario(name):
        said.append(capsys.readouterr().err)
        if name == "third":
            raise GateError("nothing to compare")
        return ScenarioResult(name, exact=False, error=None if name == "first" else "a differing bit", seconds=1.25)

    names = ("first", "second", "third")
    rungs = [Rung("rung", [(name, lambda name=name: scenario(name)) for name in names])]
    with Work("model, bfloat16") as work:
        verify.climb_showing(rungs, work)
    assert said[0].splitlines() == ["model, bfloat16", "model, bfloat16: scenario 1 of 3: rung, first"]
    # nothing was compared in the first, so it fails too: what stands there is the result's own word
    assert [line for text in said[1:] for line in text.splitlines()] == [
        "model, bfloat16: rung, first: FAILED, 1.2 s",
        "model, bfloat16: scenario 2 of 3: rung, second",
        "model, bfloat16: rung, second: FAILED, 1.2 s",
        "model, bfloat16: scenario 3 of 3: rung, third",
    ]
    assert capsys.readouterr().err == "model, bfloat16: rung, third: FAILED, 0.0 s\n"


def test_on_a_terminal_the_bar_names_the_scenario_that_runs(monkeypatch):
    shown, seen = io.StringIO(), []
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=shown, force_terminal=True, width=100))
    with Work("model") as work:

        def scenario(name):
            seen.append(work._bar.tasks[0].description)
            return ScenarioResult(name, exact=False)

        verify.climb_showing([Rung("rung", [(name, lambda name=name: scenario(name)) for name in ("a", "b")])], work)
    assert seen == ["model: rung, a", "model: rung, b"]
    assert "scenario 1 of 2" not in shown.getvalue()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("bench correction --rows 2 --tokens 8 --repeats 1 --preset token_tis", "bench correction: token_tis, "),
        ("bench diagnosis --rows 2 --tokens 8 --repeats 1 --mini-batches 1 --layers 0", "bench diagnosis"),
        ("bench routing --layers 1 --experts 4 --top-k 2 --tokens 8 --sequences 2 --repeats 1", "bench routing"),
    ],
)
def test_benchmarks_show_that_they_are_at_work(words, line):
    result = runner.invoke(app, [*words.split(), "--json"])
    assert result.exit_code == 0, result.output
    assert line in result.stderr
    assert result.stdout.startswith("{")


def run_through(console, clock):
    with RunProgress(console, "run [x]", 2) as shown:
        shown.on_start("loading verl")
        clock[0] += 12.4
        shown.on_start("starting Ray")
        shown.on_step(Step(1, {"critic/score/mean": 0.5}))


def test_a_start_has_lines_with_seconds_where_there_is_no_terminal(clock):
    shown = io.StringIO()
    run_through(Console(file=shown, width=200), clock)
    assert shown.getvalue().splitlines()[:2] == [
        "run [x]: start, 0 s: loading verl",
        "run [x]: start, 12 s: starting Ray",
    ]


def test_a_start_on_a_terminal_is_in_the_live_line(clock):
    shown = io.StringIO()
    run_through(Console(file=shown, force_terminal=True, width=200), clock)
    assert "start," not in shown.getvalue()
    assert "starting Ray" in shown.getvalue()
    assert "reward 0.5" in shown.getvalue()


STEPS = (
    Step(0, {"val-core/chain_sum/reward/mean@1": 0.25}),
    Step(1, {"critic/score/mean": 0.5}),
    Step(2, {"critic/score/mean": 0.625, "val-core/chain_sum/reward/mean@1": 0.75}),
    Step(3, {"critic/score/mean": 0.5}),
)


def steps_through(console, *steps):
    with RunProgress(console, "run", 3) as shown:
        for step in steps:
            shown.on_step(step)


def test_a_validation_stands_on_the_line_of_its_own_step():
    shown = io.StringIO()
    steps_through(Console(file=shown, width=200), *STEPS)
    assert shown.getvalue().splitlines() == [
        "run: step 0/3  validation 0.25",
        "run: step 1/3  reward 0.5",
        "run: step 2/3  reward 0.625, validation 0.75",
        "run: step 3/3  reward 0.5",
    ]


@pytest.mark.parametrize(
    ("count", "last"),
    [(2, "reward 0.5, validation 0.25 at step 0"), (3, "reward 0.625, validation 0.75")],
)
def test_the_one_line_of_a_terminal_says_at_which_step_the_last_validation_was(count, last):
    shown = io.StringIO()
    steps_through(Console(file=shown, force_terminal=True, width=200), *STEPS[:count])
    final = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).replace("\r", "\n").rstrip().splitlines()[-1]
    assert final.rstrip().endswith(last)


def test_of_several_runs_each_says_how_far_its_start_is():
    state = RunState("one", Path("one"), State.RUNNING, 0, 12, stage="starting Ray")
    shown = io.StringIO()
    with RunsProgress(Console(file=shown, width=200)) as progress:
        progress.on_change([state])
        progress.on_change([replace(state, steps=1, stage="")])
    assert shown.getvalue().splitlines() == ["one: running  step 0/12  starting Ray"]
    Console(file=shown, width=200).print(runs_table([state]))
    assert "running: starting Ray" in shown.getvalue()
