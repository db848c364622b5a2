"""The mark by which a file that commands write is known again, so that they replace their own files and no other."""

from __future__ import annotations

from pathlib import Path

from verl_tim.diagnosis.errors import DiagnosisError

MARK = "written by verl-tim"
"""Near the beginning or the end of every page, JSON file, picture, option and dump that a command writes and may write
again."""
MARK_KEY = "about"  # in JSON, the first key
_NEAR = 4096  # bytes, from the beginning or the end, in which the mark stands


def mark(command: str) -> dict[str, str]:
    """The first entry of a JSON document."""
    return {MARK_KEY: f"{MARK} {command}"}


def refuse_foreign(*paths: Path, key: str = "--out") -> None:
    """Refuse to replace what no command wrote.

    Args:
        paths: to be written; those that are not there are fine.
        key: the option that says where.

    Raises:
        DiagnosisError: one is there without the mark; names it.
        OSError: one cannot be read.
    """
    for path in paths:
        if not path.is_file():
            continue
        if not _is_marked(path):
            raise DiagnosisError(
                f"{path.absolute()} is there already, and no verl-tim that marks its files wrote it",
                "move it away, or name another place; what is not marked is not replaced",
                key=key,
            )


def _is_marked(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(_NEAR)
        # Parquet keeps what is said of a file, and a zip archive its comment, at the end
        file.seek(max(0, path.stat().st_size - _NEAR))
        return MARK.encode() in head or MARK.encode() in file.read()
