"""`task=` of published data: which files a run gets, and what is said of settings that cannot be."""

import pyarrow.parquet as pq
import pytest

from verl_tim.launch import prepare
from verl_tim.launch.checks import made
from verl_tim.launch.compose import compose_config, hydra_for, split_recipe
from verl_tim.launch.errors import LaunchError
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.sources import PUBLISHED
from verl_tim.tasks.task_data import task_files, task_spec


@pytest.fixture(scope="module")
def composer():
    recipe, _ = split_recipe([])
    with hydra_for(recipe):
        yield lambda *overrides: compose_config(recipe, overrides)


@pytest.fixture
def config_of(composer, tmp_path):
    def make(*overrides):
        folders = [f"tim.cache_dir={tmp_path}/cache", f"tim.run_dir={tmp_path}/run", "actor_rollout_ref.model.path=M"]
        config = composer(*folders, *overrides)
        prepare.absolute_paths(config)
        prepare.resolve(config)
        return config

    return make


def sources_of(*paths):
    return [pq.read_table(path)["data_source"][0].as_py() for path in paths]


@pytest.mark.parametrize(
    ("overrides", "train", "validation"),
    [
        (["task=sanity_r1d"], "math_1460", ["aime24"]),
        (["task=dapo_math"], "math_dapo", ["aime24"]),
        (["task=dapo_math", "tim.task.validation=[aime25]"], "math_dapo", ["aime25"]),
        (["task=dapo_math", "tim.task.validation=aime25"], "math_dapo", ["aime25"]),
        (["task=sanity_r1d", "tim.task.validation=[aime24,aime25]"], "math_1460", ["aime24", "aime25"]),
        (["task=gsm8k"], "openai/gsm8k", ["openai/gsm8k"]),
        (["task=aime24"], "aime24", ["aime24"]),
        (["task=aime25"], "aime25", ["aime25"]),
        (["task=aime25", "tim.task.validation=[aime24]"], "aime25", ["aime24"]),
    ],
)  # fmt: skip
def test_train_on_one_validate_on_another(hub, config_of, tmp_path, overrides, train, validation):
    config = config_of(*overrides)
    assert list(made.check_settings(config)) == []
    prepare.make_missing(config, progress=False)
    assert sources_of(config.data.train_files) == [train]
    files = [config.data.val_files] if isinstance(config.data.val_files, str) else list(config.data.val_files)
    assert sources_of(*files) == validation
    assert config.reward.custom_reward_function.path == "pkg://verl_tim.tasks.math.reward"
    assert config.reward.custom_reward_function.reward_kwargs == {"timeout": 5, "workers": 2, "memory_mb": 1024}


def test_dapo_and_aime_are_asked_alike(hub, tmp_path):
    files = task_files(
        "dapo_math", validation=["aime24"], prompt_style="answer_line", cache_dir=tmp_path, progress=False
    )
    rows = [pq.read_table(path).to_pylist()[0] for path in (files.train, *files.validation)]
    assert {row["extra_info"]["answer_format"] for row in rows} == {"answer_line"}
    assert all(row["prompt"][0]["content"].startswith("Solve the following math problem") for row in rows)


def test_only_what_is_missing_is_made(hub, config_of, tmp_path):
    config = config_of("task=dapo_math", f"data.train_files={tmp_path}/mine.parquet")
    prepare.make_missing(config, progress=False)
    assert config.data.train_files == f"{tmp_path}/mine.parquet"
    assert sources_of(config.data.val_files) == ["aime24"]


def test_sizes_and_revision_reach_the_sets(hub, config_of, tmp_path):
    commit = hub.folder("sanity_r1d").name
    overrides = ["tim.task.train_size=2", "tim.task.val_size=3", f"tim.task.revision={commit}"]
    config = config_of("task=sanity_r1d", *overrides)
    prepare.make_missing(config, progress=False)
    assert pq.read_table(config.data.train_files).num_rows == 2
    assert pq.read_table(config.data.val_files).num_rows == 3
    assert task_spec("sanity_r1d", validation="aime24", revision=commit)["sanity_r1d"]["source"]["revision"] == commit


@pytest.mark.parametrize(
    ("override", "key", "problem"),
    [
        ("tim.task.name=gsm9k", "tim.task.name", "unknown task 'gsm9k'; known tasks: basic_arithmetic"),
        ("tim.task.validation=[dapo_math]", "tim.task.validation", "'dapo_math' is no set to validate on"),
        ("tim.task.validation=[chain_sum]", "tim.task.validation", "'chain_sum' is no set to validate on"),
        ("tim.task.validation=[]", "tim.task.validation", "names no set"),
        ("tim.task.prompt_style=loud", "tim.task.prompt_style", "unknown style 'loud'"),
        ("tim.task.train_size=0", "tim.task.train_size", "got 0"),
        ("tim.task.val_size=-1", "tim.task.val_size", "got -1"),
        ("tim.task.revision=1.5", "tim.task.revision", "must be a commit or branch"),
        ("+tim.task.seed=1", "tim.task", "seed"),
    ],
)
def test_settings_of_which_nothing_can_be_made(hub, config_of, tmp_path, override, key, problem):
    config = config_of("task=gsm8k", override)
    (finding,) = made.check_settings(config)
    assert finding.key == key
    assert problem in finding.problem
    assert hub.calls == [], "checking asks nobody"


def test_what_cannot_be_fetched_ends_the_start_with_a_remedy(hub, config_of, tmp_path):
    hub.error = OSError("no route to host")
    with pytest.raises(LaunchError, match=r"tim\.task: .*no route to host.*verl-tim data gsm8k"):
        prepare.make_missing(config_of("task=gsm8k"), progress=False)


def test_tasks_made_here_take_no_published_settings(tmp_path):
    assert task_spec("chain_sum", train_size=8, val_size=2)["task"] == "chain_sum"
    files = task_files("chain_sum", train_size=8, val_size=2, cache_dir=tmp_path, progress=False)
    assert pq.read_table(files.train).num_rows == 8
    with pytest.raises(TypeError, match="validation"):
        task_spec("chain_sum", train_size=8, val_size=2, validation=["aime24"])
    with pytest.raises(InputError, match="published data sets: aime24, aime25, dapo_math, gsm8k, sanity_r1d"):
        task_spec("nothing")


def test_every_set_has_a_config():
    from verl_tim.launch.recipes import group_options

    assert set(PUBLISHED) <= set(group_options()["task"])


def test_small_models_are_not_warmed_up_on_published_problems(hub, config_of):
    config = config_of("task=gsm8k")
    config.actor_rollout_ref.model.path = None
    (finding,) = made.check_settings(config)
    assert finding.key == "tim.model.task"
    assert "model=hf" in finding.problem
