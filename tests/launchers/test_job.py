"""From words to a job: composed and checked as a start is, without this machine's GPUs and files."""

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.launch import prepare
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.start import composed
from verl_tim.launchers import kuberay, ray_job, skypilot, slurm, submit
from verl_tim.launchers.job import job_of


def job(*words, environ=None, **options):
    return job_of(["recipe=cpu_grpo", "rollout=stock", *words], environ=environ or {}, **options)


def config_of(words):
    config = composed(words)
    prepare.resolve(config)
    return config


def test_the_words_say_the_run_completely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = job("tim.launch.restarts=1", "trainer.save_freq=5", "trainer.experiment_name=run_${now:%S}")
    monkeypatch.chdir("/")
    config = config_of(made.words)
    # wherever and whenever it starts, the same run
    assert config.tim.run_dir == made.run_dir == str(tmp_path / "runs" / config.trainer.experiment_name)
    assert config.trainer.experiment_name.startswith("run_")
    assert config.trainer.resume_mode == "auto"
    # a driver that joins a cluster must not say how large it is
    ray = config.ray_kwargs.ray_init
    assert (ray.address, ray.num_cpus, ray.num_gpus, ray.object_store_memory) == ("auto", None, None, None)
    assert ray._system_config is None
    assert made.ray_cpus == 16


def test_a_resume_mode_that_was_given_stays():
    made = job("tim.launch.restarts=1", "trainer.save_freq=5", "trainer.resume_mode=resume_path")
    assert config_of(made.words).trainer.resume_mode == "resume_path"


def test_relative_files_are_made_absolute(tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(model_folder.parent)
    made = job(f"actor_rollout_ref.model.path={model_folder.name}", "model=hf")
    assert config_of(made.words).actor_rollout_ref.model.path == str(model_folder)


def test_separate_rollout_nodes_count():
    words = (
        "trainer.v1.trainer_mode=separate_async", "data.train_batch_size=16", "trainer.nnodes=2",
        "trainer.v1.separate_async.parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.nnodes=3", "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_tim.rollout.gloo_checkpoint_engine",
    )  # fmt: skip
    assert job(*words, "actor_rollout_ref.rollout.n_gpus_per_node=1").nodes == 5
    with pytest.raises(LaunchError, match=r"rollout\.n_gpus_per_node: is 2, and trainer\.n_gpus_per_node is 1"):
        job(*words, "actor_rollout_ref.rollout.n_gpus_per_node=2")


def test_gpus_files_and_packages_of_the_nodes_are_not_looked_for_here(tmp_path):
    made = job_of(["recipe=dense_grpo", "cluster=gpu8x8", f"actor_rollout_ref.model.path={tmp_path}/none"], environ={})
    assert (made.nodes, made.gpus, made.cpu) == (8, 8, False)
    assert made.unseen == (f"{tmp_path}/none",)


def test_what_would_end_the_start_ends_the_launch():
    with pytest.raises(LaunchError, match=r"actor_rollout_ref\.rollout\.temperature"):
        job("actor_rollout_ref.rollout.temperature=0")


def test_variables_of_the_shell_are_handed_on_and_secrets_only_named():
    environ = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "WANDB_MODE": "offline", "HF_TOKEN_X": "t", "HOME": "/h"}
    made = job("+tim.launch.env.MINE=1", environ=environ)
    assert made.environment == {"MINE": "1", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert made.secrets == ("HF_TOKEN", "HF_TOKEN_X", "SWANLAB_API_KEY", "WANDB_API_KEY")


def test_without_preflight_nodes_are_still_waited_for(job_with):
    assert job_with(looks=False).preflight == ["verl-tim", "preflight", "--wait", "600", "--checks", "nodes"]


def test_restarts_without_checkpoints_are_refused():
    with pytest.raises(LaunchError, match=r"tim\.launch\.restarts: is 1, and trainer\.save_freq=-1"):
        job("tim.launch.restarts=1")


def test_no_secrets_value_is_in_any_file():
    environ = {"WANDB_API_KEY": "very-secret-value", "NCCL_DEBUG": "INFO"}
    made = job("tim.launch.image=image:1", environ=environ)
    for text in (slurm.script(made), ray_job.script(made), kuberay.manifest(made), skypilot.task(made)):
        assert "very-secret-value" not in text
        assert "WANDB_API_KEY" in text
        assert "NCCL_DEBUG" in text


@pytest.mark.parametrize(
    ("launcher", "name"), [("slurm", "sbatch"), ("kuberay", "kubectl"), ("skypilot", "sky"), ("ray-job", "ray")]
)
def test_a_scheduler_that_is_not_here_is_named(launcher, name, job_with, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=f"--submit: {name} is not on this machine"):
        submit.submit(launcher, tmp_path / "file", job_with(), {"PATH": str(tmp_path)})


def test_submit_runs_the_schedulers_command_and_gives_its_exit_code(program, monkeypatch, tmp_path, capfd):
    folder = program("sbatch", 'head -n 1 "$1"; exit 7')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    file = tmp_path / "job.sh"
    result = CliRunner().invoke(
        app, ["launch", "slurm", "recipe=cpu_grpo", "rollout=stock", "--output", str(file), "--submit"]
    )
    assert result.exit_code == 7
    assert capfd.readouterr().out.startswith("#!/bin/bash")
    assert file.read_text().startswith("#!/bin/bash")


def test_sky_is_told_the_secrets_that_are_set_and_restarts_make_a_managed_job(job_with, tmp_path):
    file = tmp_path / "task.yaml"
    once = submit.command("skypilot", file, job_with(), {"HF_TOKEN": "x"})
    assert once == ["sky", "launch", "--yes", "--cluster", "dense-grpo-1", "--down", "--secret", "HF_TOKEN", str(file)]
    assert submit.command("skypilot", file, job_with({"restarts": 1}), {})[:3] == ["sky", "jobs", "launch"]


@pytest.mark.parametrize(
    "word",
    [
        "++ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=hf_abc",
        "++ray_kwargs.ray_init.runtime_env.env_vars.PROXY=http://user:password@proxy:80",
        "tim.launch.setup=['export WANDB_API_KEY=abc']",
    ],
)
def test_a_secret_that_would_stand_in_the_file_is_refused(word):
    with pytest.raises(LaunchError, match=r"secret.*\n.*tim\.launch\.secrets"):
        job(word)


def test_a_reference_to_a_secret_is_none():
    assert job("tim.launch.setup=['export TOKEN=$HF_TOKEN']").settings.setup


def test_a_hub_that_cannot_be_reached_from_here_leaves_the_model_to_preflight(monkeypatch):
    from verl_tim.launch.checks import model

    monkeypatch.setattr(model, "_load", lambda *asked: (None, "ConnectError: no network"))
    assert "OWNER/NAME" in job("model=hf", "actor_rollout_ref.model.path=OWNER/NAME").unseen
