"""Published data sets in verl's parquet schema, with a manifest that says where every byte came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from verl_tim.tasks.artifact import cache_folder, cached_folder, file_sha256, make_once
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.distinct import distinct
from verl_tim.tasks.published.hub import FetchedFile, fetch
from verl_tim.tasks.published.local import check_columns, local_set
from verl_tim.tasks.published.problem import Problem, prompt_of, read_problem
from verl_tim.tasks.published.prompt import ANSWER_FORMATS, check_style
from verl_tim.tasks.published.rows import column_names, count_rows, read_rows
from verl_tim.tasks.published.sources import HubFile, PublishedSet, Split, get_published
from verl_tim.tasks.schema import verl_schema

CARD = "dataset.json"
FORMAT = 1  # part of the content key: raise it when the same settings shall give other rows

# `answer_format` tells this package's reward where to look.
_SCHEMA = verl_schema(
    [
        ("split", pa.string()),
        ("index", pa.int64()),
        ("question", pa.string()),
        ("answer_format", pa.string()),
        ("id", pa.string()),
    ]
)


@dataclass(frozen=True)
class PublishedPaths:
    """Where a data set stands. A split it does not have is None."""

    folder: Path
    train: Path | None
    validation: Path | None
    card: Path


def build_published(
    name: str,
    out_dir: str | os.PathLike[str] | None = None,
    *,
    prompt_style: str | None = None,
    revision: str | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    files: Mapping[str, Path] | None = None,
    columns: Mapping[str, str] | None = None,
    answer: str | None = None,
    data_source: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> PublishedPaths:
    """Make, or find again, the parquet files of a published data set, or of files of the user's own.

    No problem occurs twice in a file (`distinct`). The folder appears when it is whole; what it holds is checked
    against its manifest whenever it is found again. Found again, it needs no network, not even where the revision is a
    branch: the manifest says which commit was fetched, and `overwrite` fetches anew.

    Args:
        name: of `sources.PUBLISHED`, or `files` with `files`.
        out_dir: folder to make; by default one in the cache, named after the content key.
        prompt_style: of `prompt.STYLES`; by default the set's.
        revision: of the repository; by default the pinned one.
        train_size, val_size: the first so many problems; by default all.
        files: local files by split, in place of the hub's.
        columns, answer, data_source: how local files are read (`local.local_set`).
        cache_dir: `tim.cache_dir`; by default ~/.cache/verl_tim. Downloads are kept in its folder downloads.
        overwrite: make it again, and replace an `out_dir` made from other settings.
        progress: show a progress bar.

    Raises:
        InputError: an unknown name, style, revision or column, a row without problem or answer, a file that cannot be
            fetched or is not the pinned one, an `out_dir` that holds something else.
    """
    source, spec = _resolve(
        name,
        prompt_style=prompt_style,
        revision=revision,
        train_size=train_size,
        val_size=val_size,
        files=files,
        columns=columns,
        answer=answer,
        data_source=data_source,
    )
    downloads = cache_folder(cache_dir) / "downloads"
    folder = Path(out_dir) if out_dir is not None else cached_folder("data", name, spec, cache_dir)
    folder = make_once(
        folder,
        CARD,
        spec,
        lambda work: _write(work, source, spec, downloads=None if files is not None else downloads, progress=progress),
        overwrite=overwrite,
        anew=overwrite,
    )
    paths = {split: folder / f"{split}.parquet" for split in source.splits}
    return PublishedPaths(folder, paths.get("train"), paths.get("validation"), folder / CARD)


def published_spec(name: str, **settings: Any) -> dict[str, Any]:
    """What a data set is a function of, checked; fetches nothing. Arguments and errors as of `build_published`."""
    return _resolve(name, **settings)[1]


def _resolve(
    name: str,
    *,
    prompt_style: str | None = None,
    revision: str | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    files: Mapping[str, Path] | None = None,
    columns: Mapping[str, str] | None = None,
    answer: str | None = None,
    data_source: str | None = None,
) -> tuple[PublishedSet, dict[str, Any]]:
    if files is not None:
        if revision is not None:
            raise InputError("--revision: local files have none; leave it out, or leave --from out")
        source = local_set(name, files, columns=columns, answer=answer, data_source=data_source)
        where: dict[str, Any] = {
            "files": {
                file.split: {"name": Path(file.path).name, "sha256": file_sha256(Path(file.path))}
                for file in source.files
            }
        }
    else:
        published = get_published(name)
        if columns or answer or data_source:
            raise InputError(f"--column, --answer, --data-source: those of {name} are known; they belong to --from")
        if revision is not None and (not isinstance(revision, str) or not revision.strip()):
            raise InputError(f"revision: must be a commit or branch of {published.repo}, got {revision!r}")
        source = published.at(revision or published.revision)
        where = {
            "repo": source.repo,
            "revision": source.revision,
            "files": {file.split: {"path": file.path, "sha256": file.sha256} for file in source.files},
        }
    style = prompt_style or source.prompt
    check_style(style)
    sizes: dict[Split, int | None] = {"train": train_size, "validation": val_size}
    for split, key in (("train", "train_size"), ("validation", "val_size")):
        size = sizes[split]  # type: ignore[index]
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InputError(f"{key}: must be an integer of at least 1, or null for all, got {size!r}")
    spec = {
        "format": FORMAT,
        "set": source.name,
        "source": where,
        "columns": dict(source.columns),
        "answer": source.answer,
        "template": source.template,
        "data_source": source.data_source,
        "prompt_style": style,
        "sizes": {split: sizes[split] for split in source.splits},
        "versions": {"pyarrow": pa.__version__},
    }
    return source, spec


def _write(
    work: Path, source: PublishedSet, spec: Mapping[str, Any], *, downloads: Path | None, progress: bool
) -> dict[str, Any]:
    """The parquet files, and what the manifest says. `downloads` is None for local files."""
    # all of them first: a file that cannot be fetched is said before minutes of work
    fetched = {file.split: _get(source, file, downloads, progress=progress) for file in source.files}
    local = downloads is None
    manifest: dict[str, Any] = {"sources": {}, "counts": {}}
    for file in source.files:
        got = fetched[file.split]
        counts = _write_split(work, source, spec, file, got, progress=progress)
        manifest["sources"][file.split] = {
            "path": str(got.path) if local else file.path,
            "sha256": got.sha256,
            **({} if local else {"repo": source.repo, "revision": source.revision, "commit": got.commit}),
        }
        manifest["counts"][file.split] = counts
    if not local:
        manifest |= {"pinned": source.pinned, "licence": source.licence, "inferred": list(source.inferred)}
    return {"data_source": source.data_source, **manifest}


def _get(source: PublishedSet, file: HubFile, downloads: Path | None, *, progress: bool) -> FetchedFile:
    if downloads is not None:
        return fetch(source, file, downloads, progress=progress)
    path = Path(file.path)
    return FetchedFile(path, file_sha256(path), "")


def _write_split(
    work: Path,
    source: PublishedSet,
    spec: Mapping[str, Any],
    file: HubFile,
    got: FetchedFile,
    *,
    progress: bool,
) -> dict[str, int]:
    key = f"{source.name} {file.split}"
    check_columns(column_names(got.path, key), source.columns, f"{key}: {got.path}")
    found = distinct(_problems(source, file, got, key, progress=progress))
    if not found.problems:
        raise InputError(f"{key}: {got.path} has no problem left ({found.counts})")
    size = spec["sizes"][file.split]
    if size is not None and size > len(found.problems):
        name = "train_size" if file.split == "train" else "val_size"
        raise InputError(f"{name}: is {size}, and {source.name} has {len(found.problems)}; ask for fewer, or for all")
    style = spec["prompt_style"]
    rows = [
        _to_row(source, problem, file.split, index, style, f"{got.path} problem {index}")
        for index, problem in enumerate(found.problems[:size])
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), work / f"{file.split}.parquet", compression="zstd")
    return {**found.counts, "rows_written": len(rows)}


def _problems(source: PublishedSet, file: HubFile, got: FetchedFile, key: str, *, progress: bool) -> Iterator[Problem]:
    columns = sorted({column.partition(".")[0] for column in source.columns.values()})
    rows = read_rows(got.path, columns, key)
    bar = tqdm(
        rows, total=count_rows(got.path, key), desc=f"data {key}", unit="row", disable=not progress, mininterval=0.5
    )
    for index, row in enumerate(bar):
        yield read_problem(row, source.columns, source.answer, source.template, f"{key}: {got.path} row {index}")


def _to_row(source: PublishedSet, problem: Problem, split: Split, index: int, style: str, where: str) -> dict[str, Any]:
    asked = source.template if style == "published" else style
    return {
        "data_source": source.data_source,
        "prompt": prompt_of(problem, style, source.template, where),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.text,
            # a published prompt of unknown words may ask for any of them
            "answer_format": ANSWER_FORMATS[asked] if asked is not None else "auto",
            "id": problem.row_id,
        },
    }
