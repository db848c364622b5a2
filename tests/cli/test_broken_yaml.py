"""A YAML that cannot be read is told by file, line and what mends it, by every command that reads one."""

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app

RECIPE = "hydra: {searchpath: ['pkg://verl.trainer.config', 'pkg://verl_tim.configs']}\ndefaults:\n"
WHOLE = RECIPE + "  - ppo_trainer\n  - tim\n  - task: mine\n  - _self_\n"


@pytest.mark.parametrize(
    ("words", "file", "before"),
    [
        ("doctor mine.yaml", "mine.yaml", ""),
        ("doctor recipe=./mine.yaml", "mine.yaml", ""),
        ("doctor runs/a", "runs/a/config.yaml", ""),
        ("doctor --config-path . --config-name mine", "mine.yaml", ""),
        ("train --dry-run recipe=mine.yaml", "mine.yaml", RECIPE),
        ("train --dry-run recipe=mine.yaml", "task/mine.yaml", "# @package _global_\n"),
        ("doctor recipe=mine.yaml", "task/mine.yaml", "# @package _global_\n"),
        ("verify runs/a", "runs/a/config.yaml", ""),
        ("probe --settings mine.yaml", "mine.yaml", ""),
    ],
)
@pytest.mark.parametrize(
    ("content", "line", "remedy"),
    [
        ("data:\n  seed: 1\n   shuffle: true\n", 3, "indentation"),
        ("data:\n\tseed: 1\n", 2, "no tabs"),
        ("data: {seed: 1}\ntrainer: [a\ntim: {}\n", 3, "brackets"),
        ("prompt: |\n  a\ntext: it's: so\n", 3, "quotes"),
        ("data: \x00\n", None, "UTF-8"),
        ("data: \udcff\n", None, "UTF-8"),
    ],
    ids=["indentation", "tab", "bracket", "colon", "zero", "no text"],
)
def test_a_broken_file_is_told_by_file_line_and_remedy(
    words, file, before, content, line, remedy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a", "task"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text(WHOLE)
    (tmp_path / file).write_text(before + content, errors="surrogateescape")
    result = CliRunner().invoke(app, words.split())
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2, told
    problem, _, mends = told.rpartition(" -> ")
    # Python's decoder does not say in which of a recipe's files the byte is
    assert (file if "is not text" not in problem else "mine.yaml") in mends
    assert remedy in mends
    assert "<unicode string>" not in told
    if line is not None:
        line += before.count("\n")
        assert f"{file}, line {line}," in problem
        assert f"line {line}:" in mends


@pytest.mark.parametrize("words", ["doctor mine.yaml", "train --dry-run recipe=mine.yaml"])
def test_a_key_that_stands_twice(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("data: {seed: 1}\ntrainer: {}\ndata: {seed: 2}\n")
    result = CliRunner().invoke(app, words.split())
    told = " ".join(result.stderr.split())
    assert "duplicate key data" in told
    assert "mine.yaml, line 3, column 1; begun in line 1" in told
    assert "mine.yaml, line 3: keep one of the two" in told
