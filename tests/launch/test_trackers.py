"""Trackers are chosen one or several at a time, a run is named by its folder, what is lacking is said at the start."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from verl_tim.launch.checks import trackers
from verl_tim.launch.matrix import matrix_of
from verl_tim.launch.recipes import find_recipe, group_options

ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())


def test_each_adds_its_own_logger_and_the_file_stays(composer):
    for name in group_options()["tracker"]:
        loggers = list(composer(f"tracker={name}").trainer.logger)
        if name == "console":
            assert loggers == ["console"]
        else:
            assert loggers == ["console", "file", *([] if name == "file" else [name])]


def test_several_at_once(resolved):
    config = resolved("tracker=[wandb,tensorboard]")
    assert list(config.trainer.logger) == ["console", "file", "wandb", "tensorboard"]
    assert config.tim.choices.tracker == "wandb,tensorboard"
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert f"{config.tim.run_dir}/tensorboard" == variables.TENSORBOARD_DIR
    assert config.tim.run_dir == variables.WANDB_DIR


@pytest.mark.parametrize("words", ["[console,wandb]", "[wandb,console]"])
def test_the_console_beside_others_takes_nothing_from_them(resolved, words):
    config = resolved(f"tracker={words}")
    assert list(config.trainer.logger) == ["console", "file", "wandb"]
    assert config.tim.choices.tracker == "wandb"


@pytest.mark.parametrize("words", ["[console,file]", "[file,console]"])
def test_the_console_beside_the_file_is_the_file(resolved, words):
    config = resolved(f"tracker={words}")
    assert list(config.trainer.logger) == ["console", "file"]
    assert config.tim.choices.tracker == "file"


def test_a_recipe_that_chooses_no_tracker_logs_to_the_file(tmp_path):
    from verl_tim.launch import prepare
    from verl_tim.launch.start import composed

    recipe = tmp_path / "mine.yaml"
    text = resources.files("verl_tim.recipes").joinpath("cpu_grpo/cpu_grpo.yaml").read_text(encoding="utf-8")
    recipe.write_text("".join(line for line in text.splitlines(True) if "tracker:" not in line), encoding="utf-8")
    config = composed([f"recipe={recipe}", f"tim.run_dir={tmp_path}/run"])
    prepare.absolute_paths(config)
    assert list(config.trainer.logger) == ["console", "file"]


def test_verls_own_key_still_decides(resolved):
    assert list(resolved("tracker=wandb", "trainer.logger=[console]").trainer.logger) == ["console"]


def test_the_shells_mode_reaches_a_cluster(resolved, monkeypatch):
    assert resolved("tracker=wandb").ray_kwargs.ray_init.runtime_env.env_vars.WANDB_MODE == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolved("tracker=wandb").ray_kwargs.ray_init.runtime_env.env_vars.WANDB_MODE == "offline"


def test_a_run_is_named_by_its_folder_unless_it_has_a_name(resolved, tmp_path):
    assert resolved(f"tim.run_dir={tmp_path}/stock-seed1").trainer.experiment_name == "stock-seed1"
    assert resolved("trainer.experiment_name=mine").trainer.experiment_name == "mine"


def test_a_run_without_a_folder_of_its_own_choice_has_name_and_folder_alike():
    from verl_tim.launch import prepare
    from verl_tim.launch.start import composed

    config = composed([])
    prepare.resolve(config)
    assert config.trainer.experiment_name.startswith("cpu_grpo-vexact-none-")
    assert config.tim.run_dir.endswith("/" + config.trainer.experiment_name)


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_the_mode_of_replay_is_in_the_default_name_and_folder(mode, tmp_path):
    from verl_tim.launch import prepare
    from verl_tim.launch.start import composed

    config = composed([f"routing_replay={mode}", "rollout=stock"])
    prepare.resolve(config)
    assert config.trainer.experiment_name.startswith(f"cpu_grpo-stock-none-{mode}-")
    assert config.tim.run_dir.endswith("/" + config.trainer.experiment_name)
    # and a folder of one's own choice still names the run
    config = composed([f"routing_replay={mode}", f"tim.run_dir={tmp_path}/mine"])
    prepare.resolve(config)
    assert config.trainer.experiment_name == "mine"


def test_runs_of_a_matrix_have_their_cells_names_and_one_group(tmp_path):
    words = ["+matrix=paper", f"tim.run_dir={tmp_path}/paper", "tim.only=[vexact,vllm_recompute]"]
    matrix = matrix_of(find_recipe("dense_grpo"), words)
    for cell in matrix.cells:
        assert "tim.tracking.group='paper'" in cell.overrides
        assert f"trainer.experiment_name='{cell.name}'" in cell.overrides
    named = matrix_of(find_recipe("dense_grpo"), [*words, "tim.tracking.group=mine"])
    assert all(cell.overrides[-3] == "tim.tracking.group=mine" for cell in named.cells)
    assert not any("tim.tracking.group='paper'" in cell.overrides for cell in named.cells)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "swanlab", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_extra(resolved, monkeypatch, name):
    config = resolved(f"tracker={name}")
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    (finding,) = trackers.check(config)
    assert finding.key == "trainer.logger"
    assert f"pip install 'verl_tim[{name}]'" in finding.remedy


def test_every_extra_that_a_remedy_names_exists():
    import runpy

    import setuptools

    given = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
    assert {"wandb", "tensorboard", "swanlab", "mlflow", "trackio", "trackers"} <= set(given["extras_require"])


@pytest.mark.usefixtures("everything_installed")
def test_wandb_without_a_login(resolved, monkeypatch, tmp_path):
    config = resolved("tracker=wandb")
    (finding,) = trackers.check(config)
    assert "api.wandb.ai" in finding.problem
    assert "WANDB_MODE=offline" in finding.remedy
    for way in ("key", "netrc", "offline", "cluster"):
        with monkeypatch.context() as patch:
            if way == "key":
                patch.setenv("WANDB_API_KEY", "k" * 40)
            elif way == "netrc":
                file = tmp_path / "netrc"
                file.write_text(f"machine api.wandb.ai\n  login user\n  password {'k' * 40}\n")
                patch.setenv("NETRC", str(file))
            elif way == "cluster":
                config = resolved("tracker=wandb", "ray_kwargs.ray_init.address=auto")
            else:
                config = resolved("tracker=wandb", f"{ENVIRONMENT}.WANDB_MODE=offline")
            assert list(trackers.check(config)) == [], way


@pytest.mark.usefixtures("everything_installed")
def test_swanlab_without_a_login(resolved, monkeypatch):
    (finding,) = trackers.check(resolved("tracker=swanlab"))
    assert "SWANLAB_MODE=offline" in finding.remedy
    assert list(trackers.check(resolved("tracker=swanlab", f"{ENVIRONMENT}.SWANLAB_MODE=offline"))) == []
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "swanboard" else object())
    (finding,) = trackers.check(resolved("tracker=swanlab", f"{ENVIRONMENT}.SWANLAB_MODE=local"))
    assert "swanlab[dashboard]" in finding.remedy
