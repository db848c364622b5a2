"""`verl-tim compare`: runs side by side, as a table, a page with plots and a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, first_line, print_json, stderr, stdout, writing
from verl_tim.commands.places import beside, refuse_foreign

if TYPE_CHECKING:
    from verl_tim.diagnosis.compare import Comparison, Options

NAME = "compare"
HELP = (
    "Set runs side by side against the zero-mismatch one: what differs besides the rollout, which signal leaves the "
    "baseline's band first, reward, mismatch, speed; page with plots and JSON.\n\n"
    "A RUN is a run folder, a folder of TensorBoard events, a folder of a wandb offline run, or a metrics.jsonl."
)


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs to compare.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="What to call a run, in the order of the folders; default: the folder's name."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Run or group to hold the others against; default: the first with vexact.")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=PATTERN",
            help="Runs whose name matches the pattern are one setting: mean and band. "
            "Default: runs that are equal but for the seed.",
        ),
    ] = None,
    by_seed: Annotated[bool, typer.Option(help="Group runs that are equal but for the seed.")] = True,
    smooth: Annotated[
        str, typer.Option(metavar="FORM", help="off, ema:WEIGHT or rolling:STEPS; drawn over the faint values.")
    ] = "off",
    band_z: Annotated[float, typer.Option(help="Half-width of the baseline's band in standard deviations.")] = 3.0,
    band_window: Annotated[int, typer.Option(help="Steps that the band's standard deviation is taken over.")] = 21,
    band_steps: Annotated[int, typer.Option(help="Logged steps in a row outside the band that count.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for compare.html and compare.json; default: the one that holds the runs, or the current one "
            "where they lie apart. Those of an earlier call are replaced; where they were of other runs, it says so."
        ),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Write compare.png too.")] = False,
    to_wandb: Annotated[
        bool,
        typer.Option("--wandb", help="Log page and files to wandb, beside the runs: an artifact and a panel."),
    ] = False,
    wandb_project: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Project for --wandb; default: that of the runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the table.")] = False,
) -> None:
    """Compare."""
    # wandb's folder is none to stand among the runs
    wandb_folder, out = out or Path.cwd(), out or beside(runs)
    with bad_input():
        refuse_foreign(*(out / f"compare.{kind}" for kind in ("json", "html", *(["png"] if png else []))))
        options = _options(
            baseline=baseline,
            groups=tuple(group or ()),
            by_seed=by_seed,
            smooth=smooth,
            band={"z": band_z, "window": band_window, "consecutive": band_steps},
        )
        comparison = compare_runs(runs, name, options)
    with bad_input(), writing():
        paths = write_comparison(comparison, out, png=png)
    if not as_json:
        stdout().print(comparison.table())
    for title, path in zip(("JSON", "page", "picture"), paths, strict=False):
        stderr().print(f"{title}: {path.absolute()}", soft_wrap=True)
    if to_wandb or wandb_project:
        with bad_input():
            stderr().print(f"wandb: {_send(comparison, paths, wandb_folder, wandb_project)}", soft_wrap=True)
    if as_json:
        print_json(comparison.to_dict())


def _send(comparison: Comparison, paths: list[Path], folder: Path, project: str | None) -> str:
    from verl_tim.diagnosis.wandb_report import WandbReportError, send
    from verl_tim.launch.errors import LaunchError

    try:
        return send(comparison, paths, folder, project)
    except WandbReportError as error:
        problem, _, remedy = str(error).partition(": ")
        raise LaunchError.of("--wandb", problem, remedy) from error
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):
            raise
        remedy = "wandb login, or WANDB_MODE=offline and later wandb sync"
        raise LaunchError.of("--wandb", first_line(error), remedy) from error


def write_comparison(comparison: Comparison, folder: Path, *, png: bool = False, option: str = "--out") -> list[Path]:
    """Write it (`Comparison.write`), and say on stderr where that replaces the comparison of other runs.

    Args:
        option: that names the folder.

    Raises:
        OSError: the folder cannot be written to.
    """
    earlier = _others(comparison, folder)
    paths = comparison.write(folder, png=png)
    if earlier is not None:
        kept = f"{option} with another folder keeps both"
        stderr().print(f"replaced: {earlier} in {folder.absolute()}; {kept}", markup=False, soft_wrap=True)
    return paths


def _others(comparison: Comparison, folder: Path) -> str | None:
    """The comparison that a folder holds, if it is of other runs; where its JSON does not tell, it may be."""
    import json

    path = folder / "compare.json"
    if not path.is_file():
        return "an earlier comparison" if (folder / "compare.html").is_file() else None
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        names, places = [str(run["name"]) for run in runs], {run.get("path") for run in runs}
    except (ValueError, KeyError, TypeError, AttributeError):
        return "an earlier comparison"
    if places == {str(run.path) for run in comparison.runs}:
        return None
    from verl_tim.diagnosis.formats import listed

    return f"the comparison of {listed(names)}"


def compare_runs(runs: list[Path], names: list[str] | None = None, options: Options | None = None) -> Comparison:
    """The comparison; LaunchError for folders without run or metric, and names, groups or a baseline that misfit."""
    from verl_tim.diagnosis.compare import compare
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.launch.errors import Finding, LaunchError

    try:
        comparison = compare(runs, names, options)
    except DiagnosisError as error:
        raise LaunchError.of_input(error, "RUN", "give run folders: what tim.run_dir named when they ran") from error
    empty = [problem for run in comparison.runs if (problem := run.nothing_logged()) is not None]
    if empty:
        remedy = "leave it out; its train.log says why it logged nothing, if it has ended"
        raise LaunchError([Finding("RUN", problem, remedy) for problem in empty])
    return comparison


def _options(*, smooth: str, band: dict[str, Any], **more: Any) -> Options:
    from verl_tim.diagnosis.compare import Options
    from verl_tim.diagnosis.early_warning import BandRule
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.diagnosis.smoothing import Smoothing
    from verl_tim.launch.errors import LaunchError

    try:
        return Options(smoothing=Smoothing.parse(smooth), band=BandRule(**band), **more)
    except DiagnosisError as error:
        raise LaunchError.of_input(error, "compare", "see verl-tim compare --help") from error
