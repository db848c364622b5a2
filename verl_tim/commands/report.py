"""`verl-tim report`: one run as a page, with what its token dumps say, and a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout, table, writing
from verl_tim.commands.places import inside, refuse_foreign

if TYPE_CHECKING:
    from verl_tim.diagnosis.report import WorstToken

NAME = "report"
HELP = (
    "One run as a page: curves, |d| over place and length, its histogram, the worst tokens in their text, router "
    "flips per layer, the correction's effect, what ran."
)

SHOWN = 5  # tokens and layers; the page has more
CONTEXT = 12  # letters on either side of a token


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[
        list[int] | None, typer.Option(help="Dumped step to read; may be repeated. Default: ten, evenly over the run.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html and report.json; default: the run's. Those of an earlier call are replaced."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the table.")] = False,
) -> None:
    """Report."""
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.diagnosis.formats import percent, short
    from verl_tim.diagnosis.report import Report
    from verl_tim.launch.errors import LaunchError

    out = out or inside(run)
    with bad_input():
        refuse_foreign(out / "report.json", out / "report.html")
        try:
            report = Report.read(run, step)
        except DiagnosisError as error:
            raise LaunchError.of_input(error, "RUN", "give a run folder: what tim.run_dir named") from error
    with bad_input(), writing():
        json_path, html_path = report.write(out)
    if as_json:
        print_json(report.to_dict())
    else:
        verdict = report.comparison.verdict
        stdout().print(verdict.lead)
        for alert in verdict.alerts:
            stdout().print(f"! {alert}", style="bold red", markup=False)
        for note in verdict.notes:
            stdout().print(f"- {note}", style="yellow", markup=False)
        rows = [(name, percent(v) if name.startswith("above") else short(v)) for name, v in report.tail.items()]
        if rows:
            table(f"|d| of {len(report.known):,} dumped tokens, nats", ("statistic", "value"), rows)
        _print_worst(report.worst[:SHOWN])
        if report.flips:
            most = sorted(report.flips.items(), key=lambda item: -item[1])[:SHOWN]
            layers = ", ".join(f"layer {layer} {percent(share)}" for layer, share in most)
            stdout().print(f"tokens with another set of experts, of {len(report.flips)} layers: {layers}")
        if report.no_dumps:
            stderr().print(f"- {report.no_dumps}", style="yellow")
    stderr().print(f"page: {html_path.absolute()}\nJSON: {json_path.absolute()}", soft_wrap=True)


def _print_worst(tokens: Sequence[WorstToken]) -> None:
    from rich.text import Text

    from verl_tim.diagnosis.formats import one_line, short

    rows = [
        (
            short(token.delta),
            # as Text: what a model wrote is no markup
            Text.assemble(*((one_line(part), style) for part, style in _in_context(token))),
            short(token.old_log_prob),
            short(token.rollout_log_prob),
            f"{token.step}, {token.row}, {token.place + 1}",
        )
        for token in tokens
    ]
    if rows:
        table("The tokens with the largest |d|", ("d", "token in its text", "log p", "log q", "step, row, place"), rows)


def _in_context(token: WorstToken) -> tuple[tuple[str, str], ...]:
    return (token.before[-CONTEXT:], ""), (token.text, "bold reverse"), (token.after[:CONTEXT], "")
