"""A plain `python -m verl.trainer.main_ppo` starts as `verl-tim train` does, through Hydra's callback."""

import os
import subprocess
import sys

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf

from verl_tim.launch.callback import Launch
from verl_tim.launch.compose import hydra_for, split_recipe


@pytest.fixture
def config_of(model_folder, tmp_path):
    """As Hydra hands it to a callback: composed, with its own node, read-only where Hydra has it so."""
    recipe, _ = split_recipe([])

    def make(*overrides):
        common = [
            f"actor_rollout_ref.model.path={model_folder}",
            f"tim.cache_dir={tmp_path}/cache",
            f"tim.run_dir={tmp_path}/run",
            "tim.task.train_size=32",
            "tim.task.val_size=4",
        ]
        return compose(recipe.config_name, overrides=[*common, *overrides], return_hydra_config=True)

    with hydra_for(recipe):
        yield make


def test_config_is_ready_and_stored(config_of, tmp_path):
    config = config_of("rollout=stock")
    Launch().on_run_start(config)
    assert config.tim.run_dir == f"{tmp_path}/run"
    assert f"{tmp_path}/run/metrics.jsonl" == config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH
    # what verl does with it: a merge that loses the parent, under which an interpolation could not be resolved
    env = OmegaConf.merge({"env_vars": {}}, config.ray_kwargs.ray_init.runtime_env)
    assert OmegaConf.to_container(env)["env_vars"]["VERL_FILE_LOGGER_PATH"] == f"{tmp_path}/run/metrics.jsonl"
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert "hydra" not in stored
    assert stored["actor_rollout_ref"]["rollout"]["name"] == "stock"
    assert stored["data"]["train_files"] == config.data.train_files
    assert os.path.isfile(config.data.train_files)
    # Hydra makes the job's folder and log from its own node, which stays as it was
    assert config.hydra.run.dir == f"{tmp_path}/run"


def test_findings_end_the_process(config_of, capsys):
    with pytest.raises(SystemExit) as caught:
        Launch().on_run_start(config_of("data.max_response_length=100000", "ray_kwargs.ray_init.num_cpus=2"))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "data.max_response_length: " in said
    assert "ray_kwargs.ray_init.num_cpus: " in said


def test_a_defect_of_ours_ends_the_process_too(config_of, monkeypatch, capsys):
    monkeypatch.setattr("verl_tim.launch.start.make_ready", lambda config: 1 / 0)
    with pytest.raises(SystemExit, match="division by zero"):
        Launch().on_run_start(config_of())
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_of_ours_ends_a_multirun_too(capsys):
    """Anything else would let Hydra's sweeper go on, with all runs in one process."""
    with pytest.raises(SystemExit, match="preparing the runs failed"):
        Launch().on_multirun_start(OmegaConf.create({}))  # without Hydra's node, which says what is swept
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_plain_verl_says_what_is_wrong_within_seconds(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *("--config-path", "pkg://verl_tim.recipes.cpu_grpo", "--config-name", "cpu_grpo"),
            *(
                "actor_rollout_ref.model.path=/nowhere/model",
                f"tim.cache_dir={tmp_path}",
                f"tim.run_dir={tmp_path}/run",
            ),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 2
    assert "actor_rollout_ref.model.path: there is no folder /nowhere/model" in result.stderr
    assert not (tmp_path / "run").exists()
