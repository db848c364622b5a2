"""verl's short names of dtypes and torch's."""

from __future__ import annotations

SHORT_NAMES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def canonical(name: str) -> str:
    """torch's name of a dtype ("bfloat16"), also for verl's short one ("bf16"); other names come back unchanged."""
    return next((full for full, short in SHORT_NAMES.items() if short == name), name)
