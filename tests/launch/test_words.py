"""Words of a command line that are no overrides: who meant one is shown it."""

import pytest

from verl_tim.launch.compose import split_recipe
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.words import with_recipe


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        ("recipe cpu_grpo", "recipe", "write recipe=cpu_grpo"),
        ("recipe = cpu_grpo", "recipe", "write recipe=cpu_grpo"),
        ("recipe =cpu_grpo", "recipe", "write recipe=cpu_grpo"),
        ("recipe= cpu_grpo", "cpu_grpo", "write recipe=cpu_grpo"),
        ("recipe", "recipe", "write KEY=VALUE: recipe=NAME"),
        ("rollout= cpu_grpo", "cpu_grpo", "write recipe=cpu_grpo"),
        ("mine.yaml", "mine.yaml", "write recipe=mine.yaml"),
        ("cpu_grop", "cpu_grop", "did you mean 'cpu_grpo'? write recipe=NAME"),
        ("recipe=cpu_grpo rollout vexact", "rollout", "write rollout=vexact"),
        ("rollout recipe=cpu_grpo", "rollout", "write KEY=VALUE: rollout=NAME"),
        ("cpu_grpo trainer.nnodes 2", "trainer.nnodes", "write trainer.nnodes=2"),
        ("trainer.total_training_steps 20", "trainer.total_training_steps", "write trainer.total_training_steps=20"),
        ("fast", "fast", "write KEY=VALUE, for example rollout=vexact or trainer.total_training_steps=20"),
    ],
)
def test_a_bare_word_of_train(words, key, remedy):
    with pytest.raises(LaunchError) as refused:
        split_recipe(words.split())
    (finding,) = refused.value.findings
    assert (finding.key, finding.problem, finding.remedy) == (key, "is not an override", remedy)


@pytest.mark.parametrize("words", ["cpu_reinforce data.seed=1", "data.seed=1 cpu_reinforce", "recipe=cpu_reinforce"])
def test_a_recipe_by_its_bare_name(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu_reinforce").mkdir()  # train takes no folder, so nothing else can be meant
    recipe, rest = split_recipe(words.split())
    assert recipe.name == "cpu_reinforce"
    assert rest == [word for word in words.split() if word == "data.seed=1"]


@pytest.mark.parametrize("words", ["cpu_grpo cpu_reinforce", "recipe=cpu_grpo cpu_reinforce"])
def test_two_recipes_are_one_too_many(words):
    with pytest.raises(LaunchError, match="given more than once: cpu_grpo, cpu_reinforce"):
        split_recipe(words.split())


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        ("cpu_grop", "cpu_grop", "did you mean 'cpu_grpo'? installed: cpu_grpo, "),
        ("fast", "fast", "installed: cpu_grpo, "),
        ("recipe cpu_grpo", "recipe", "write recipe=cpu_grpo"),
        ("cpu_grpo trainer.nnodes 2", "trainer.nnodes", "write trainer.nnodes=2"),
    ],
)
def test_a_bare_word_where_a_recipe_may_be_one(words, key, remedy):
    with pytest.raises(LaunchError) as refused:
        with_recipe(words.split())
    (finding,) = refused.value.findings
    assert finding.key == key
    assert finding.problem == "is neither a recipe, a file nor a folder"
    assert finding.remedy.startswith(remedy)


def test_what_is_there_goes_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    words = ["run", "rollout=vexact", "~tim.gate", "elsewhere/mine.yaml"]
    assert with_recipe(words) == words
    assert with_recipe(["cpu_grpo", "cluster=gpu1"]) == ["recipe=cpu_grpo", "cluster=gpu1"]
    (tmp_path / "cpu_grpo").mkdir()
    assert with_recipe(["cpu_grpo", "cluster=gpu1"]) == ["cpu_grpo", "cluster=gpu1"]
