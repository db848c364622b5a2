"""What the numerics contract does not cover, once for the start-up checks and once more for the worker's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from verl_tim.training.finding import Finding


class Limit(NamedTuple):
    """One setting under which the contract would be bypassed.

    Attributes:
        name: a short name, for the doctor's rule.
        key: the config key, below `actor_rollout_ref.`.
        wrong: whether a value of it bypasses the contract; never called with None.
        problem: why.
        remedy: what to do about it.
    """

    name: str
    key: str
    wrong: Callable[[Any], bool]
    problem: str
    remedy: str


def _sequence_parallel(key: str) -> Limit:
    return Limit(
        "sequence-parallel",
        key,
        lambda value: int(value) > 1,
        "the contract does not cover sequence parallelism, which splits sequences across ranks",
        "Set it to 1",
    )


def _quantised(key: str) -> Limit:
    return Limit("quantised-training", key, bool, "the contract does not cover quantised training", "Set it to false")


LIMITS = (
    # verl 0.9.1 reads both keys of a side, and calls the first deprecated (workers/config/actor.py:328)
    _sequence_parallel("actor.ulysses_sequence_parallel_size"),
    _sequence_parallel("actor.fsdp_config.ulysses_sequence_parallel_size"),
    _sequence_parallel("ref.ulysses_sequence_parallel_size"),
    _sequence_parallel("ref.fsdp_config.ulysses_sequence_parallel_size"),
    Limit("lora", "model.lora_rank", lambda value: int(value) > 0, "the contract does not cover LoRA", "Set it to 0"),
    Limit("lora", "model.lora.rank", lambda value: int(value) > 0, "the contract does not cover LoRA", "Set it to 0"),
    Limit("lora", "model.lora_adapter_path", bool, "the contract does not cover LoRA", "Set it to null"),
    Limit("liger", "model.use_liger", bool, "Liger replaces modules that the contract computes", "Set it to false"),
    Limit(
        "tiled-mlp",
        "model.tiled_mlp.enabled",
        bool,
        "tiled MLP replaces modules that the contract computes",
        "Set it to false",
    ),
    _quantised("actor.fsdp_config.qat.enable"),
    _quantised("ref.fsdp_config.qat.enable"),
    Limit(
        "multi-token-prediction",
        "model.mtp.enable",
        bool,
        "the contract does not cover multi-token prediction",
        "Set it to false",
    ),
)


PADS, BUCKET = "fsdp_config.pad_to_length", "fsdp_config.pad_to_length_bucket"
"""Below a side: whether verl pads its packed micro-batches, and to a multiple of how many tokens."""


def padding_too_long(side: str, bucket: int, context: int) -> Finding | None:
    """What is wrong where the padding of `PADS` may be longer than the model's context; None where it is not.

    verl 0.9.1 pads by one more sequence, from position 0 (workers/engine/utils.py:66), and the contract computes it as
    one. verl's own forward takes any position.

    Args:
        side: actor or ref.
        context: of the model, tokens.
    """
    if bucket - 1 <= context:
        return None
    group = f"actor_rollout_ref.{side}"
    return Finding(
        f"{group}.{BUCKET}",
        f"it is {bucket}, and {group}.{PADS} is on: up to {bucket - 1} tokens of padding are one sequence, and the "
        f"model's context (max_position_embeddings) is {context}",
        f"Set it to at most {context}, or {group}.{PADS}=false",
    )


def value_in_worker(key: str, model_config: Any, engine_config: Any) -> Any:
    """A limit's value as a worker has it: `model.*` in its model config, `actor.*` and `ref.*` in its engine config."""
    head, *path = key.split(".")
    value = model_config if head == "model" else engine_config
    for name in path[1:] if path[0] == "fsdp_config" else path:
        if value is None:
            return None
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value
