"""The data files: there, readable, with verl's columns, enough for a batch, short enough for the context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tim.home import expanded
from verl_tim.launch.checks import chat, model
from verl_tim.launch.errors import Finding

# Prompts whose length is looked at, spread over the file: tokenising all of a large data set takes minutes.
_PROMPTS_MEASURED = 2000


def check_files(config: DictConfig) -> Iterator[Finding]:
    """Files that are missing, unreadable, not in verl's schema, or with fewer rows than a batch."""
    from verl_tim.tasks.checks import check_dataset
    from verl_tim.tasks.errors import InputError

    for key, files in _files(config):
        try:
            rows = sum(
                check_dataset(
                    file,
                    key=key,
                    prompt_key=config.data.prompt_key,
                    needs_ground_truth=not config.reward.reward_model.enable,
                )
                for file in files
            )
        except InputError as error:
            yield Finding(
                key, str(error).removeprefix(f"{key}: "), f"set {key}=FILE, or task=chain_sum to have data made"
            )
            continue
        batch = config.data.train_batch_size
        if key == "data.train_files" and files and rows < batch:
            yield Finding(
                "data.train_batch_size",
                f"is {batch}, and the training data have {rows} rows",
                "lower it, or give more data",
            )


def check_lengths(config: DictConfig) -> Iterator[Finding]:
    """Prompt plus answer against the model's context, and the prompts in the data against data.max_prompt_length."""
    settings = config.actor_rollout_ref.model
    if settings.path is None:
        return  # made at the start, to fit
    path = str(settings.path)
    rollout = config.actor_rollout_ref.rollout
    budget = rollout.prompt_length + rollout.response_length
    if not model.load_error(path, "config", settings.trust_remote_code):
        context = getattr(model.load(path, "config", settings.trust_remote_code), "max_position_embeddings", None)
        if context is not None and budget > context:
            yield Finding(
                "data.max_response_length",
                f"data.max_prompt_length={rollout.prompt_length} plus "
                f"data.max_response_length={rollout.response_length} is {budget} tokens, "
                f"and the model's context (max_position_embeddings) is {context}",
                f"lower one of them so that the sum is at most {context}",
            )
    if rollout.max_model_len is not None and budget > rollout.max_model_len:
        yield Finding(
            "actor_rollout_ref.rollout.max_model_len",
            f"is {rollout.max_model_len}, less than prompt plus answer ({budget} tokens)",
            "leave it null, or raise it",
        )
    tokenizer_path = str(settings.tokenizer_path or settings.path)
    if model.load_error(tokenizer_path, "tokenizer", settings.trust_remote_code):
        return
    tokenizer = model.load(tokenizer_path, "tokenizer", settings.trust_remote_code)
    unusable = not (tokenizer.chat_template or settings.custom_chat_template) or chat.problem(tokenizer, config)
    if unusable or any(check_files(config)):
        return  # said by the checks of these
    yield from _check_prompts(config, tokenizer)


def _check_prompts(config: DictConfig, tokenizer: Any) -> Iterator[Finding]:
    limit = config.data.max_prompt_length
    for key, files in _files(config):
        lengths: list[int] = []
        rows = 0
        try:
            for file in files:
                count, measured = _measured(file, config, tokenizer)
                rows += count
                lengths += measured
        except chat.TemplateError as error:
            yield Finding(key, f"{file} holds a prompt that the chat template refuses ({error})", "correct the prompts")
            continue
        if not lengths or max(lengths) <= limit:
            continue
        if not config.data.filter_overlong_prompts:
            yield Finding(
                "data.max_prompt_length",
                f"is {limit}, and {key} holds a prompt of {max(lengths)} tokens",
                f"set data.max_prompt_length={max(lengths)}, or data.filter_overlong_prompts=true to drop such rows",
            )
        else:
            yield from _check_what_is_left(config, key, lengths, rows)


def _check_what_is_left(config: DictConfig, key: str, lengths: list[int], rows: int) -> Iterator[Finding]:
    """`data.filter_overlong_prompts` must leave a batch; of a large file only a part is looked at."""
    limit = config.data.max_prompt_length
    left = sum(length <= limit for length in lengths)
    if left == 0:
        yield Finding(
            "data.max_prompt_length",
            f"is {limit}, and all {len(lengths)} prompts of {key} that were looked at are longer (the shortest has "
            f"{min(lengths)} tokens): data.filter_overlong_prompts would leave nothing",
            f"set data.max_prompt_length={max(lengths)} for all of them",
        )
    elif key == "data.train_files" and len(lengths) == rows and left < config.data.train_batch_size:
        yield Finding(
            "data.train_batch_size",
            f"is {config.data.train_batch_size}, and data.filter_overlong_prompts leaves {left} of {rows} rows",
            f"lower it, or raise data.max_prompt_length (the longest prompt has {max(lengths)} tokens)",
        )


def _measured(file: str, config: DictConfig, tokenizer: Any) -> tuple[int, tuple[int, ...]]:
    """(rows of a parquet file, lengths in tokens of the prompts that are looked at); verl's other formats are read
    whole by verl, and measured there.

    Raises:
        chat.TemplateError: the template refuses one of them.
    """
    path = expanded(file)
    if path.suffix != ".parquet":
        return 0, ()
    status, options = path.stat(), json.dumps(chat.options(config), default=str)
    return _read_lengths(path, status.st_size, status.st_mtime_ns, config.data.prompt_key, tokenizer, options)


@lru_cache(maxsize=16)
def _read_lengths(
    path: Path, size: int, changed: int, column: str, tokenizer: Any, options: str
) -> tuple[int, tuple[int, ...]]:
    """Once for all runs of a matrix; size and time of change are there for the cache."""
    import pyarrow.parquet as pq

    prompts = pq.read_table(path, columns=[column]).column(column).to_pylist()
    looked_at, given = prompts[:: max(1, len(prompts) // _PROMPTS_MEASURED)], json.loads(options)
    texts = (chat.render(tokenizer, prompt, given) for prompt in looked_at)
    return len(prompts), tuple(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _files(config: DictConfig) -> Iterator[tuple[str, list[str]]]:
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key, throw_on_missing=False)
        files = list(value) if isinstance(value, ListConfig) else [value]
        files = [str(file) for file in files if file]
        # hdfs:// and the like: verl copies them first
        yield key, [file for file in files if not model.is_remote(file)]
