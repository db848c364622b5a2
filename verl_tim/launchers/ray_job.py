"""`ray job submit` to a Ray cluster that runs already."""

from __future__ import annotations

import json
from typing import Any

from verl_tim.launchers.job import TRAIN, Job
from verl_tim.launchers.shell import driver, prelude, render, time_for_the_run, time_limit, words

# What both ways of quoting that Ray's command line has had (list2cmdline, shlex.join) leave as it is.
_SPOILT = frozenset('$`"\\!\n')


def runtime_env(job: Job) -> dict[str, Any]:
    """The job's runtime environment, without secrets."""
    # verl sets some of the same names for its workers; without this Ray refuses what is said twice
    return {"env_vars": {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", **job.environment}}


def driver_script(job: Job) -> str:
    """What the job runs: set-up commands (on the head alone: the other nodes run already), preflight, the run.

    In one line, which can be read in Ray's dashboard, where no command or word has lines of its own.
    """
    limit = time_for_the_run(job)
    if job.settings.setup or any("\n" in word for word in job.words):
        return f"{prelude(job, variables=False)}\n{driver(job, stop_after=limit)}"
    look, run = words([*job.preflight, *job.words]), words([*time_limit(limit), *TRAIN, *job.words])
    return f"{look} && exec {run}"


def script(job: Job) -> str:
    """The text of a shell script that submits the job and follows its log."""
    text = driver_script(job)
    return render(
        "ray_job.sh.j2",
        job=job,
        script=text,
        plain=not _SPOILT & set(text),
        runtime_env=json.dumps(runtime_env(job)),
        metadata=json.dumps({"run": job.name, "run_dir": job.run_dir}),
    )
