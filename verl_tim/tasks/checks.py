"""Does a data file hold what verl reads of a row? Each error names the configuration key and the remedy.

A parquet file is read once, for only that shows a torn one; of the rows only the first are looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tim.home import expanded
from verl_tim.tasks.errors import InputError

_ROWS_LOOKED_AT = 64


def check_dataset(
    path: str | os.PathLike[str],
    *,
    key: str = "data.train_files",
    prompt_key: str = "prompt",
    needs_ground_truth: bool = True,
) -> int:
    """Check a data file against what verl reads of a row.

    Args:
        path: a .parquet, .json or .jsonl file.
        key: the configuration key that named it, for messages.
        prompt_key: `data.prompt_key`.
        needs_ground_truth: False where a custom reward function does without.

    Returns:
        Its number of rows.

    Raises:
        InputError: no such file, not such a file, empty, a needed column missing or of a wrong form.
    """
    file = expanded(path)
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"{key}: {file} {kind}; give a parquet file, for instance one made by `verl-tim data`")
    rows, columns, count = _read_head(file, key)
    if count == 0:
        raise InputError(f"{key}: {file} has no rows")
    needed = [prompt_key, "data_source", *(["reward_model"] if needs_ground_truth else [])]
    missing = [name for name in needed if name not in columns]
    if missing:
        hint = "; data.prompt_key names the column of the prompts" if prompt_key in missing else ""
        raise InputError(
            f"{key}: {file} lacks column {', '.join(missing)} (it has {', '.join(columns)}); verl reads of a row: "
            f"{prompt_key} (list of {{role, content}}), data_source (string), reward_model ({{ground_truth}}){hint}"
        )
    for index, row in enumerate(rows):
        _check_row(row, index, file, key, prompt_key, needs_ground_truth)
    return count


def _read_head(file: Path, key: str) -> tuple[list[dict[str, Any]], list[str], int]:
    if file.suffix == ".parquet":
        status = file.stat()
        try:
            return _read_parquet(file, status.st_size, status.st_mtime_ns)
        # UnicodeDecodeError: a text that is not UTF-8, met when rows become Python objects
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{key}: {file} is torn, or no parquet file: {_first_line(error)}") from error
    if file.suffix in (".json", ".jsonl"):
        try:
            with file.open(encoding="utf-8") as stream:
                rows = [json.loads(line) for line in islice(stream, _ROWS_LOOKED_AT) if line.strip()]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{key}: {file} does not hold one JSON object a line: {error}") from error
        if not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{key}: {file} does not hold one JSON object a line")
        with file.open("rb") as stream:
            count = sum(1 for line in stream if line.strip())
        return rows, sorted({name for row in rows for name in row}), count
    raise InputError(f"{key}: {file} is neither .parquet nor .json nor .jsonl, which is what verl reads")


@lru_cache(maxsize=32)
def _read_parquet(file: Path, size: int, modified: int) -> tuple[list[dict[str, Any]], list[str], int]:
    """First rows, columns, number of rows; reads the whole file. Size and time of change are there for the cache."""
    rows: list[dict[str, Any]] = []
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        for batch in parquet.iter_batches():
            if len(rows) < _ROWS_LOOKED_AT:
                rows += batch.slice(0, _ROWS_LOOKED_AT - len(rows)).to_pylist()
        return rows, parquet.schema_arrow.names, parquet.metadata.num_rows


def _check_row(
    row: Mapping[str, Any], index: int, file: Path, key: str, prompt_key: str, needs_ground_truth: bool
) -> None:
    prompt = row.get(prompt_key)
    if not _is_chat(prompt):
        raise InputError(
            f"{key}: {file} row {index}: {prompt_key} is {_short(prompt)}; verl needs a list of messages, "
            '[{"role": "user", "content": ...}]'
        )
    if not isinstance(row.get("data_source"), str):
        raise InputError(
            f"{key}: {file} row {index}: data_source is {_short(row.get('data_source'))}; verl needs a string"
        )
    if needs_ground_truth:
        reward_model = row.get("reward_model")
        if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
            raise InputError(
                f"{key}: {file} row {index}: reward_model is {_short(reward_model)}; verl needs "
                '{"style": "rule", "ground_truth": ...}'
            )


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or len(prompt) == 0:
        return False
    return all(isinstance(item, Mapping) and item.get("role") and item.get("content") is not None for item in prompt)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
