"""The page and the commands that make it."""

import json
import re
import shlex

import pytest
from matplotlib.text import Text
from typer.testing import CliRunner

from tests.diagnosis.fake_dumps import none, one_sign, write_dumps
from tests.docs.pages import DOCS
from tests.evidence.conftest import write_matrix
from verl_tim.cli import app
from verl_tim.evidence.figures import PICTURES
from verl_tim.evidence.page import render, write_page
from verl_tim.evidence.parts import PARTS, parts_of_page, write_part
from verl_tim.evidence.runs import Evidence

ROOT = DOCS.parent
README = ROOT / "recipes" / "evidence" / "README.md"


@pytest.fixture(scope="module")
def evidence(runs):
    return Evidence.read(runs)


def call(*words):
    return CliRunner().invoke(app, ["evidence", *map(str, words)])


def test_a_page_of_no_runs_replaces_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "evidence.md").write_text("State: 48 of 60")
    result = call("page")
    assert result.exit_code == 2
    assert "runs/evidence is no folder" in " ".join(result.stderr.split())
    assert (tmp_path / "docs" / "evidence.md").read_text() == "State: 48 of 60"


def test_the_page_of_runs_where_unpack_puts_them(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "evidence").symlink_to(runs)
    assert call("page").exit_code == 0
    assert "10 of 60 runs finished" in (tmp_path / "docs" / "evidence.md").read_text()


def test_the_page_in_docs_is_one_that_the_command_wrote():
    assert re.search(r"\*\*State: \d+ of 60 runs finished\*\*", (DOCS / "evidence.md").read_text(encoding="utf-8"))


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


def test_the_steps_are_those_of_the_runs(evidence, tmp_path):
    (asked,) = {progress.total for progress in evidence.progress.values()}
    assert f"8 answers, {asked} steps, seeds" in render(evidence)
    root = write_matrix(tmp_path, variants=["vexact"], seeds=[1], steps=5)
    write_matrix(tmp_path, variants=["vexact"], seeds=[2], steps=7)
    assert "8 answers, 5 or 7 steps, seeds" in render(Evidence.read(root))


def test_a_setting_that_differs_is_said(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact"], seeds=[1], steps=5)
    from tests.diagnosis.fake_runs import write_run

    folder = root / "dense-grpo-vllm_recompute-data.seed=1"
    write_run(folder, rollout="vllm", steps=5, config={"actor_rollout_ref.actor.optim.lr": 1e-2})
    text = render(Evidence.read(root))
    assert "`actor_rollout_ref.actor.optim.lr`" in text


def test_a_variant_that_was_not_run_is_named(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact", "vllm_tis"], seeds=[1], steps=5)
    text = render(Evidence.read(root))
    assert "| dense-grpo | vexact 1, vllm_tis 1; not run: vllm_recompute, vllm_bypass, vllm_invariant |" in text


def test_a_rehearsal_is_not_taken_for_the_runs_that_the_page_describes(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact"], seeds=[1], steps=5)
    from tests.diagnosis.fake_runs import write_run

    folder = root / "dense-grpo-vllm_recompute-data.seed=1"
    changes = {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 8, "tim.choices.task": "chain_sum"}
    write_run(folder, rollout="vllm", steps=5, config=changes)
    text = render(Evidence.read(root))
    (line,) = (line for line in text.splitlines() if line.startswith("**Not the runs that are described above**"))
    assert "dense-grpo with `data.train_batch_size` 8, not 32" in line
    assert "dense-grpo with `task=chain_sum`" in line
    assert "rollout.n" not in line, "as the recipe has it"


@pytest.fixture
def two(tmp_path):
    """A pair of two variants and two seeds, 30 steps."""
    return write_matrix(tmp_path / "runs", variants=["vexact", "vllm_recompute"], steps=30)


def edit(folder, change):
    """Change each metrics line in place."""
    path = folder / "metrics.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in entries:
        change(entry)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_a_run_that_ended_early_is_said_with_its_cause(two):
    assert "Ended early" not in render(Evidence.read(two))
    for seed, step, attempt in ((1, 12, {"exit_code": 130}), (2, 21, {"exit_code": 1, "cause": ["GateError: stop"]})):
        folder = two / f"dense-grpo-vllm_recompute-data.seed={seed}"
        path = folder / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: step + 1]))
        (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "seconds": 1.0, **attempt}) + "\n")
    text = render(Evidence.read(two))
    assert "2 of 60 runs finished" in text
    assert "`dense-grpo-vllm_recompute-data.seed=1` at step 12 of 30 (stopped)" in text
    assert "`dense-grpo-vllm_recompute-data.seed=2` at step 21 of 30 (GateError: stop)" in text
    assert "12 steps that all its runs" in text, "no forecast from what is left of two seeds"


def test_runs_of_two_variants_that_are_one_are_said(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact", "vllm_recompute", "vllm_invariant"], steps=5)
    assert "Runs that are one" not in render(Evidence.read(root)), "their times are not what tells them apart"
    first, second = (root / f"dense-grpo-{variant}-data.seed=2" for variant in ("vllm_recompute", "vllm_invariant"))
    lines = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (second / "metrics.jsonl").write_text("".join(lines[:-1]))
    edit(second, lambda entry: entry["data"].update({"timing_s/step": 1.5}))
    text = render(Evidence.read(root))
    steps = json.loads(lines[-2])["step"]
    assert re.search(
        rf"dense-grpo, seed 2: `vllm_recompute` and `vllm_invariant` \({steps} steps, [\d,]+ values\)\.\n", text
    )
    assert "seed 1: `vllm" not in text
    assert "the mode changed no bit" in text

    def change(entry):
        if entry["step"] == 3:
            entry["data"]["actor/grad_norm"] = None

    edit(second, change)
    assert "Runs that are one" not in render(Evidence.read(root)), "one value that only one of them has"


def test_values_that_are_not_finite_are_said(two):
    def change(entry):
        if entry["step"] > 25:
            entry["data"] |= {"critic/score/mean": None, "actor/lr": None}

    edit(two / "dense-grpo-vllm_recompute-data.seed=2", change)
    text = render(Evidence.read(two))
    assert "`dense-grpo-vllm_recompute-data.seed=2` `critic/score/mean` at 5 steps, first at 26" in text
    assert "actor/lr" not in text, "no figure reads it"


def test_what_could_not_be_compared_is_said(two):
    (two / "dense-grpo-vllm_recompute-data.seed=1" / "manifest.json").unlink()
    text = render(Evidence.read(two))
    assert "No manifest in dense-grpo-vllm_recompute-data.seed=1" in text


def test_damaged_dumps_take_the_place_of_what_they_would_have_shown(two):
    for variant in ("vexact", "vllm_recompute"):
        for path in (two / f"dense-grpo-{variant}-data.seed=1" / "tokens").iterdir():
            path.write_bytes(path.read_bytes()[:300])
    text = render(Evidence.read(two))
    assert text.count("step_000001.parquet cannot be read") == 4, "forecast, lengths, corrections, thresholds"
    assert str(two) not in text
    assert "name the steps to read" not in text, "the page has no --step"
    (note,) = (line for line in text.splitlines() if "the pull of the advantages is not known" in line)
    assert "dense-grpo-vexact-data.seed=1/tokens/step_000001.parquet cannot be read" in note, "which run it is"


def test_runs_too_small_for_thresholds_are_said_without_the_options_of_calibrate(two):
    for variant in ("vexact", "vllm_recompute"):
        write_dumps(two / f"dense-grpo-{variant}-data.seed=1", one_sign(0.3, 0.05), seed=1, steps=2, prompts=2)
    (note,) = (line for line in render(Evidence.read(two)).splitlines() if "dumped sequences with" in line)
    assert note.startswith("dense-grpo: dense-grpo-vllm_recompute-data.seed=1 has ")
    assert "--max-share" not in note


def test_advantages_of_one_sign_name_the_run(two):
    write_dumps(two / "dense-grpo-vexact-data.seed=1", none, seed=1, steps=2, prompts=1, per_prompt=1)
    told = "the pull of the advantages is not known: dense-grpo-vexact-data.seed=1: advantages of one sign only"
    assert f"dense-grpo: {told}" in render(Evidence.read(two))


def test_damaged_metrics_are_told_as_compare_tells_them(two):
    path = two / "dense-grpo-vexact-data.seed=1" / "metrics.jsonl"
    path.write_text('{"step": 1, "da\n' + path.read_text())
    result = call("page", two, "--out", two / "out")
    assert result.exit_code == 2
    assert "metrics.jsonl:1 is not JSON" in " ".join(result.stderr.split())


def test_the_steps_of_the_page_in_docs_are_those_of_the_recipes():
    from omegaconf import OmegaConf

    from verl_tim.evidence.page import RECIPES

    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    for name in RECIPES:
        steps = OmegaConf.load(ROOT / "recipes" / name / f"{name}.yaml").trainer.total_training_steps
        assert f"8 answers, {steps} steps, seeds 1, 2, 3" in text


def test_the_sizes_of_the_page_are_those_of_the_models(evidence):
    import torch
    from omegaconf import OmegaConf

    from verl_tim.tasks.architectures import init_model, resolve_shape

    text = render(evidence)
    for name, said in (("evidence_qwen3", "25.4 M"), ("evidence_qwen3_moe", "42.8 M")):
        model = OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml").tim.model
        shape = resolve_shape(model.kind, OmegaConf.to_container(model.shape))
        with torch.device("meta"):
            made = init_model(model.kind, shape, eos_token_id=0, pad_token_id=1, seed=0)
        assert f"{made.num_parameters() / 1e6:.1f} M" == said
        assert said in text


def test_places_that_cannot_be_written_name_the_option(runs, tmp_path):
    (tmp_path / "file").write_text("x")
    for words in (["page", runs], ["figure", "tail", runs], ["pack", runs, "--dump-steps", "0"]):
        result = call(*words, "--out", tmp_path / "file" / "out")
        assert result.exit_code == 2, result.output
        assert "--out: cannot write" in result.output


def test_a_command_for_each_part(evidence, runs, tmp_path):
    commands = README.read_text()
    for name in PARTS:
        assert write_part(name, evidence, tmp_path / name), name
        assert f"evidence figure {name} " in commands, "the recipe's README has the command"
    for name, written in (("position", "position-dense-grpo.png"), ("tail", "tail.md")):
        result = call("figure", name, runs, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "out" / written).read_bytes() == (tmp_path / name / written).read_bytes()


def test_where_a_figure_is_written_is_told_without_dots(runs, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in (["figure", "position", runs], ["page", runs]):
        told = call(*words, "--out", "../ev").output
        assert f"{tmp_path}/ev/" in told
        assert ".." not in told


def test_a_figure_and_the_page_say_what_they_are_at(runs, tmp_path):
    for words in (["figure", "position", runs], ["page", runs]):
        result = call(*words, "--out", tmp_path)
        assert result.stderr.startswith(f"evidence {words[0]}"), "in a log a line at once"
    begun = []
    write_page(Evidence.read(runs, runs, begun.append), tmp_path)
    assert begun[:2] == ["the runs of dense-grpo", "curves of dense-grpo"]
    assert {"table first", "table speed"} < set(begun)
    assert parts_of_page(Evidence.read(runs, runs)) == len(begun), "as many as the bar counts to"


def test_a_picture_says_which_model_and_algorithm_it_is_of(evidence, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for name in PICTURES:
        write_part(name, evidence, tmp_path)
    said = [" ".join(text.get_text() for text in figure.findobj(Text)) for figure in drawn]
    assert len(said) == len(PICTURES)
    assert all("dense-grpo: dense model, 612 K parameters, GRPO" in text for text in said), said


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
    listed = " ".join(call("figure", "--help").output.replace("│", " ").split())
    assert all(re.search(rf"\b{name}\b", listed) for name in PARTS)
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
