"""The weight files of a local model folder: whole, and of the model that its config.json describes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# An extra head or a buffer of an older version does no harm; a layer's weight that the model lacks is another model's.
_OF_A_LAYER = re.compile(r"\blayers\.\d+\.")
_SHOWN = 3


def torn(folder: Path) -> Iterator[str]:
    """Names of safetensors files that end too early or cannot be read, with what is wrong. Reads their headers only."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            yield f"{file.name} ({error})"


def misfit(folder: Path, *, trust_remote_code: bool) -> str:
    """How the safetensors weights differ from the model of config.json; empty when they fit or cannot be compared.

    transformers itself loads them onto its meta device, so its renaming and merging of weights is in it, and nothing
    but headers is read.
    """
    if not any(folder.glob("*.safetensors")):
        return ""  # pickled weights would have to be read whole
    from transformers import AutoConfig
    from verl.utils.model import get_hf_auto_model_class

    with _quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if getattr(config, "quantization_config", None) is not None:
                return ""  # its loader may want a GPU, which the workers have and this process need not
            _, report = get_hf_auto_model_class(config).from_pretrained(
                folder,
                config=config,
                device_map="meta",
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
        # transformers and a model's own code raise what they like; all of it means that verl could not load it either
        except Exception as error:
            return f"transformers cannot load them: {type(error).__name__}: {_first_line(error)}"
    problems = (
        ("lack", sorted(report["missing_keys"])),
        ("have another shape in", sorted(key for key, *_ in report["mismatched_keys"])),
        ("have what the model has not:", sorted(filter(_OF_A_LAYER.search, report["unexpected_keys"]))),
    )
    return ", ".join(f"{what} {_some(keys)}" for what, keys in problems if keys)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bar and the table that transformers prints about weights that do not fit."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _some(keys: Iterable[Any]) -> str:
    names = list(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
