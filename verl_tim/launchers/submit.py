"""Hands a rendered file to its scheduler, with the scheduler's own command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from verl_tim.launch.errors import LaunchError
from verl_tim.launchers.job import Job

# The program that must be here, and where it comes from.
_PROGRAMS = {
    "slurm": ("sbatch", "run this on a login node of the cluster"),
    "ray-job": ("ray", "pip install 'ray[default]'"),
    "kuberay": ("kubectl", "install kubectl, and give it a context of the cluster"),
    "skypilot": ("sky", "pip install 'skypilot[aws,kubernetes,...]', in an environment of its own"),
}


def command(launcher: str, file: Path, job: Job, environ: Mapping[str, str]) -> list[str]:
    """The scheduler's command for a rendered file.

    Args:
        environ: SkyPilot is told which secrets are set there.
    """
    if launcher == "slurm":
        return ["sbatch", str(file)]
    if launcher == "ray-job":
        return ["bash", str(file)]
    if launcher == "kuberay":
        return ["kubectl", "apply", "-f", str(file)]
    secrets = [word for name in job.secrets if name in environ for word in ("--secret", name)]
    if job.settings.restarts:
        # only managed jobs begin again
        return ["sky", "jobs", "launch", "--yes", "--name", job.name, *secrets, str(file)]
    return ["sky", "launch", "--yes", "--cluster", job.name, "--down", *secrets, str(file)]


def submit(launcher: str, file: Path, job: Job, environ: Mapping[str, str] | None = None) -> int:
    """Run the command, its output to the terminal; its exit code.

    Raises:
        LaunchError: the program is not installed here.
    """
    environ = os.environ if environ is None else environ
    program, remedy = _PROGRAMS[launcher]
    # `ray` stands beside the Python in use, which need not be on PATH
    path = os.pathsep.join([environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if shutil.which(program, path=path) is None:
        raise LaunchError.of("--submit", f"{program} is not on this machine", f"{remedy}, or take the file there")
    return subprocess.run(command(launcher, file, job, environ), env={**environ, "PATH": path}).returncode
