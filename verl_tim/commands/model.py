"""`verl-tim model`: a small base model with its tokenizer, warmed up on a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.data import input_errors, parse_settings
from verl_tim.commands.output import bad_input, print_json, stdout

NAME = "model"
HELP = "Make a small base model in Hugging Face format (or find it again), warmed up on a task, with no download."


def command(
    kind: Annotated[str, typer.Argument(help="qwen3 or qwen3_moe.")] = "qwen3",
    task: Annotated[str, typer.Option(help="Task of the warm-up.")] = "chain_sum",
    difficulty: Annotated[
        list[str] | None, typer.Option(help="Setting of the task's generator, NAME=VALUE; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in the cache, by content.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and warm-up.")] = 0,
    cache_dir: Annotated[Path, typer.Option(help="Where models are kept.")] = Path("~/.cache/verl_tim"),
    random: Annotated[
        str | None,
        typer.Option(help="Random weights in the shape of a published model, e.g. qwen3-1.7b, into --out; no task."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="With --random: fewer layers than the shape has.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an --out made from other settings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model."""
    from verl_tim.tasks.base_model import build_base_model

    with bad_input(), input_errors("model"):
        if random is not None:
            path = _random(random, out, layers, seed)
        else:
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


def _random(shape: str, out: Path | None, layers: int | None, seed: int) -> Path:
    import torch

    from verl_tim.tasks.errors import InputError
    from verl_tim.tasks.random_model import save_random_model

    if out is None:
        raise InputError("--random needs --out FOLDER: such models are large and are not kept in the cache")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return save_random_model(shape, out, layers=layers, device=device, seed=seed)
