"""`verl-tim quickstart`: two runs that differ in the rollout alone, verified and compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import Failure, bad_input, before_the_start, print_json, stderr, stdout, table, writing
from verl_tim.commands.places import refuse_foreign

if TYPE_CHECKING:
    from omegaconf import DictConfig

NAME = "quickstart"
HELP = (
    "Build model and data, run GRPO with an exact rollout and with one that mismatches, verify, compare. "
    "No GPU, no download, minutes. Finished runs are not repeated; the exactness gate is."
)

RECIPE = "cpu_grpo"
GATE = "verify.json"
_COLUMNS = ("validation, first and last", "largest mismatch, nats", "s per step, median")
EXACT, PEERS = "vexact", ("stock", "vllm")
WHAT = {
    "vexact": "equal to the trainer's log-probs, bit for bit",
    "stock": "the same engine on stock PyTorch kernels",
    "vllm": "vLLM, as most people run it",
}


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides for both runs.")
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where the two runs and the comparison go.")] = Path(
        "runs/quickstart"
    ),
    against: Annotated[
        str,
        typer.Option(help="The one that mismatches: stock, or vllm (without a GPU: scripts/vllm_cpu.sh first)."),
    ] = PEERS[0],
    skip_verify: Annotated[bool, typer.Option("--skip-verify", help="Leave the exactness gate out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run the quickstart."""
    from verl_tim.launch.errors import LaunchError

    started = time.monotonic()
    folder = folder.absolute()
    with bad_input(), before_the_start():
        _say("1/5", "model and data: made once, then found again")
        if against not in PEERS:
            raise LaunchError.of("--against", f"is {against!r}", f"choose one of {', '.join(PEERS)}")
        files = ["compare.json", "compare.html", *([] if skip_verify else [GATE])]
        refuse_foreign(*(folder / file for file in files), key="--dir")
        configs = {rollout: prepared(folder, rollout, overrides or []) for rollout in (EXACT, against)}
    for number, (rollout, config) in enumerate(configs.items(), start=2):
        _say(f"{number}/5", f"GRPO with rollout={rollout}: {WHAT[rollout]}")
        with bad_input():
            run_or_reuse(config, label=rollout)
    verified: dict[str, Any] | None = None
    if not skip_verify:
        _say("4/5", "the exactness gate")
        if (folder / GATE).is_file():
            stderr().print("[dim]it runs each time: what it tests is the code that is installed now[/]")
        verified = verify(folder / EXACT, folder / GATE)
    _say("5/5", "comparison")
    from verl_tim.commands.compare import compare_runs, write_comparison

    with bad_input():
        comparison = compare_runs([folder / rollout for rollout in configs])
    with bad_input(), writing("--dir"):
        json_path, html_path = write_comparison(comparison, folder, option="--dir")
    seconds = time.monotonic() - started
    if as_json:
        print_json(
            {
                "runs": {rollout: str(folder / rollout) for rollout in configs},
                "verify": verified,
                "compare": str(json_path),
                "page": str(html_path),
                "seconds": round(seconds, 1),
            }
        )
    else:
        stdout().print(comparison.table())
        _summary(folder, configs)
        stdout().print(f"\nThe page: {html_path}", soft_wrap=True)
    _say("done", f"in {seconds:.0f} s")
    if verified is not None and verified["exit_code"] != 0:
        raise typer.Exit(verified["exit_code"])


def prepared(folder: Path, rollout: str, overrides: list[str]) -> DictConfig:
    """The config of one of the two runs, resolved and checked; the folder itself may hold that run already."""
    from verl_tim.launch.start import composed, make_ready

    config = composed(
        [
            f"recipe={RECIPE}",
            f"rollout={rollout}",
            f"tim.run_dir='{folder / rollout}'",
            *overrides,
        ]
    )
    make_ready(config, folder_is_free=False)
    return config


def run_or_reuse(config: DictConfig, *, label: str) -> None:
    """Run it, unless its folder holds the finished run. What was interrupted is started anew.

    Raises LaunchError where the folder holds a run with other settings; ends the command with verl's exit code where
    the run fails.
    """
    import shutil

    from verl_tim.commands import train
    from verl_tim.launch.errors import Finding, LaunchError
    from verl_tim.launch.run_folder import KEY, State, state_of

    state, differing = state_of(config)
    run_dir = Path(config.tim.run_dir)
    if state is State.FINISHED:
        stderr().print(f"[dim]{run_dir} holds this run, finished; not repeated[/]", soft_wrap=True)
        return
    if state is State.OTHER:
        raise LaunchError.of(
            KEY,
            f"{run_dir} holds a run with other settings (first difference: {differing})",
            "remove that folder, or give another one with --dir",
        )
    if state is State.UNFINISHED:
        stderr().print(f"[dim]{run_dir} holds this run, interrupted; started anew[/]", soft_wrap=True)
        shutil.rmtree(run_dir)
    outcome = train.run(config, label=label)
    if outcome.exit_code != 0:
        train.explain_failure(outcome, go_on="the same command begins this run anew; finished ones are not repeated")
        problem = "\n".join([f"{label}: verl ended with exit code {outcome.exit_code}", *outcome.cause])
        raise Failure([Finding(KEY, problem, f"read {outcome.log}")], outcome.exit_code)


def verify(run_dir: Path, result: Path) -> dict[str, Any]:
    """Run `verl-tim verify` on a run folder; its JSON goes to `result`. Returns {"exit_code", "report"}."""
    import json
    import subprocess
    import sys

    from verl_tim.diagnosis.own_file import mark

    process = subprocess.run(
        [sys.executable, "-m", "verl_tim.cli", "verify", str(run_dir), "--json", "--requests", "12", "--tokens", "24"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    said: dict[str, Any] = {"exit_code": process.returncode}
    report = None
    if process.stdout.strip():
        try:
            report = json.loads(process.stdout)
        except json.JSONDecodeError:  # it ended in words; they are all there is to see why
            said["stdout"] = process.stdout
    content = {**mark(NAME), **(report or said)}
    with bad_input(), writing("--dir"):
        result.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    passed = process.returncode == 0
    stderr().print(
        ("[green]every bit agrees[/]" if passed else f"[bold red]verify ended with {process.returncode}[/]")
        + f"; report: {result}",
        soft_wrap=True,
    )
    return {"exit_code": process.returncode, "report": report}


def _summary(folder: Path, configs: dict[str, DictConfig]) -> None:
    from verl_tim.commands.headline import headline, number, reward_title
    from verl_tim.launch.process import MetricsReader

    rows = []
    steps = None  # all runs of the quickstart have as many
    for rollout in configs:
        values = headline(MetricsReader(folder / rollout / "metrics.jsonl").new_steps())
        steps = values["reward_steps"]
        rows.append(
            (
                rollout,
                f"{number(values['reward_first'])} -> {number(values['reward_last'])}",
                f"{number(values['validation_first'])} -> {number(values['validation_last'])}",
                number(values["mismatch_max"]),
                number(values["seconds_per_step"]),
            )
        )
    table("", ("rollout", reward_title(steps), *_COLUMNS), rows)
    stdout().print("[dim]largest mismatch: the largest |d| of all steps[/]")


def _say(number: str, text: str) -> None:
    stderr().print(f"[bold]{number}[/]  {text}")
