"""`verl-tim model`: a small base model with its tokenizer, warmed up on a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.data import input_errors, parse_settings
from verl_tim.commands.output import bad_input, print_json, stdout

NAME = "model"
HELP = "Make a small base model in Hugging Face format (or find it again), warmed up on a task, with no download."
NEEDS_ARGUMENTS = False


def command(
    kind: Annotated[str, typer.Argument(help="qwen3 or qwen3_moe.")] = "qwen3",
    task: Annotated[str, typer.Option(help="Task of the warm-up.")] = "chain_sum",
    difficulty: Annotated[
        list[str] | None, typer.Option(help="Setting of the task's generator, NAME=VALUE; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in the cache, by content.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and warm-up.")] = 0,
    cache_dir: Annotated[Path, typer.Option(help="Where models are kept.")] = Path("~/.cache/verl_tim"),
    overwrite: Annotated[bool, typer.Option(help="Replace an --out made from other settings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model."""
    from verl_tim.tasks.base_model import build_base_model

    with bad_input(), input_errors("model"):
        path = build_base_model(
            kind,
            out,
            task=task,
            difficulty=parse_settings("--difficulty", difficulty),
            seed=seed,
            cache_dir=cache_dir,
            overwrite=overwrite,
        )
    if as_json:
        print_json({"path": str(path)})
    else:
        stdout().print(f"actor_rollout_ref.model.path={path}", soft_wrap=True)
