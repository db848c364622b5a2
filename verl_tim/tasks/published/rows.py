"""The rows of a data file: parquet, JSON lines or csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tim.tasks.errors import InputError

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def column_names(file: Path, key: str) -> list[str]:
    """The columns of a file; of JSON lines those of the first row. Errors as of `read_rows`."""
    if file.suffix == ".parquet":
        return _open_parquet(file, key).schema_arrow.names
    if file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", newline="") as stream:
            return next(csv.reader(stream), [])
    first = next(read_rows(file, (), key), None)
    return [] if first is None else list(first)


def count_rows(file: Path, key: str) -> int | None:
    """How many rows a parquet file has; None for text, where only reading it tells."""
    return _open_parquet(file, key).metadata.num_rows if file.suffix == ".parquet" else None


def read_rows(file: Path, columns: Sequence[str], key: str) -> Iterator[dict[str, Any]]:
    """Row after row, in the file's order; of a parquet file only `columns` are read (top-level names; none: all).

    Raises InputError that begins with `key`: another kind of file, a torn one, a line that is no JSON object.
    """
    if file.suffix == ".parquet":
        parquet = _open_parquet(file, key)
        try:
            for batch in parquet.iter_batches(columns=list(columns) or None):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{key}: {file} is torn: {_first_line(error)}; fetch or make it again") from error
    elif file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", newline="") as stream:
            try:
                yield from csv.DictReader(stream, strict=True)
            except (csv.Error, UnicodeDecodeError) as error:
                raise InputError(f"{key}: {file} is no csv in UTF-8: {error}") from error
    elif file.suffix in (".jsonl", ".json"):
        yield from _json_lines(file, key)
    else:
        raise InputError(f"{key}: {file} is none of {', '.join(SUFFIXES)}; convert it, or rename it if it is one")


def _json_lines(file: Path, key: str) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as stream:
        number = 0
        try:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"{key}: {file} line {number} is no JSON object; every line must be one row")
                yield row
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{key}: {file} line {number} is no JSON: {error}; the file must hold one JSON object a line"
            ) from error


def _open_parquet(file: Path, key: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{key}: {file} is torn, or no parquet file: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
