"""`verl-tim compare`: runs side by side, as a table, a page with plots and a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout

if TYPE_CHECKING:
    from verl_tim.diagnosis.compare import Comparison

NAME = "compare"
HELP = "Set runs side by side: what differs besides the rollout, reward, mismatch, speed; page with plots and JSON."
NEEDS_ARGUMENTS = True


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="What to call a run, in the order of the folders; default: the folder's name."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.html and compare.json.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the table.")] = False,
) -> None:
    """Compare."""
    with bad_input():
        comparison = compare_runs(runs, name)
    json_path, html_path = comparison.write(out)
    if as_json:
        print_json(comparison.to_dict())
    else:
        stdout().print(comparison.table())
    stderr().print(f"page: {html_path.absolute()}\nJSON: {json_path.absolute()}", soft_wrap=True)


def compare_runs(runs: list[Path], names: list[str] | None = None) -> Comparison:
    """The comparison; LaunchError for folders that hold no run, or names that do not fit."""
    from verl_tim.diagnosis.compare import compare
    from verl_tim.diagnosis.manifest import ManifestError
    from verl_tim.diagnosis.run_folder import RunFolderError
    from verl_tim.launch.errors import LaunchError

    try:
        return compare(runs, names)
    except (RunFolderError, ManifestError) as error:
        raise LaunchError.of("RUN", str(error), "give run folders: what tim.run_dir named when they ran") from error
    except ValueError as error:
        raise LaunchError.of("RUN", str(error), "see verl-tim compare --help") from error
