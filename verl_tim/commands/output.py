"""What every command prints with: results on stdout, everything else on stderr, so that --json can be piped.

With --json there is one document on stdout, also where there is no result: `CommandWithJson` sees to that for all.
A stdout that takes no more (a full disk, a closed pipe) ends a command with one line and an exit code of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

import typer
from rich.console import Console
from typer.core import TyperCommand

from verl_tim.launch.exit_code import INTERRUPTED, RESULT_LOST

# The exit code of a command that was asked for something it cannot do.
BAD_INPUT = 2


# Of a file or a pipe: wide enough that a table neither cuts numbers off nor folds names (rich takes 80 there).
_UNSEEN_WIDTH = 240


class ResultLost(typer.Exit):
    """Ends a command whose result stdout would not take; the line on stderr is written."""

    def __init__(self, error: OSError | None) -> None:
        super().__init__(RESULT_LOST)
        reason = "it is closed" if error is None else error.strerror or error
        # stderr may be the same full disk; the exit code still says it
        with contextlib.suppress(OSError):
            line = f"stdout: {reason}: the result is lost; run it again into a file or pipe that takes it"
            stderr().print(line, markup=False, soft_wrap=True)


class _Results:
    """sys.stdout, for results: what it would not take raises `ResultLost`."""

    def write(self, text: str) -> int:
        if sys.stdout is None:  # the caller's >&-
            raise ResultLost(None)
        try:
            written = sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            _drop_the_rest()
            raise ResultLost(error) from None
        return written

    def flush(self) -> None:
        """Nothing is left: `write` flushes."""

    def isatty(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def _drop_the_rest() -> None:
    """What stdout still holds, the interpreter would try to write once more at its end, and complain."""
    with contextlib.suppress(OSError):  # a stdout without a file behind it, as tests have
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def stdout() -> Console:
    """Console for results."""
    return _console(cast(IO[str], _Results()))


def stderr() -> Console:
    """Console for progress, notes and errors."""
    return _console(sys.stderr)


def _console(stream: IO[str] | None) -> Console:
    """As wide as the terminal, or as COLUMNS says; of a stream that the caller closed, None."""
    told = "COLUMNS" in os.environ or (stream is not None and stream.isatty())
    return Console(file=stream, highlight=False, width=None if told else _UNSEEN_WIDTH)


def print_json(value: Any) -> None:
    """One JSON document on stdout, nothing else: a command calls it once, as the last thing that can fail."""
    print_text(json.dumps(value, indent=2) + "\n")


def print_text(text: str) -> None:
    """Text on stdout as it is."""
    _Results().write(text)


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout; cells may hold rich renderables. Columns without names have no row for them."""
    from rich.table import Table

    result = Table(title=title, title_justify="left", show_header=any(columns))
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
    # said on stderr, and the exit code stays the failure's
    with contextlib.suppress(ResultLost):
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
def before_the_start() -> Iterator[None]:
    """Ctrl-C in what comes before anything is started is one line, and stays an interrupt."""
    try:
        yield
    except KeyboardInterrupt:
        stderr().print("stopped before anything was started")
        raise


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
    """Findings on stderr, key first; a terminal wraps them, so that a long path can be copied."""
    from rich.text import Text

    console = stderr()
    for finding in findings:
        console.print(Text.assemble((f"{finding.key}: ", f"bold {colour}"), finding.problem), soft_wrap=True)
        console.print(Text.assemble(("  -> ", "bold"), finding.remedy), soft_wrap=True)


def first_line(error: BaseException) -> str:
    """What a library's exception says first; its class, where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
