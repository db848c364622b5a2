"""Over how many ranks a run's actor splits a sequence. verl has two keys of it; which counts is said here alone.

At the top, since trainer, doctor and planning all go by it; it imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SEQUENCE_PARALLEL_KEYS = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
)
"""verl 0.9.1 calls the first deprecated; above 1 it wins (workers/config/actor.py:328)."""


def sequence_parallel_key(get: Callable[[str, Any], Any]) -> str:
    """The one of `SEQUENCE_PARALLEL_KEYS` that verl goes by; one that holds no number, so that it is looked at.

    Args:
        get: (key, default) -> the key's value, or the default where it has none.
    """
    deprecated, current = SEQUENCE_PARALLEL_KEYS
    size = get(deprecated, 1)
    return current if isinstance(size, (int, float)) and size <= 1 else deprecated


def sequence_parallel(get: Callable[[str, Any], Any]) -> tuple[str, int]:
    """That key, and over how many ranks a sequence is split."""
    key = sequence_parallel_key(get)
    return key, int(get(key, 1))
