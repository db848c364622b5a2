"""Ctrl-C before anything is started: one line, exit code 130."""

import json

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.launch import start

runner = CliRunner()
LINE = "stopped before anything was started"


@pytest.mark.parametrize(
    "words",
    [
        "train recipe=cpu_grpo",
        "train -m recipe=cpu_grpo data.seed=1,2",
        "train -m recipe=cpu_grpo data.seed=1,2 --at-once 2",
        "quickstart",
    ],
)
def test_it_is_one_line(words, monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "make_ready", interrupt)
    folder = ["--dir", f"{tmp_path}/quick"] if words == "quickstart" else [f"tim.run_dir={tmp_path}/run"]
    result = runner.invoke(app, [*words.split(), *folder])
    assert result.exit_code == 130
    assert result.stderr.splitlines().count(LINE) == 1
    assert list(tmp_path.iterdir()) == []
    told = runner.invoke(app, [*words.split(), *folder, "--json"])
    assert told.exit_code == 130
    assert json.loads(told.stdout)
    assert told.stderr.splitlines().count(LINE) == 1


def test_a_file_for_a_scheduler_too(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("verl_tim.launchers.job.composed", interrupt)
    result = runner.invoke(app, ["launch", "slurm", "recipe=cpu_grpo"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert LINE in result.stderr
