"""What is wrong with a YAML that cannot be read: where, and what mends it."""

from __future__ import annotations

from pathlib import Path

import yaml

_DUPLICATE = "duplicate key"


def explain(error: yaml.YAMLError | UnicodeDecodeError, file: Path | None = None) -> tuple[str, str]:
    """Problem and remedy, both with the place.

    Args:
        file: what was read; without it the one that the error names, as where Hydra reads many.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a byte that no text or no YAML holds, met before lines are counted
        named: object = getattr(error, "name", "the file")
        place = str(file or named)
        return f"{_one_line(getattr(error, 'reason', error))} ({place})", f"save {place} as plain text in UTF-8"
    place = str(file or mark.name)
    begin = getattr(error, "context_mark", None)
    begun = f"; begun in line {begin.line + 1}" if begin is not None and begin.line != mark.line else ""
    problem = _one_line(getattr(error, "problem", None) or getattr(error, "context", None) or error)
    mends = (
        "keep one of the two"
        if _DUPLICATE in problem
        else "look at its indentation (spaces, no tabs), for brackets and quotes that are not closed, and for a value "
        "that holds a colon or a # and is not in quotes"
    )
    line = mark.line + 1
    return f"{problem} ({place}, line {line}, column {mark.column + 1}{begun})", f"mend {place}, line {line}: {mends}"


def _one_line(words: object) -> str:
    return " ".join(str(words).split())
