"""Prompts of verl's parquet files, as token ids by a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_COLUMN = "prompt"


class PromptError(ValueError):
    """Files without usable prompts; the message names the file and what is wrong."""


def read_prompts(files: Sequence[str | Path], tokenizer: Any, *, limit: int) -> list[np.ndarray]:
    """Token ids (int64) of the first `limit` rows of each file, with the opening of the answer.

    Args:
        files: parquet in verl's schema, a column `prompt` of chat messages.
        tokenizer: of transformers, with a chat template.

    Raises:
        PromptError: a missing file, another format or schema, no rows, a tokenizer without a chat template.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"the tokenizer of {tokenizer.name_or_path} has no chat template: give a model that has one")
    prompts: list[np.ndarray] = []
    for file in map(Path, files):
        if not file.is_file():
            raise PromptError(f"there is no file {file}")
        try:
            rows = pq.read_table(file, columns=[PROMPT_COLUMN]).column(PROMPT_COLUMN).slice(0, limit).to_pylist()
        except (pa.ArrowInvalid, KeyError) as error:
            raise PromptError(f"{file} has no column {PROMPT_COLUMN!r} of verl's parquet schema: {error}") from error
        for number, messages in enumerate(rows):
            if not isinstance(messages, list) or not messages:
                raise PromptError(f"{file}, row {number}: prompt is {messages!r}, expected a list of chat messages")
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            prompts.append(np.asarray(ids, dtype=np.int64))
    if not prompts:
        raise PromptError(f"{', '.join(map(str, files)) or 'no file'}: no prompt in it")
    return prompts
