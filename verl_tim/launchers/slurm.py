"""A batch script for sbatch: Ray on every node of the allocation, preflight, the run on its head."""

from __future__ import annotations

import shlex

from verl_tim.launch.errors import LaunchError
from verl_tim.launchers.job import Job
from verl_tim.launchers.shell import prelude, render


def script(job: Job) -> str:
    """The text of the batch script.

    Raises:
        LaunchError: a mount that Slurm cannot make.
    """
    return render(
        "slurm.sh.j2", job=job, options=_options(job), prelude=prelude(job), container=_container(job)
    )  # fmt: skip


def _options(job: Job) -> list[str]:
    settings, slurm = job.settings, job.settings.slurm
    gpus = [] if job.cpu else [f"--gpus-per-node={job.gpus}"]
    known = {
        "cpus-per-task": settings.cpus,
        "mem": None if settings.memory is None else f"{settings.memory}G",
        "time": None if settings.time_limit is None else _time(settings.time_limit),
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
    }
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *gpus,
        *(f"--{name}={value}" for name, value in known.items() if value is not None),
        *(["--exclusive"] if slurm.exclusive else []),
        f"--output={job.name}-%j.out",
        "--open-mode=append",
        "--export=ALL",
        # to this script alone; it tells the run, which then ends Ray in order
        f"--signal=B:USR1@{settings.stop_before}",
        "--requeue" if settings.restarts else "--no-requeue",
        *slurm.options,
    ]


def _time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def _container(job: Job) -> str:
    """Pyxis' options of every step, for a run in a container; all steps share /tmp, where Ray keeps its session."""
    if job.settings.image is None:
        if job.settings.mounts:
            raise LaunchError.of(
                "tim.launch.mounts",
                "are mounts of a container, and tim.launch.image names none",
                "set the image, or leave the mounts out: without a container the job sees the node's own folders",
            )
        return ""
    for target, source in job.settings.mounts.items():
        if not source.startswith("/"):
            raise LaunchError.of(
                f"tim.launch.mounts.{target}", f"is {source}, which Slurm cannot mount", "give a folder of the nodes"
            )
    mounts = ",".join(["/tmp:/tmp", *(f"{source}:{target}" for target, source in job.settings.mounts.items())])
    options = [f"--container-image={job.settings.image}", f"--container-mounts={mounts}", "--no-container-mount-home"]
    return "".join(f" {shlex.quote(option)}" for option in options)
