"""Files of the user's own: a copy of a published set, or data of any other kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.problem import ANSWERS
from verl_tim.tasks.published.rows import SUFFIXES, column_names
from verl_tim.tasks.published.sources import PUBLISHED, SPLITS, HubFile, PublishedSet, Split, get_published

# The name of data that are no published set.
FILES = "files"

_ROLES = ("problem", "answer", "id")

_OWN = PublishedSet(
    name=FILES,
    summary="data of your own: --from train=FILE --from validation=FILE --column problem=COLUMN --column answer=COLUMN",
    repo="",
    revision="",
    files=(),
    columns=MappingProxyType({"problem": "problem", "answer": "answer"}),
    answer="text",
    data_source=FILES,
    prompt="boxed",
    licence="yours to know",
)


def local_set(
    name: str,
    files: Mapping[str, Path],
    *,
    columns: Mapping[str, str] | None = None,
    answer: str | None = None,
    data_source: str | None = None,
) -> PublishedSet:
    """How local files are read: as the published set `name` is, but for what the arguments say.

    Args:
        name: of a published set, or `files`.
        files: by split.
        columns: `problem`, `answer` and perhaps `id`, by the name of the column.
        answer: how the true answer stands in its column, a key of `problem.ANSWERS`.
        data_source: what the rows say; by default the set's, or `files`.

    Raises:
        InputError: an unknown set, split, role or rule; a file that does not exist or lacks a column.
    """
    base = _OWN if name == FILES else get_published(name)
    unknown = sorted(set(files) - set(SPLITS))
    if unknown:
        raise InputError(f"--from: unknown split {', '.join(map(repr, unknown))}; known splits: {', '.join(SPLITS)}")
    if not files:
        raise InputError("--from: no file given; give --from train=FILE, --from validation=FILE or both")
    strange = sorted(set(columns or {}) - set(_ROLES))
    if strange:
        raise InputError(f"--column: unknown role {', '.join(map(repr, strange))}; known roles: {', '.join(_ROLES)}")
    if answer is not None and answer not in ANSWERS:
        raise InputError(f"--answer: unknown rule {answer!r}; known rules: {', '.join(ANSWERS)}")
    kept = {role: column for role, column in base.columns.items() if role != "id"}
    source = replace(
        base,
        files=tuple(HubFile(split, str(files[split])) for split in SPLITS if split in files),
        columns=MappingProxyType({**kept, **(columns or {})}),
        answer=answer or base.answer,
        data_source=data_source or base.data_source,
    )
    for file in source.files:
        _check_file(file.split, Path(file.path), source.columns)
    return source


def _check_file(split: Split, file: Path, columns: Mapping[str, str]) -> None:
    key = f"--from {split}"
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"{key}: {file} {kind}; give a file of {', '.join(SUFFIXES)}")
    if file.suffix not in SUFFIXES:
        raise InputError(f"{key}: {file} is none of {', '.join(SUFFIXES)}; convert it, or rename it if it is one")
    check_columns(column_names(file, key), columns, f"{key}: {file}")


def check_columns(there: Sequence[str], columns: Mapping[str, str], where: str) -> None:
    """Raises InputError for a column that is not there, with the ones that are and the option that maps them."""
    if not there:
        raise InputError(f"{where} has no rows")
    missing = {role: column for role, column in columns.items() if column.partition(".")[0] not in there}
    if missing:
        wanted = ", ".join(f"{column} ({role})" for role, column in missing.items())
        remedy = " ".join(f"--column {role}=COLUMN" for role in missing)
        raise InputError(f"{where} lacks column {wanted}; it has {', '.join(there)}: say which it is, {remedy}")


def known_sets() -> tuple[str, ...]:
    """The names that `verl-tim data` takes for published data."""
    return (*PUBLISHED, FILES)
