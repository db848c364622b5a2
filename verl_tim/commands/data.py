"""`verl-tim data`: a task's train and validation files in verl's parquet schema, made, fetched or converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_tim.commands.output import bad_input, print_json, stdout, table
from verl_tim.commands.published_data import build, say_where_from

NAME = "data"
HELP = "Make the parquet files of a task: from a seed, from the Hugging Face hub, or from files of yours."


def command(
    task: Annotated[
        str | None, typer.Argument(help="Name of a task or published set, or `files`; without one they are listed.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in the cache, by content.")] = None,
    train_size: Annotated[
        int | None, typer.Option(help="Rows to train on; default: 4096, of a published set all.")
    ] = None,
    val_size: Annotated[
        int | None, typer.Option(help="Rows to validate on; default: 128, of a published set all.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the problems; default: 0.")] = None,
    difficulty: Annotated[
        list[str] | None, typer.Option(help="Setting of the generator, NAME=VALUE; may be repeated.")
    ] = None,
    prompt_style: Annotated[
        str | None,
        typer.Option(
            help="bare, or answer_tags for models that follow instructions; of a published set published, boxed, "
            "answer_line, hash or bare (default: the set's own)."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of a published set's repository; default: the pinned one.")
    ] = None,
    from_files: Annotated[
        list[str] | None,
        typer.Option(
            "--from", help="train=FILE or validation=FILE: a parquet, jsonl or csv file instead of the hub's."
        ),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="With --from: problem=COLUMN, answer=COLUMN or id=COLUMN.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="With --from: how the answer stands in its column: text, after_hash or boxed.")
    ] = None,
    data_source: Annotated[
        str | None, typer.Option(help="With --from: data_source of the rows, by which verl reports validation.")
    ] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("~/.cache/verl_tim"),
    overwrite: Annotated[
        bool, typer.Option(help="Replace an --out made from other settings; fetch a published set anew.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make data."""
    from verl_tim.tasks.published.local import known_sets

    if task is None:
        _list(as_json=as_json)
        return
    published = task in known_sets()
    with bad_input(), input_errors("data"):
        _refuse(
            task,
            "has no generator" if published else "is made from a seed",
            {"--seed": seed, "--difficulty": difficulty}
            if published
            else {
                "--revision": revision,
                "--from": from_files,
                "--column": column,
                "--answer": answer,
                "--data-source": data_source,
            },
        )
        if published:
            paths, card = build(
                task,
                out,
                train_size=train_size,
                val_size=val_size,
                prompt_style=prompt_style,
                revision=revision,
                files={split: Path(file) for split, file in _pairs("--from", from_files).items()}
                if from_files or task == "files"
                else None,
                columns=_pairs("--column", column),
                answer=answer,
                data_source=data_source,
                cache_dir=cache_dir,
                overwrite=overwrite,
            )
        else:
            paths = _made(
                task,
                out,
                train_size=4096 if train_size is None else train_size,
                val_size=128 if val_size is None else val_size,
                seed=seed or 0,
                difficulty=parse_settings("--difficulty", difficulty),
                prompt_style=prompt_style or "bare",
                cache_dir=cache_dir,
                overwrite=overwrite,
            )
            card = None
    if as_json:
        print_json({**paths, **({} if card is None else {"manifest": card})})
        return
    for key, name in (("data.train_files", "train"), ("data.val_files", "validation")):
        if paths[name] is not None:
            stdout().print(f"{key}={paths[name]}", soft_wrap=True)
    if card is not None:
        say_where_from(card)


def _list(*, as_json: bool) -> None:
    from verl_tim.tasks.catalog import TASKS
    from verl_tim.tasks.published.sources import PUBLISHED

    made = [{"task": row.name, "summary": row.summary, "difficulty": dict(row.difficulty)} for row in TASKS.values()]
    published = [
        {
            "task": row.name,
            "summary": row.summary,
            "repo": row.repo,
            "revision": row.revision,
            "pinned": row.pinned,
            "splits": list(row.splits),
            "licence": row.licence,
            "inferred": list(row.inferred),
        }
        for row in PUBLISHED.values()
    ]
    if as_json:
        print_json([*made, *published])
        return
    table(
        "Tasks made from a seed",
        ("task", "what", "difficulty"),
        [(row["task"], row["summary"], _words(row["difficulty"])) for row in made],
    )
    table(
        "Published data sets",
        ("task", "what", "from"),
        [(row["task"], row["summary"], f"{row['repo']}@{str(row['revision'])[:12]}") for row in published],
    )


def _made(task: str, out: Path | None, **settings: Any) -> dict[str, str | None]:
    from verl_tim.tasks.dataset import build_dataset

    made = build_dataset(task, out, **settings)
    return {"train": str(made.train), "validation": str(made.validation), "card": str(made.card)}


def _refuse(task: str, why: str, options: Mapping[str, object]) -> None:
    from verl_tim.launch.errors import LaunchError

    for option, value in options.items():
        if value is not None:
            raise LaunchError.of(option, f"does not go with {task}, which {why}", f"leave {option} out")


def _pairs(option: str, words: Sequence[str] | None) -> dict[str, str]:
    """`["train=a.csv"]` as `{"train": "a.csv"}`."""
    from verl_tim.launch.errors import LaunchError

    pairs: dict[str, str] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise LaunchError.of(option, f"{word!r} is no pair", f"write {option} NAME=VALUE")
        if name in pairs:
            raise LaunchError.of(option, f"{name} is given twice", f"write one {option} {name}=VALUE")
        pairs[name] = value
    return pairs


def parse_settings(option: str, words: list[str] | None) -> dict:
    """`["min_terms=3"]` as `{"min_terms": 3}`; values are YAML."""
    import yaml

    from verl_tim.launch.errors import LaunchError

    settings = {}
    for name, value in _pairs(option, words).items():
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            problem = f"{name}={value} is no YAML value ({getattr(error, 'problem', None) or error})"
            raise LaunchError.of(option, problem, "write a number, a word, or a closed list: NAME=[1, 2]") from error
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
