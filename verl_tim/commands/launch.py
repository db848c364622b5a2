"""`verl-tim launch`: a run on a cluster, as a file for its scheduler."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, before_the_start, print_text, stderr, writing

if TYPE_CHECKING:
    from verl_tim.launchers.job import Job

NAME = "launch"
HELP = "Start a run on a cluster: a file for Slurm, KubeRay, SkyPilot or ray job submit, printed, written or submitted."

app = typer.Typer(no_args_is_help=True)

Words = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="As for `verl-tim train`.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the file there instead of printing it.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand it to the scheduler, whose command must be here.")]
Preflight = Annotated[
    bool, typer.Option("--preflight/--no-preflight", help="Look at every node before the run (verl-tim preflight).")
]


@app.command("ray-job", help="A job for a Ray cluster that runs already, by `ray job submit`.")
def ray_job(words: Words = None, output: Output = None, submit: Submit = False, preflight: Preflight = True) -> None:
    """A shell script."""
    _launch("ray-job", words or [], output, submit=submit, preflight=preflight)


@app.command(help="A batch script for sbatch, which starts Ray on its nodes.")
def slurm(words: Words = None, output: Output = None, submit: Submit = False, preflight: Preflight = True) -> None:
    """A batch script."""
    _launch("slurm", words or [], output, submit=submit, preflight=preflight)


@app.command(help="A RayJob for the KubeRay operator, with a Ray cluster of its own.")
def kuberay(words: Words = None, output: Output = None, submit: Submit = False, preflight: Preflight = True) -> None:
    """A manifest."""
    _launch("kuberay", words or [], output, submit=submit, preflight=preflight)


@app.command(help="A SkyPilot task, for any cloud or cluster that SkyPilot knows.")
def skypilot(words: Words = None, output: Output = None, submit: Submit = False, preflight: Preflight = True) -> None:
    """A task."""
    _launch("skypilot", words or [], output, submit=submit, preflight=preflight)


def _launch(launcher: str, words: list[str], output: Path | None, *, submit: bool, preflight: bool) -> None:
    from verl_tim.launch.errors import LaunchError
    from verl_tim.launch.matrix import asks_for_several
    from verl_tim.launchers import kuberay, ray_job, skypilot, slurm
    from verl_tim.launchers import submit as scheduler
    from verl_tim.launchers.job import job_of
    from verl_tim.launchers.lint import LintError, lint

    render = {
        "ray-job": ray_job.script,
        "slurm": slurm.script,
        "kuberay": kuberay.manifest,
        "skypilot": skypilot.task,
    }[launcher]
    with bad_input(), before_the_start():
        if asks_for_several(words):
            raise LaunchError.of("+matrix", "asks for several runs", "launch its runs one by one")
        if output is not None and (output.is_dir() or not output.parent.is_dir()):
            problem = "is a folder" if output.is_dir() else f"there is no folder {output.parent}"
            raise LaunchError.of("--output", f"{output}: {problem}", "give a file in a folder that is there")
        stderr().print("[dim]composing and checking[/]")
        job = job_of(words, looks=preflight)
        text = render(job)
        try:
            tools = lint(launcher, text, job)
        except LintError as error:
            raise LaunchError.of(
                "tim.launch", f"makes a file that cannot run: {error}", "see tim.launch.setup"
            ) from error
    _say(job, tools)
    if output is not None:
        with bad_input(), writing("--output"):
            output.write_text(text, encoding="utf-8")
        stderr().print(f"[dim]written: {output}[/]", soft_wrap=True)
    elif not submit:
        print_text(text)
    if submit:
        with tempfile.TemporaryDirectory(prefix="verl-tim-launch-") as folder, bad_input():
            file = output
            if file is None:
                file = Path(folder) / f"{job.name}{'.sh' if text.startswith('#!') else '.yaml'}"
                file.write_text(text, encoding="utf-8")
            code = scheduler.submit(launcher, file, job)
        raise typer.Exit(code)


def _say(job: Job, tools: tuple[str, ...]) -> None:
    """On stderr: what the file is about, and what nobody could look at here."""
    console = stderr()

    def line(text: str, style: str = "dim") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    line(f"{job.nodes} node(s) of {job.gpus} GPU(s), run folder {job.run_dir}; checked by {', '.join(tools)}")
    if job.environment:
        line(f"variables in the file: {', '.join(job.environment)}")
    if job.secrets:
        line(f"variables by reference, where they are set: {', '.join(job.secrets)}")
    if job.unseen:
        line(f"not on this machine, so preflight must look at them: {', '.join(job.unseen)}", "yellow")
