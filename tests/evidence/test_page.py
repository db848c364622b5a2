"""The page, with and without figures, and the commands that make it."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from tests.docs.pages import DOCS
from tests.evidence.conftest import write_matrix
from verl_tim.cli import app
from verl_tim.evidence.page import render, write_page
from verl_tim.evidence.parts import PARTS, write_part
from verl_tim.evidence.runs import Evidence

ROOT = DOCS.parent
README = ROOT / "recipes" / "evidence" / "README.md"


@pytest.fixture(scope="module")
def evidence(runs):
    return Evidence.read(runs)


def call(*words):
    return CliRunner().invoke(app, ["evidence", *map(str, words)])


def test_without_runs_it_says_that_nothing_was_measured():
    text = render(Evidence.read(None))
    assert "not yet measured on a GPU" in text
    assert ".png" not in text
    assert "## Time" not in text


def test_the_page_in_docs_is_what_the_command_writes():
    """Until there are figures; with figures the page needs the runs."""
    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    if "not yet measured on a GPU" in text:
        assert text == render(Evidence.read(None))
    else:
        assert re.search(r"\*\*State: \d+ of 60 runs finished\*\*", text)


def test_the_page_has_every_picture_and_table(evidence, tmp_path):
    page, *pictures = write_page(evidence, tmp_path)
    text = page.read_text()
    assert "10 of 60 runs finished" in text
    assert "Not measured: dense-reinforce, moe-grpo, moe-reinforce." in text
    linked = re.findall(r"\]\((evidence/[^)]+)\)", text)
    assert sorted(linked) == sorted(str(path.relative_to(tmp_path)) for path in pictures)
    assert {path.name for path in pictures} == {"curves-dense-grpo.png", "position-dense-grpo.png"}
    assert all(path.stat().st_size > 10_000 for path in pictures)
    for heading in ("Do the curves part?", "What corrections reject", "Thresholds", "Time"):
        assert heading in text
    assert "these settings differ" not in text


def test_a_setting_that_differs_is_said(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact"], seeds=[1], steps=5)
    from tests.diagnosis.fake_runs import write_run

    folder = root / "dense-grpo-vllm_recompute-data.seed=1"
    write_run(folder, rollout="vllm", steps=5, config={"actor_rollout_ref.actor.optim.lr": 1e-2})
    text = render(Evidence.read(root))
    assert "`actor_rollout_ref.actor.optim.lr`" in text


def test_a_command_for_each_part(evidence, runs, tmp_path):
    commands = README.read_text()
    for name in PARTS:
        assert write_part(name, evidence, tmp_path / name), name
        assert f"evidence figure {name} " in commands, "the recipe's README has the command"
    for name, written in (("position", "position-dense-grpo.png"), ("tail", "tail.md")):
        result = call("figure", name, runs, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "out" / written).read_bytes() == (tmp_path / name / written).read_bytes()


def test_pack_and_unpack_and_what_cannot_be(runs, tmp_path):
    packed = call("pack", runs, "--out", tmp_path / "a", "--only", "*-vexact-*", "--used", "--json")
    assert packed.exit_code == 0, packed.output
    found = json.loads(packed.stdout)
    assert len(found["runs"]) == 2
    archives = list(found["files"])
    assert call("unpack", *archives, "--out", tmp_path / "b").exit_code == 0
    assert len(list((tmp_path / "b").iterdir())) == 2
    wrong = call("figure", "tial", runs)
    assert wrong.exit_code == 2
    assert "choose one of curves" in wrong.output
    assert call("pack", tmp_path / "nowhere").exit_code == 2


def test_the_commands_of_the_readme_exist():
    import typer.main

    from verl_tim.launch.matrix import matrix_of
    from verl_tim.launch.recipes import find_recipe

    known = typer.main.get_command(app)
    lines = re.findall(r"^ {4}(verl-tim (?:.*\\\n)*.*)$", README.read_text(), flags=re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(re.sub(r"\s+[#&>].*$", "", line.replace("\\\n", " ")))
        command = known.commands[words[1]]
        rest = words[2:]
        if hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert all(word.partition("=")[0] in options for word in rest if word.startswith("--")), line
        if words[1] == "train" and "+matrix=evidence" in words:
            recipe = next(word for word in rest if word.startswith("recipe=")).removeprefix("recipe=")
            given = [word for word in rest if "=" in word and not word.startswith(("-", "recipe="))]
            assert matrix_of(find_recipe(recipe), given).cells
