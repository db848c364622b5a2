"""Parquet data sets in verl's schema, out of reasoning-gym's generators."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from verl_tim.tasks.artifact import cached_folder, make_once
from verl_tim.tasks.catalog import Task, generator_version, get_task, resolve_difficulty
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.problems import VALIDATION_SHARE, Pool, Problem, stream_problems
from verl_tim.tasks.schema import verl_schema

CARD = "dataset.json"
FORMAT = 1  # part of the content key: raise it when the same settings shall give other rows

# How a problem is put to the model. `bare`: the question alone. `answer_tags`: reasoning-gym's own system prompt,
# which asks for step-by-step work and an <answer> tag; for models that can follow it.
PROMPT_STYLES = ("bare", "answer_tags")

# Draws without one new problem after which a pool counts as exhausted.
_PATIENCE_PER_PROBLEM = 50
_PATIENCE = 20_000

_SCHEMA = verl_schema(
    [("split", pa.string()), ("index", pa.int64()), ("question", pa.string()), ("metadata", pa.string())]
)


@dataclass(frozen=True)
class DatasetPaths:
    """Where a data set stands: what to give verl as `data.train_files` and `data.val_files`, and the card beside
    them."""

    folder: Path
    train: Path
    validation: Path
    card: Path


def build_dataset(
    task: str,
    out_dir: str | os.PathLike[str] | None = None,
    *,
    train_size: int,
    val_size: int,
    seed: int = 0,
    difficulty: Mapping[str, Any] | None = None,
    prompt_style: str = "bare",
    cache_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> DatasetPaths:
    """Make, or find again, `train.parquet` and `validation.parquet` of a task.

    Equal settings give equal bytes. No problem occurs twice, nor in both files; which of the two a problem may be in
    depends on its text alone (`problems.pool_of`), so files of different seeds do not mix either. Every row holds
    what the verifier needs.

    Args:
        task: a name of `catalog.TASKS`.
        out_dir: folder to make; by default one in the cache, named after the content key.
        train_size, val_size: rows; val_size may be 0.
        seed: of the stream of problems.
        difficulty: settings of the generator, over the task's defaults (`catalog.resolve_difficulty`).
        prompt_style: see PROMPT_STYLES.
        cache_dir: `tim.cache_dir`; by default ~/.cache/verl_tim.
        overwrite: replace an `out_dir` made from other settings.
        progress: show a progress bar.

    Raises:
        InputError: unknown task, setting or style; a size or seed that cannot be; a task that has fewer distinct
            problems than asked for; an `out_dir` that holds something else.
    """
    row = get_task(task)
    spec = dataset_spec(
        task, train_size=train_size, val_size=val_size, seed=seed, difficulty=difficulty, prompt_style=prompt_style
    )
    folder = Path(out_dir) if out_dir is not None else cached_folder("data", row.name, spec, cache_dir)
    folder = make_once(folder, CARD, spec, lambda work: _write(work, row, spec, progress=progress), overwrite=overwrite)
    return DatasetPaths(folder, folder / "train.parquet", folder / "validation.parquet", folder / CARD)


def dataset_spec(
    task: str,
    *,
    train_size: int,
    val_size: int,
    seed: int = 0,
    difficulty: Mapping[str, Any] | None = None,
    prompt_style: str = "bare",
) -> dict[str, Any]:
    """What a data set is a function of, checked; makes nothing. Arguments and errors as of `build_dataset`."""
    row = get_task(task)
    _check_sizes(train_size=train_size, val_size=val_size, seed=seed)
    if prompt_style not in PROMPT_STYLES:
        raise InputError(f"prompt_style: unknown style {prompt_style!r}; known styles: {', '.join(PROMPT_STYLES)}")
    return {
        "format": FORMAT,
        "task": row.name,
        "difficulty": resolve_difficulty(row, difficulty),
        "train_size": train_size,
        "val_size": val_size,
        "seed": seed,
        "prompt_style": prompt_style,
        "versions": {"reasoning-gym": generator_version(), "pyarrow": pa.__version__},
    }


def prompt_messages(question: str, prompt_style: str = "bare") -> list[dict[str, str]]:
    """The chat messages that put a question to the model."""
    messages = [{"role": "user", "content": question}]
    if prompt_style == "answer_tags":
        from reasoning_gym.utils import SYSTEM_PROMPTS

        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPTS["default"]})
    return messages


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 1 if name == "train_size" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}: must be an integer of at least {least}, got {value!r}")


def _write(work: Path, task: Task, spec: Mapping[str, Any], *, progress: bool) -> dict[str, Any]:
    wanted: dict[Pool, int] = {"train": spec["train_size"], "validation": spec["val_size"]}
    problems, counts = _collect(task, spec, wanted, progress=progress)
    for pool, chosen in problems.items():
        rows = [_to_row(task, problem, pool, index, spec["prompt_style"]) for index, problem in enumerate(chosen)]
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), work / f"{pool}.parquet", compression="zstd")
    return {
        "data_source": task.data_source,
        "counts": counts,
        "validation_pool": f"1 in {VALIDATION_SHARE} problems, by a hash of the question",
    }


def _collect(
    task: Task, spec: Mapping[str, Any], wanted: Mapping[Pool, int], *, progress: bool
) -> tuple[dict[Pool, list[Problem]], dict[str, int]]:
    found: dict[Pool, dict[str, Problem]] = {pool: {} for pool in wanted}
    counts = {"drawn": 0, "duplicates": 0, "not_solvable_by_own_answer": 0}
    since_last_new = 0
    stream = stream_problems(task, spec["difficulty"], spec["seed"])
    with tqdm(total=sum(wanted.values()), desc=f"data {task.name}", unit="problem", disable=not progress) as bar:
        while any(len(found[pool]) < size for pool, size in wanted.items()):
            problem = next(stream)
            counts["drawn"] += 1
            since_last_new += 1
            if since_last_new > _PATIENCE + _PATIENCE_PER_PROBLEM * bar.n:
                have = ", ".join(f"{len(found[pool])} of {size} {pool}" for pool, size in wanted.items())
                raise InputError(
                    f"train_size, val_size: task {task.name} has not enough distinct problems at this difficulty "
                    f"(found {have} "
                    f"in {counts['drawn']} draws); ask for fewer or widen the difficulty {dict(spec['difficulty'])}"
                )
            if problem is None:
                counts["not_solvable_by_own_answer"] += 1
                continue
            pool = problem.pool
            # identity is the text up to white space, as in pool_of
            identity = re.sub(r"\s+", " ", problem.question).strip()
            if identity in found[pool]:
                counts["duplicates"] += 1
            elif len(found[pool]) < wanted[pool]:
                found[pool][identity] = problem
                since_last_new = 0
                bar.update()
    return {pool: list(chosen.values()) for pool, chosen in found.items()}, counts


def _to_row(task: Task, problem: Problem, pool: Pool, index: int, prompt_style: str) -> dict[str, Any]:
    return {
        "data_source": task.data_source,
        "prompt": prompt_messages(problem.question, prompt_style),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": pool,
            "index": index,
            "question": problem.question,
            "metadata": problem.metadata_json,
        },
    }
