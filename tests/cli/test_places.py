"""Where commands that read runs write, unless told."""

from pathlib import Path

import pytest

from verl_tim.commands.places import beside


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs beside each other; the current folder is the first."""
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
        (tmp_path / "runs" / f"{name}.jsonl").touch()
    monkeypatch.chdir(tmp_path / "runs" / "a")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "given",
    [
        (".", "../b"),
        ("../../runs/a", "../b"),
        ("metrics.jsonl",),
        ("metrics.jsonl", "../b/metrics.jsonl"),
        ("metrics.jsonl", "../b"),
        # verl's own file logger has one file per run in a folder
        ("../a.jsonl", "../b.jsonl"),
    ],
)
def test_beside_the_runs_is_the_folder_that_holds_them(runs, given):
    assert beside([Path(path) for path in given]) == runs


def test_of_runs_that_lie_apart_it_is_the_current_folder(runs):
    assert beside([Path("."), Path("../..")]) == runs / "a"
