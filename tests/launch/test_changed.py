"""A finished run of a matrix that would be another now is named, whatever its overrides say."""

import json
from importlib import resources

import pytest
import yaml
from omegaconf import OmegaConf

from verl_tim.launch import prepare
from verl_tim.launch.changed import changed, in_words
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.matrix import matrix_of, record
from verl_tim.launch.recipes import RECIPES_PACKAGE, find_recipe
from verl_tim.launch.run_folder import claim
from verl_tim.launch.start import composed_of


@pytest.fixture
def recipe(tmp_path):
    """A recipe's own file with a matrix of two."""
    file = tmp_path / "mine.yaml"
    file.write_text(resources.files(RECIPES_PACKAGE).joinpath("cpu_grpo", "cpu_grpo.yaml").read_text())
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "pair.yaml").write_text(
        "# @package _global_\ntim: {matrix: {exact: [rollout=vexact], stock: [rollout=stock]}}\n"
    )
    return file


@pytest.fixture
def matrix(recipe, tmp_path):
    return matrix_of(find_recipe(str(recipe)), ["+matrix=pair", f"tim.run_dir={tmp_path}/runs"])


def finish(matrix, name="exact"):
    """The run's folder and line, as a start and a good end leave them; model and data as if they were made."""
    (cell,) = (one for one in matrix.cells if one.name == name)
    config = composed_of(matrix.recipe, cell.overrides)
    prepare.complete(config)
    for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path"):
        OmegaConf.update(config, key, f"{config.tim.cache_dir}/made/{key}")
    prepare.resolve(config)
    claim(config)
    record(matrix, name)


def edit(recipe, **changes):
    """Values by dotted key (dots written as __) in the recipe's file."""
    content = OmegaConf.create(recipe.read_text())
    for key, value in changes.items():
        OmegaConf.update(content, key.replace("__", "."), value, force_add=True)
    recipe.write_text("# @package _global_\n" + OmegaConf.to_yaml(content))


def test_a_changed_recipe_is_told_by_run_and_key(matrix, recipe):
    finish(matrix)
    assert changed(matrix, composed_of) == {}
    edit(recipe, actor_rollout_ref__actor__optim__lr=0.5, trainer__total_training_steps=7)
    found = changed(matrix, composed_of)
    assert set(found) == {"exact"}, "the other has not ended"
    values = {one.key: one.values for one in found["exact"]}
    assert set(values) == {"actor_rollout_ref.actor.optim.lr", "trainer.total_training_steps"} | {
        key for key in values if key.startswith(("critic.", "actor_rollout_ref.actor.optim."))
    }
    assert values["actor_rollout_ref.actor.optim.lr"]["now"] == 0.5
    assert values["trainer.total_training_steps"]["now"] == 7
    line, remedy = in_words(matrix, found)
    assert line.startswith("exact has finished with other settings than these")
    assert "actor_rollout_ref.actor.optim.lr: " in line
    assert "0.5 now" in line
    assert "matrix.json" in remedy
    assert "tim.run_dir=FOLDER" in remedy


def test_places_trackers_and_upkeep_are_no_difference(matrix, recipe, tmp_path):
    finish(matrix)
    edit(
        recipe,
        trainer__save_freq=3,
        trainer__project_name="another",
        trainer__logger=["console"],
        tim__cache_dir=str(tmp_path / "elsewhere"),
        tim__restarts__limit=2,
        tim__tracking__tags=["new"],
        tim__dump__every=5,
        tim__launch__time_limit="01:00:00",
    )
    assert changed(matrix, composed_of) == {}


def test_of_a_path_its_name_counts(matrix, recipe, tmp_path):
    edit(recipe, actor_rollout_ref__model__path="/models/one", data__train_files="/data/sums/train.parquet")
    finish(matrix)
    file = tmp_path / "runs" / "exact" / "config.yaml"
    there = yaml.safe_load(file.read_text())
    there["actor_rollout_ref"]["model"]["path"] = "/models/one"
    there["data"]["train_files"] = "/data/sums/train.parquet"
    file.write_text(yaml.safe_dump(there))
    edit(recipe, actor_rollout_ref__model__path="/mnt/models/one", data__train_files="/mnt/sums/train.parquet")
    assert "actor_rollout_ref.model.path" not in keys_of(matrix)
    edit(recipe, actor_rollout_ref__model__path="/mnt/models/two", data__train_files="/mnt/proofs/train.parquet")
    assert {"actor_rollout_ref.model.path", "data.train_files"} <= keys_of(matrix)


def keys_of(matrix):
    return {one.key for one in changed(matrix, composed_of).get("exact", [])}


def test_a_run_whose_folder_is_elsewhere_is_not_looked_at(matrix, recipe, tmp_path):
    finish(matrix)
    (tmp_path / "runs" / "exact").rename(tmp_path / "away")
    edit(recipe, actor_rollout_ref__actor__optim__lr=0.5)
    assert changed(matrix, composed_of) == {}


def test_a_config_that_cannot_be_read_is_named(matrix, tmp_path):
    finish(matrix)
    (tmp_path / "runs" / "exact" / "config.yaml").write_text("a: [")
    with pytest.raises(LaunchError, match=r"config\.yaml is not YAML") as caught:
        changed(matrix, composed_of)
    assert caught.value.findings[0].key == "tim.run_dir"


@pytest.mark.parametrize("more", [["--dry-run"], ["--at-once", "2"]])
def test_the_command_tells(matrix, recipe, tmp_path, monkeypatch, more):
    from typer.testing import CliRunner

    from verl_tim.cli import app
    from verl_tim.launch import side_by_side, start

    for name in ("exact", "stock"):
        finish(matrix, name)
    monkeypatch.setattr(start, "make_ready", lambda *_, **__: pytest.fail("all have finished"))
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: [])
    words = ["train", f"recipe={recipe}", "+matrix=pair", f"tim.run_dir={tmp_path}/runs", "--json", *more]
    edit(recipe, actor_rollout_ref__actor__optim__lr=0.5)
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert told.stderr.count("has finished with other settings") == 2
    found = json.loads(told.stdout)
    others = {row["run"]: row["changed"] for row in found} if isinstance(found, list) else found["changed"]
    assert [one["actor_rollout_ref.actor.optim.lr"]["now"] for one in others.values()] == [0.5, 0.5]
