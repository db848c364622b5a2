"""What the schedulers' own tools say of a rendered file: bash, shellcheck, Ray's and SkyPilot's checks, a schema."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from importlib import resources
from importlib.util import find_spec
from typing import Any

import yaml

from verl_tim.launchers.job import Job

# 2016: a $ in single quotes is there to stay; 2317 and, since shellcheck 0.10, 2329: functions that a trap calls; 1090,
# 1091: files that set-up commands source are on the nodes.
_SHELLCHECK = ("shellcheck", "--shell=bash", "--exclude=SC2016,SC2317,SC2329,SC1090,SC1091")


class LintError(RuntimeError):
    """A rendered file is not what its scheduler takes: a defect of the launcher, or of a command under `setup`."""


def lint(launcher: str, text: str, job: Job) -> tuple[str, ...]:
    """Check a rendered file with every tool that is here.

    Args:
        launcher: ray-job, slurm, kuberay or skypilot.

    Returns the names of the tools that looked at it.

    Raises:
        LintError: with the tool's words.
    """
    if launcher == "slurm":
        return shell([text])
    if launcher == "ray-job":
        from verl_tim.launchers.ray_job import driver_script

        return (*shell([text, driver_script(job)]), *_ray(job))
    documents = list(yaml.safe_load_all(text))
    if launcher == "skypilot":
        (task,) = documents
        return (*shell(task[name] for name in ("setup", "run") if name in task), *_sky(task))
    scripts, manifest = documents
    return (*shell(scripts["data"].values()), *rayjob_schema(manifest))


def shell(texts: Iterable[str], *, severity: str = "error") -> tuple[str, ...]:
    """`bash -n` and shellcheck, where they are installed.

    Args:
        severity: the least that shellcheck speaks of; what is below an error is a matter of whose commands those are.
    """
    looked = []
    texts = list(texts)
    for name, command in (("bash -n", ("bash", "-n")), ("shellcheck", (*_SHELLCHECK, f"--severity={severity}", "-"))):
        if shutil.which(command[0]) is None:
            continue
        for text in texts:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
            if done.returncode:
                raise LintError(f"{name}: {(done.stdout + done.stderr).strip()}")
        looked.append(name)
    return tuple(looked)


def rayjob_schema(manifest: Any) -> tuple[str, ...]:
    """The RayJob against the fields of its API that this package uses (kuberay_schema.json)."""
    import jsonschema

    schema = json.loads(resources.files("verl_tim.launchers").joinpath("kuberay_schema.json").read_text("utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(manifest))
    if error is not None:
        raise LintError(f"RayJob: {'.'.join(str(part) for part in error.absolute_path)}: {error.message}")
    return ("RayJob schema",)


def _ray(job: Job) -> tuple[str, ...]:
    from ray.runtime_env import RuntimeEnv

    from verl_tim.launchers.ray_job import runtime_env

    try:
        RuntimeEnv(**runtime_env(job))
    except (TypeError, ValueError) as error:
        raise LintError(f"Ray's runtime environment: {error}") from error
    return ("ray.runtime_env",)


def _sky(task: Any) -> tuple[str, ...]:
    if find_spec("sky") is None:
        return ()
    import sky

    try:
        # a secret without a value is asked for when the task is launched
        sky.Task.from_yaml_config({**task, "secrets": dict.fromkeys(task.get("secrets", {}), "-")})
    except Exception as error:  # whatever its validation raises
        raise LintError(f"SkyPilot: {error}") from error
    return ("sky.Task",)
