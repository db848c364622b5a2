"""Model folders that a command is given: where they cannot serve they are refused, by the name of what gave them."""

from __future__ import annotations

from pathlib import Path


def check_model(folder: Path, key: str = "MODEL") -> None:
    """Raise LaunchError, of the argument or option that named it, for a folder without a model that is supported."""
    from verl_tim.launch.errors import LaunchError
    from verl_tim.models import ModelError, load_model_config

    try:
        load_model_config(folder)
    except ModelError as error:
        raise LaunchError.of(key, str(error), "give a Hugging Face folder of a supported architecture") from error


def refuse_unreadable(model: str, *parts: str) -> None:
    """Raise LaunchError for a model folder whose config or tokenizer (`parts`) transformers cannot read."""
    from verl_tim.launch.checks.model import load_error
    from verl_tim.launch.errors import LaunchError

    for part in parts:
        error = load_error(model, part, False)
        if error:
            remedy = f"give a Hugging Face folder with a {part} that transformers reads"
            raise LaunchError.of("MODEL", f"{model}: the {part} cannot be read ({error})", remedy)
