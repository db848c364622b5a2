import dataclasses

import pytest

from verl_tim.launch.cluster import ClusterSettings
from verl_tim.launchers.job import Job

JOB = Job(
    name="dense-grpo-1",
    words=("recipe=dense_grpo", "cluster=gpu2x8", "tim.run_dir=/shared/runs/dense_grpo-1"),
    nodes=2,
    gpus=8,
    cpu=False,
    ray_cpus=None,
    run_dir="/shared/runs/dense_grpo-1",
    settings=ClusterSettings(image="nvcr.io/verl:1", gpu="H200"),
    environment={"NCCL_DEBUG": "INFO"},
    secrets=("HF_TOKEN", "WANDB_API_KEY"),
)


@pytest.fixture
def job_with():
    """A job of two nodes, with other fields, and other keys of tim.launch."""

    def make(settings=(), **fields):
        given = {**JOB.settings.model_dump(), **dict(settings)}
        return dataclasses.replace(JOB, settings=ClusterSettings.model_validate(given), **fields)

    return make


@pytest.fixture
def program(tmp_path):
    """Puts a fake program on a PATH: a shell script; what it may log goes to its argument `$LOG`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name, text):
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return folder

    return make
