"""`verl-tim data`: a task's train and validation files in verl's parquet schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stdout, table

NAME = "data"
HELP = "Make the parquet files of a task (or find them again), with no download."
NEEDS_ARGUMENTS = False


def command(
    task: Annotated[str | None, typer.Argument(help="Name of the task; without one the tasks are listed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in the cache, by content.")] = None,
    train_size: Annotated[int, typer.Option(help="Rows to train on.")] = 4096,
    val_size: Annotated[int, typer.Option(help="Rows to validate on.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    difficulty: Annotated[
        list[str] | None, typer.Option(help="Setting of the generator, NAME=VALUE; may be repeated.")
    ] = None,
    prompt_style: Annotated[
        str, typer.Option(help="bare, or answer_tags for models that follow instructions.")
    ] = "bare",
    cache_dir: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("~/.cache/verl_tim"),
    overwrite: Annotated[bool, typer.Option(help="Replace an --out made from other settings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make data."""
    from verl_tim.tasks.catalog import TASKS

    if task is None:
        rows = [
            {"task": row.name, "summary": row.summary, "difficulty": dict(row.difficulty)} for row in TASKS.values()
        ]
        if as_json:
            print_json(rows)
        else:
            table(
                "Tasks",
                ("task", "what", "difficulty"),
                [(row["task"], row["summary"], _words(row["difficulty"])) for row in rows],
            )
        return
    from verl_tim.tasks.dataset import build_dataset

    with bad_input(), input_errors("data"):
        paths = build_dataset(
            task,
            out,
            train_size=train_size,
            val_size=val_size,
            seed=seed,
            difficulty=parse_settings("--difficulty", difficulty),
            prompt_style=prompt_style,
            cache_dir=cache_dir,
            overwrite=overwrite,
        )
    if as_json:
        print_json({"train": str(paths.train), "validation": str(paths.validation), "card": str(paths.card)})
    else:
        stdout().print(f"data.train_files={paths.train}\ndata.val_files={paths.validation}", soft_wrap=True)


def parse_settings(option: str, words: list[str] | None) -> dict:
    """`["min_terms=3"]` as `{"min_terms": 3}`; values are YAML."""
    import yaml

    from verl_tim.launch.errors import LaunchError

    settings = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals:
            raise LaunchError.of(option, f"{word!r} is no setting", f"write {option} NAME=VALUE")
        settings[name] = yaml.safe_load(value)
    return settings


def input_errors(key: str):
    """Context in which the tasks' own complaints become findings of the command line."""
    from contextlib import contextmanager

    from verl_tim.launch.errors import LaunchError
    from verl_tim.tasks.errors import InputError

    @contextmanager
    def context():
        try:
            yield
        except InputError as error:
            raise LaunchError.of(f"verl-tim {key}", str(error), f"see verl-tim {key} --help") from error

    return context()


def _words(settings: object) -> str:
    assert isinstance(settings, dict)
    return ", ".join(f"{name}={value}" for name, value in settings.items())
