"""A SkyPilot task: machines of some cloud or cluster, Ray between them, the run on the first."""

from __future__ import annotations

from typing import Any

from verl_tim.launch.cluster import KEY
from verl_tim.launch.errors import LaunchError
from verl_tim.launchers.job import Job
from verl_tim.launchers.shell import driver, prelude, render, time_for_the_run
from verl_tim.launchers.yaml_text import dump


def task(job: Job) -> str:
    """The task's YAML.

    Raises:
        LaunchError: no name of the GPU, or a mount that SkyPilot cannot make.
    """
    return dump([task_of(job)])


def task_of(job: Job) -> dict[str, Any]:
    """The task as a mapping. Secrets have no value: `sky launch --secret NAME` takes them from its shell."""
    files, volumes = _mounts(job)
    settings = job.settings
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": _resources(job)}
    if job.environment:
        task["envs"] = dict(sorted(job.environment.items()))
    if job.secrets:
        task["secrets"] = dict.fromkeys(job.secrets)
    if files:
        task["file_mounts"] = files
    if volumes:
        task["volumes"] = volumes
    if settings.skypilot.setup:
        task["setup"] = "\n".join(["#!/bin/bash", "set -e", *settings.skypilot.setup]) + "\n"
    cpus = "" if job.ray_cpus is None else f" --num-cpus={job.ray_cpus}"
    task["run"] = render(
        "skypilot_run.sh.j2",
        job=job,
        prelude=prelude(job, variables=False),
        driver=driver(job, stop_after=time_for_the_run(job)),
        ray_cpus=cpus,
    )
    return task


def _resources(job: Job) -> dict[str, Any]:
    settings, sky = job.settings, job.settings.skypilot
    resources: dict[str, Any] = {}
    if sky.infra is not None:
        resources["infra"] = sky.infra
    if not job.cpu:
        if settings.gpu is None:
            raise LaunchError.of(
                f"{KEY}.gpu", "is not given, and SkyPilot asks for GPUs by name", f"set {KEY}.gpu=H200, H100, ..."
            )
        resources["accelerators"] = f"{settings.gpu}:{job.gpus}"
    if settings.cpus is not None:
        resources["cpus"] = f"{settings.cpus}+"
    if settings.memory is not None:
        resources["memory"] = f"{settings.memory}+"
    if settings.image is not None:
        resources["image_id"] = f"docker:{settings.image}"
    if sky.use_spot:
        resources["use_spot"] = True
    if sky.disk_size is not None:
        resources["disk_size"] = sky.disk_size
    if settings.restarts:
        # of managed jobs (`sky jobs launch`)
        resources["job_recovery"] = {"max_restarts_on_errors": settings.restarts}
    return resources


def _mounts(job: Job) -> tuple[dict[str, str], dict[str, str]]:
    files: dict[str, str] = {}
    volumes: dict[str, str] = {}
    for target, source in job.settings.mounts.items():
        if source.startswith("volume:"):
            volumes[target] = source.removeprefix("volume:")
        elif "://" in source:
            files[target] = source
        else:
            raise LaunchError.of(
                f"{KEY}.mounts.{target}",
                f"is {source}, which SkyPilot cannot mount",
                "give volume:NAME or a bucket such as s3://NAME",
            )
    return files, volumes
