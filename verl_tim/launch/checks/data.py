"""The data files: there, readable, with verl's columns, enough for a batch, short enough for the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tim.launch.checks import model
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
            yield Finding(key, str(error).removeprefix(f"{key}: "), f"set {key}, or task=chain_sum to have data made")
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
    if config.data.filter_overlong_prompts or model.load_error(tokenizer_path, "tokenizer", settings.trust_remote_code):
        return
    tokenizer = model.load(tokenizer_path, "tokenizer", settings.trust_remote_code)
    if not (tokenizer.chat_template or settings.custom_chat_template) or any(check_files(config)):
        return  # said by the checks of these
    yield from _check_prompts(config, tokenizer)


def _check_prompts(config: DictConfig, tokenizer: Any) -> Iterator[Finding]:
    limit = config.data.max_prompt_length
    options: Any = OmegaConf.to_container(config.data.apply_chat_template_kwargs)
    if config.actor_rollout_ref.model.custom_chat_template:
        options["chat_template"] = config.actor_rollout_ref.model.custom_chat_template
    for _, files in _files(config):
        for file in files:
            prompts = _prompts(file, config.data.prompt_key)
            longest = 0
            for prompt in prompts[:: max(1, len(prompts) // _PROMPTS_MEASURED)]:
                text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **options)
                longest = max(longest, len(tokenizer(text, add_special_tokens=False)["input_ids"]))
            if longest > limit:
                yield Finding(
                    "data.max_prompt_length",
                    f"is {limit}, and {file} holds a prompt of {longest} tokens",
                    f"set data.max_prompt_length={longest}, or data.filter_overlong_prompts=true to drop such rows",
                )


def _files(config: DictConfig) -> Iterator[tuple[str, list[str]]]:
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key, throw_on_missing=False)
        files = list(value) if isinstance(value, ListConfig) else [value]
        files = [str(file) for file in files if file]
        # hdfs:// and the like: verl copies them first
        yield key, [file for file in files if not model.is_remote(file)]


def _prompts(file: str, column: str) -> list[Any]:
    """The chats of a parquet file; verl's other formats are read whole by verl, and measured there."""
    import pyarrow.parquet as pq

    path = Path(file).expanduser()
    if path.suffix != ".parquet":
        return []
    return pq.read_table(path, columns=[column]).column(column).to_pylist()
