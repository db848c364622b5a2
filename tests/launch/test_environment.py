"""Which variables go to a run's workers, and which never into a file."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster

from verl_tim.launch import cluster, environment
from verl_tim.launch.errors import LaunchError


def config(address="auto", env_vars=None, **launch):
    return OmegaConf.create(
        {
            "tim": {"launch": {"forward": ["NCCL_*", "WANDB_*", "CUDA_*"], "secrets": ["MINE"], "env": {}, **launch}},
            "ray_kwargs": {"ray_init": {"address": address, "runtime_env": {"env_vars": env_vars or {}}}},
        }
    )


def given(config):
    return OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "HF_TOKEN_PATH"])
def test_secrets_by_name(name):
    assert environment.is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYS_PER_TOKENIZER", "MONKEY"])
def test_names_that_are_no_secrets(name):
    assert not environment.is_secret(name)


def test_a_login_in_an_address_is_a_secret():
    assert environment.is_secret("HF_ENDPOINT", "https://me:pw@hub.example")
    assert not environment.is_secret("HF_ENDPOINT", "https://hub.example:8080/a")


def test_a_running_cluster_gets_what_is_set_here_but_no_secret_and_no_devices():
    made = config(env={"FOO": "a b"})
    environ = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin", "MINE": "s"}
    environment.add_to_workers(made, environ)
    assert given(made) == {"FOO": "a b", "NCCL_DEBUG": "INFO"}


def test_a_ray_of_the_runs_own_inherits_the_environment_by_itself(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = config(address=None, env={"FOO": "1"})
    environment.add_to_workers(made, {"NCCL_DEBUG": "INFO"})
    assert given(made) == {"FOO": "1"}


def test_what_the_config_says_of_a_variable_stays():
    made = config(env_vars={"NCCL_DEBUG": "WARN"})
    environment.add_to_workers(made, {"NCCL_DEBUG": "INFO"})
    assert given(made) == {"NCCL_DEBUG": "WARN"}


def test_two_values_of_one_variable_are_a_finding():
    (found,) = environment.conflicts(config(env_vars={"A": "1", "B": "2"}, env={"A": "1", "B": "3"}))
    assert found.key == "tim.launch.env.B"


def test_a_value_that_would_read_as_a_reference_is_refused():
    with pytest.raises(LaunchError, match="NCCL_X"):
        environment.add_to_workers(config(), {"NCCL_X": "${HOME}"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("time_limit", "1:2", "write HH:MM:SS"),
        ("cpus", 0, "greater than or equal to 1"),
        ("image", "a b", "not a plain word"),
        ("env", {"A B": "1"}, "name of an environment variable"),
        ("env", {"MY_TOKEN": "x"}, "looks like a secret"),
        ("mounts", {"data": "/x"}, "absolute folder"),
        ("mounts", {"/data": "x"}, "is not a mount"),
        ("slurm", {"options": ["constraint=x"]}, "option of sbatch"),
        ("ports", {"ray": 70000}, "less than or equal to 65535"),
        ("restart", 1, "not a key"),
    ],
)
def test_a_setting_that_a_scheduler_cannot_take_names_its_key(key, value, words):
    (found,) = cluster.findings(OmegaConf.create({"tim": {"launch": {key: value}}}))
    assert found.key.startswith(f"tim.launch.{key}")
    assert words in found.problem


@pytest.mark.parametrize(
    ("value", "seconds"), [("24:00:00", 86400), ("1-00:30:00", 88200), ("90:00", 324000), (86400, 86400)]
)
def test_times(value, seconds):
    assert cluster.ClusterSettings.model_validate({"time_limit": value}).time_limit == seconds


def test_the_file_names_every_setting_and_its_default():
    from importlib import resources

    text = resources.files("verl_tim.configs").joinpath("tim.yaml").read_text(encoding="utf-8")
    written = OmegaConf.to_container(OmegaConf.create(text).tim.launch)
    defaults = cluster.ClusterSettings().model_dump()
    assert written == {**defaults, "forward": written["forward"], "secrets": written["secrets"]}


DRIVER = """
import os, ray
from verl.trainer.main_ppo import run_ppo
from verl_tim.launch import environment, prepare
from verl_tim.launch.start import composed

config = composed([
    "recipe=cpu_grpo", "+tim.launch.env.LAUNCH_TEST='two words'", "++ray_kwargs.ray_init.address=ADDRESS",
    *(f"++ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus", "object_store_memory", "_system_config")),
])
environment.add_to_workers(config)
prepare.resolve(config)

@ray.remote(num_cpus=1)
class Runner:
    def run(self, config):
        with open("SEEN", "w") as file:
            file.write(os.environ.get("LAUNCH_TEST", "") + "|" + os.environ.get("NCCL_DEBUG", ""))

run_ppo(config, Runner)
"""


@pytest.mark.slow
def test_a_variable_of_the_launchers_config_reaches_a_worker_through_verls_own_start(tmp_path):
    """verl's run_ppo, with a task runner that only writes its environment down, in a cluster that ran before."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        source = DRIVER.replace("ADDRESS", cluster.address).replace("SEEN", str(tmp_path / "seen"))
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "NCCL_DEBUG": "TRACE"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    finally:
        cluster.shutdown()
    assert (tmp_path / "seen").read_text() == "two words|TRACE"
