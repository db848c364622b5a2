"""`verl-tim baseline`: what mismatch is usual for a model on this hardware, for `tim.gate.baseline` of later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout, table, writing
from verl_tim.commands.places import beside, refuse_foreign

NAME = "baseline"
HELP = "Store the usual mismatch of a model, dtype, hardware and pair of backends; later runs are watched against it."


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders of one set-up.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; default: baseline.json in the folder that holds the runs, or in the current one where "
            "they lie apart. That of an earlier call is replaced."
        ),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Steps to leave out at the beginning of each run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the table.")] = False,
) -> None:
    """Store."""
    from verl_tim.diagnosis.baseline import baseline_of
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.diagnosis.formats import short
    from verl_tim.launch.errors import LaunchError

    out = out or beside(runs) / "baseline.json"
    with bad_input():
        refuse_foreign(out)
        try:
            baseline = baseline_of(runs, skip=skip)
        except DiagnosisError as error:
            raise LaunchError.of_input(error, "RUN", "give finished runs of one model and set-up") from error
    with bad_input(), writing():
        baseline.write(out)
    if as_json:
        print_json(baseline.to_dict())
    else:
        rows = [
            (name, short(value.mean), short(value.largest), "no" if not value.reference else short(value.reference))
            for name, value in baseline.metrics.items()
        ]
        table(
            f"{len(runs)} run{'s' * (len(runs) > 1)}, {baseline.steps} step{'s' * (baseline.steps > 1)}",
            ("metric", "mean", "largest", "watched against"),
            rows,
        )
        stdout().print(f"tim.gate.baseline={out.absolute()}", soft_wrap=True)
    for one in baseline.left_out:
        stderr().print(f"- left out: {one}", style="yellow", markup=False, soft_wrap=True)
    stderr().print(f"baseline: {out.absolute()}", soft_wrap=True)
