"""`verl-tim train`: compose, prepare, check, and run verl's own trainer, with its log in the run folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, before_the_start, print_json, print_text, stderr, stdout, table

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tim.launch.matrix import Matrix
    from verl_tim.launch.process import Outcome
    from verl_tim.launch.side_by_side import RunState

NAME = "train"
HELP = (
    "Train with verl.\n\n"
    "[dim]verl-tim train recipe=cpu_grpo rollout=vexact correction=none trainer.total_training_steps=20[/]\n\n"
    "Groups: rollout, trainer, correction, routing_replay, task, model, cluster, tracker; any key of verl or tim: may "
    "follow.\n\n"
    "[dim]verl-tim train recipe=dense_grpo +matrix=paper    [not dim]every run of the paper's comparison[/][/]"
)


def command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, by name or recipe=, then Hydra overrides."),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="One run for each of several values: data.seed=1,2,3.")
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Starts again, from the last checkpoint, after a dead process or node: tim.restarts."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Of several runs, so many side by side on this machine; see docs/recipes.md."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Of several runs: what runs then is ended, and goes on with the same command."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Stop before the start and print the resolved config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train."""
    with before_the_start():  # importing takes seconds
        from verl_tim.launch.matrix import asks_for_several
        from verl_tim.launch.start import ready
        from verl_tim.training.correction_config import of_run

    if restarts is not None:
        overrides = [*(overrides or []), f"tim.restarts.limit={restarts}"]
    if multirun or asks_for_several(overrides or []):
        limits = None if at_once is None and minutes is None else (at_once or 1, minutes)
        raise typer.Exit(_several(overrides or [], limits, dry_run=dry_run, as_json=as_json))
    if at_once is not None or minutes is not None:
        with bad_input():
            raise _one_run()
    with bad_input(), before_the_start():
        stderr().print("[dim]composing and checking[/]")
        config = ready(overrides or [])
    stderr().print(of_run(config).describe(), style="dim", markup=False, soft_wrap=True)
    if dry_run:
        from omegaconf import OmegaConf

        print_json(OmegaConf.to_container(config)) if as_json else print_text(OmegaConf.to_yaml(config))
        return
    with bad_input():
        outcome = run(config, label=str(config.trainer.experiment_name))
    if outcome.exit_code != 0:
        explain_failure(outcome, go_on=how_to_go_on(config))
    print_json(summary(config, outcome)) if as_json else show(config, outcome)
    raise typer.Exit(outcome.exit_code)


def _one_run() -> Exception:
    from verl_tim.launch.errors import LaunchError

    remedy = "ask for several runs: +matrix=NAME, or -m with swept values"
    return LaunchError.of("--at-once, --minutes", "are for several runs, and this is one", remedy)


def _several(overrides: list[str], limits: tuple[int, float | None] | None, *, dry_run: bool, as_json: bool) -> int:
    """Every run of a matrix or a sweep; the exit code.

    Args:
        limits: (runs at once, minutes for all); None: one after another, each shown step by step.
    """
    began = time.monotonic()
    from verl_tim.launch.compose import split_recipe
    from verl_tim.launch.matrix import matrix_of, prepared, run_all
    from verl_tim.launch.restarts import again
    from verl_tim.launch.start import ready_of_several

    with bad_input():
        with before_the_start():
            matrix = matrix_of(*split_recipe(overrides))
        if limits is not None and not dry_run:
            return _side_by_side(matrix, limits, began, as_json=as_json)
        with before_the_start():
            stderr().print("[dim]composing and checking every run[/]")
            others = _tell_changed(matrix)
            configs = prepared(matrix, ready_of_several())
    if dry_run:
        _list_runs(matrix, set(configs), others, as_json=as_json)
        return 0

    ended: dict[str, Outcome] = {}

    def one(config: DictConfig, name: str) -> int:
        ended[name] = outcome = run(again(config), label=name)
        if outcome.exit_code != 0:
            explain_failure(outcome, go_on="the same command goes on with it")
        return outcome.exit_code

    def say(line: str) -> None:
        stderr().print(line, markup=False, soft_wrap=True)

    def shown(name: str) -> None:
        if not as_json:
            show(configs[name], ended[name])

    with bad_input():
        code = run_all(matrix, configs, one, say, shown)
    if as_json:
        runs = [{"run": name, **summary(configs[name], outcome)} for name, outcome in ended.items()]
        not_run = [name for name in configs if name not in ended]
        found = {"exit_code": code, "folder": str(matrix.folder), "changed": others}
        print_json({**found, "runs": runs, "not_run": not_run})
    return code


def _tell_changed(matrix: Matrix) -> dict[str, dict[str, Any]]:
    """Finished runs that would be others now, said on stderr: run -> key -> its values then and now."""
    from verl_tim.launch.changed import as_json, changed, in_words
    from verl_tim.launch.start import composed_of

    found = changed(matrix, composed_of)
    for line in in_words(matrix, found):
        stderr().print(line, style="yellow", markup=False, soft_wrap=True)
    return as_json(found)


def _side_by_side(matrix: Matrix, limits: tuple[int, float | None], began: float, *, as_json: bool) -> int:
    """The runs of a matrix, several at once and within a time, and the table of what became of them; the exit code.

    Composing the runs, and making models and data, is part of the time, and is ended with it.
    """
    from verl_tim.commands.several import RunsProgress, failures, not_begun, runs_table, time_is_up
    from verl_tim.launch.exit_code import INTERRUPTED, TIME_IS_UP
    from verl_tim.launch.matrix import prepared, unfinished
    from verl_tim.launch.process import TimeIsUp, stop_requests, within
    from verl_tim.launch.side_by_side import at_first, run_side_by_side
    from verl_tim.launch.start import ready_of_several

    at_once, minutes = limits

    def left() -> float | None:
        return None if minutes is None else 60 * minutes - (time.monotonic() - began)

    stderr().print("[dim]composing and checking every run[/]")
    states: list[RunState] = []
    others: dict[str, dict[str, Any]] = {}
    try:
        with stop_requests(), within(left()), before_the_start():
            others = _tell_changed(matrix)
            configs = prepared(matrix, ready_of_several())
        with RunsProgress(stderr()) as progress:
            states, code = run_side_by_side(
                matrix, configs, at_once=at_once, seconds=left(), on_change=progress.on_change
            )
    except TimeIsUp:
        stderr().print("the time was up before the first run: composing, or making models and data, took all of it")
        code = TIME_IS_UP
    except KeyboardInterrupt:
        code = INTERRUPTED
    states = states or at_first(matrix, {cell.name: None for cell in unfinished(matrix)})
    if as_json:
        runs = [state.to_dict() for state in states]
        print_json({"exit_code": code, "folder": str(matrix.folder), "changed": others, "runs": runs})
    else:
        stdout().print(runs_table(states, title=str(matrix.folder)))
    up = time_is_up(states, minutes) if code == TIME_IS_UP and minutes is not None else []
    for line in (*failures(states), *not_begun(states), *up):
        stderr().print(line, markup=False, soft_wrap=True)
    return code


def _list_runs(matrix: Matrix, left: set[str], others: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "run": cell.name,
                    "done": cell.name not in left,
                    "changed": others.get(cell.name, {}),
                    "overrides": cell.words,
                }
                for cell in matrix.cells
            ]
        )
        return
    # the last three overrides are the run's group at trackers, its name and its folder
    rows = [(cell.name, "" if cell.name in left else "yes", " ".join(cell.words[:-3])) for cell in matrix.cells]
    table(str(matrix.folder), ("run", "done", "overrides"), rows)


def run(config: DictConfig, *, label: str) -> Outcome:
    """Run verl to its end, with a live line on stderr, as often as `tim.restarts` says."""
    from verl_tim.launch.restarts import run_with_restarts

    console = stderr()
    return run_with_restarts(
        config,
        lambda attempt: _run_once(attempt, label=label),
        lambda line: console.print(line, markup=False, soft_wrap=True),
    )


def _run_once(config: DictConfig, *, label: str) -> Outcome:
    """Claim the run folder and run verl in it to its end."""
    from pathlib import Path

    from verl_tim.commands.progress import RunProgress
    from verl_tim.launch.process import run_verl, shell_line, verl_command
    from verl_tim.launch.run_folder import begins_anew, claim

    console = stderr()
    anew = begins_anew(config)
    folder = claim(config).path
    if anew:
        console.print(anew, markup=False, soft_wrap=True)
    console.print(f"[dim]run folder {folder}\n{shell_line(verl_command(Path(folder)))}[/]", soft_wrap=True)
    with RunProgress(console, label, config.trainer.total_training_steps) as progress:
        return run_verl(folder, on_step=progress.on_step, on_start=progress.on_start)


def summary(config: DictConfig, outcome: Outcome) -> dict[str, Any]:
    """What --json says of a run, also of one that failed."""
    from verl_tim.commands.headline import headline

    return {
        "exit_code": outcome.exit_code,
        "run_dir": config.tim.run_dir,
        "choices": dict(config.tim.choices),
        "seconds": round(outcome.seconds, 1),
        "attempts": outcome.attempts,
        "log": str(outcome.log),
        "cause": list(outcome.cause),
        **headline(outcome.steps),
    }


def show(config: DictConfig, outcome: Outcome) -> None:
    """The table of a run that ended well, on stdout."""
    from verl_tim.commands.headline import headline, number, reward_title

    if outcome.exit_code != 0:
        return
    values = headline(outcome.steps)
    choices = config.tim.choices
    rows = [
        ("rollout / trainer / correction", f"{choices.rollout} / {choices.trainer} / {choices.correction}"),
        *([("routing replay", choices.routing_replay)] if choices.get("routing_replay", "off") != "off" else []),
        ("steps", values["steps"] if outcome.steps else "not known: nothing was logged to the file (tracker=console)"),
        (reward_title(values["reward_steps"]), f"{number(values['reward_first'])} -> {number(values['reward_last'])}"),
        ("validation, first and last", f"{number(values['validation_first'])} -> {number(values['validation_last'])}"),
        ("largest mismatch, nats", number(values["mismatch_max"])),
        ("seconds per step, median", number(values["seconds_per_step"])),
        ("seconds in all", f"{outcome.seconds:.0f}"),
        *([("attempts", str(outcome.attempts))] if outcome.attempts > 1 else []),
        ("run folder", config.tim.run_dir),
    ]
    table(str(config.trainer.experiment_name), ("", ""), rows)


def how_to_go_on(config: DictConfig) -> str:
    """What to type after a run that was stopped."""
    import shlex

    from verl_tim.launch.restarts import checkpoint_in_words, resuming
    from verl_tim.launch.run_folder import KEY, has_checkpoint

    folder = str(config.tim.run_dir)
    if has_checkpoint(config):
        words = f"trainer.resume_mode=auto {shlex.quote(f'{KEY}={folder}')}"
        return f"to go on from {checkpoint_in_words(resuming(config))}: the same command with {words}"
    return (
        "it left no checkpoint to go on from (trainer.save_freq): to begin anew give another folder "
        f"({KEY}=runs/NAME), or remove {folder}"
    )


def explain_failure(outcome: Outcome, *, go_on: str) -> None:
    """The end of the traceback and where the log is, on stderr.

    Args:
        go_on: how to go on with a run that was stopped.
    """
    from rich.text import Text

    from verl_tim.launch.exit_code import INTERRUPTED

    console = stderr()
    if outcome.exit_code == INTERRUPTED:
        console.print("[bold]stopped[/]; verl and its Ray cluster are ended")
    else:
        console.print(f"[bold red]verl ended with exit code {outcome.exit_code}[/]")
        for line in outcome.cause:
            console.print(Text("  " + line), soft_wrap=True)
    console.print(f"the whole log: {outcome.log}", soft_wrap=True)
    if outcome.exit_code == INTERRUPTED:
        console.print(go_on, markup=False, soft_wrap=True)
