"""What every command prints with: results on stdout, everything else on stderr, so that --json can be piped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

# The exit code of a command that was asked for something it cannot do.
BAD_INPUT = 2


def stdout() -> Console:
    """Console for results."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """Console for progress, notes and errors."""
    return Console(file=sys.stderr, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout, nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; cells may hold rich renderables."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(cell if hasattr(cell, "__rich_console__") else str(cell) for cell in row))
    stdout().print(result)


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn what the user gave and cannot be used into a message and exit code 2, without a traceback."""
    from verl_tim.launch.errors import LaunchError

    try:
        yield
    except LaunchError as error:
        report(error.findings)
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def writing(key: str = "--out") -> Iterator[None]:
    """Turn a place that cannot be written to into a finding of the option that named it; for within `bad_input`."""
    from verl_tim.launch.errors import LaunchError

    try:
        yield
    except OSError as error:
        problem = f"cannot write {error.filename or ''}: {error.strerror or error}"
        raise LaunchError.of(key, problem, "name a folder that can be written to, or a file in one") from error


def report(findings: Sequence[Any], *, colour: str = "red") -> None:
    """Findings on stderr, key first."""
    from rich.text import Text

    console = stderr()
    for finding in findings:
        console.print(Text.assemble((f"{finding.key}: ", f"bold {colour}"), finding.problem))
        console.print(Text.assemble(("  -> ", "bold"), finding.remedy))
