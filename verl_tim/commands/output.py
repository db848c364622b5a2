"""What every command prints with: results on stdout, everything else on stderr, so that --json can be piped.

With --json there is one document on stdout, also where there is no result: `CommandWithJson` sees to that for all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperCommand

# The exit code of a command that was asked for something it cannot do.
BAD_INPUT = 2


# Of a file or a pipe: wide enough that a table neither cuts numbers off nor folds names (rich takes 80 there).
_UNSEEN_WIDTH = 240


def stdout() -> Console:
    """Console for results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Console for progress, notes and errors."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    """As wide as the terminal, or as COLUMNS says."""
    told = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, highlight=False, width=None if told else _UNSEEN_WIDTH)


def print_json(value: Any) -> None:
    """One JSON document on stdout, nothing else: a command calls it once, as the last thing that can fail."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; cells may hold rich renderables."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(cell if hasattr(cell, "__rich_console__") else str(cell) for cell in row))
    stdout().print(result)


class Failure(typer.Exit):
    """Ends a command without a result. What was wrong is on stderr already.

    Attributes:
        findings: what was wrong; each has `key`, `problem` and `remedy`.
        exit_code: BAD_INPUT for what the user gave, another where the work failed.
    """

    def __init__(self, findings: Sequence[Any], exit_code: int = BAD_INPUT) -> None:
        super().__init__(exit_code)
        self.findings = tuple(findings)


class CommandWithJson(TyperCommand):
    """A command that, given --json, has a document on stdout also where it has no result.

    `{"error": {"exit_code": int, "problems": [{"key", "problem", "remedy"}, ...]}}`, of what cannot be used, of Ctrl-C,
    and of any exception; its traceback goes to stderr as it would without --json. The option's parameter is called
    `as_json`.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with bad_input():
                return super().invoke(ctx)
        except Failure as failure:
            if ctx.params.get("as_json"):
                _print_error(failure.exit_code, failure.findings)
            raise
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise  # a result's exit code, or a usage error of typer's
        except KeyboardInterrupt:
            from verl_tim.launch.exit_code import INTERRUPTED

            _print_end(ctx, INTERRUPTED, "it was interrupted, and has no result", "run it again")
            raise  # typer ends with that code, too
        except Exception as error:
            _print_end(ctx, 1, f"{type(error).__name__}: {error}", "the traceback on stderr says where")
            raise


def _print_end(ctx: Any, exit_code: int, problem: str, remedy: str) -> None:
    from verl_tim.launch.errors import Finding

    if ctx.params.get("as_json"):
        _print_error(exit_code, [Finding(ctx.command_path, problem, remedy)])


def _print_error(exit_code: int, findings: Sequence[Any]) -> None:
    problems = [{"key": one.key, "problem": one.problem, "remedy": one.remedy} for one in findings]
    print_json({"error": {"exit_code": exit_code, "problems": problems}})


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn what the user gave and cannot be used into a message and exit code 2, without a traceback."""
    from verl_tim.launch.errors import LaunchError

    try:
        yield
    except LaunchError as error:
        report(error.findings)
        raise Failure(error.findings) from None


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
