"""`verl-tim calibrate`: rejection thresholds from the token dumps of two runs, as a ready `correction=` option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, report, stderr, stdout, table, writing
from verl_tim.commands.places import refuse_foreign

NAME = "calibrate"
HELP = (
    "Choose a rejection rule and its threshold from the token dumps of a mismatching and of a zero-mismatch run of "
    "one recipe; writes correction/calibrated_NAME.yaml with the curves it was chosen from."
)


def command(
    mismatch_run: Annotated[Path, typer.Argument(metavar="RUN_MISMATCH", help="Run folder with token dumps.")],
    exact_run: Annotated[Path, typer.Argument(metavar="RUN_EXACT", help="The same recipe without mismatch.")],
    max_share: Annotated[
        float, typer.Option(help="Share of the mismatching run's tokens that may be rejected.")
    ] = 0.01,
    rule: Annotated[list[str] | None, typer.Option(help="Rule to try; may be repeated. Default: all.")] = None,
    step: Annotated[list[int] | None, typer.Option(help="Dumped step to read; may be repeated. Default: all.")] = None,
    weights: Annotated[bool, typer.Option(help="Add token weights capped at 2.")] = True,
    name: Annotated[str | None, typer.Option(help="Of the option: calibrated_NAME. Default: the run's.")] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for correction/, calibrate.html and calibrate.json; default: calibration in the current one. "
            "Those of an earlier call are replaced."
        ),
    ] = Path("calibration"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the table.")] = False,
) -> None:
    """Calibrate."""
    import re

    from verl_tim.diagnosis.calibrate import CalibrationError, calibrate, write_json
    from verl_tim.diagnosis.calibrate_page import bound, render_calibration
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.diagnosis.formats import percent, short
    from verl_tim.launch.errors import Finding, LaunchError

    label = re.sub(r"\W+", "_", name or mismatch_run.absolute().name)
    option = out / "correction" / f"calibrated_{label}.yaml"
    with bad_input():
        refuse_foreign(out / "calibrate.json", out / "calibrate.html", option)
        try:
            found = calibrate(mismatch_run, exact_run, max_share=max_share, rules=rule or None, steps=step)
        except DiagnosisError as error:
            remedy = "give two run folders with token dumps, of one recipe: the mismatching run, then the exact one"
            raise LaunchError.of_input(error, "RUN", remedy) from error
    with bad_input(), writing():
        write_json(found, out / "calibrate.json")
        (out / "calibrate.html").write_text(render_calibration(found), encoding="utf-8")
    stderr().print(f"page: {(out / 'calibrate.html').absolute()}", soft_wrap=True)
    if not as_json:
        rows = [
            ("no rejection", "", "0 %", short(found.none.skew), percent(found.none.effective)),
            *(
                (c.rule, bound(c.threshold), percent(c.mismatch.rejected), short(c.mismatch.skew), percent(e))
                for c in found.best_per_rule()
                for e in [c.mismatch.effective]
            ),
        ]
        columns = ("rule", "threshold", "rejected", "skew left", "effective size")
        table(f"The best admitted threshold of each rule: {found.criterion()}", columns, rows)
        for note in found.notes:
            stderr().print(f"- {note}", style="yellow")
    with bad_input(), writing():
        try:
            path = found.write_yaml(out.absolute(), f"calibrated_{label}", weights=weights)
        except CalibrationError as error:
            # an answer, and no bad input: the right correction is none
            remedy = f"the curves are in {out / 'calibrate.html'}"
            if option.is_file():
                remedy += f"; {option} is of an earlier call, and no longer what the data say: delete it"
            report([Finding("calibrate", str(error), remedy)], colour="yellow")
            if as_json:
                print_json(found.to_dict())
            raise typer.Exit(1) from None
    stderr().print(f"correction: {path}", soft_wrap=True)
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(f"\nUse it with\n  {how_to_use(path)}", soft_wrap=True, markup=False)


def how_to_use(path: Path) -> str:
    """The words of a command line that compose the written option."""
    folder = path.parent.parent
    searchpath = f"pkg://verl.trainer.config,pkg://verl_tim.configs,file://{folder}"
    return f"verl-tim train ... correction={path.stem} 'hydra.searchpath=[{searchpath}]'"
