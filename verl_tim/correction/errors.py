"""The error a bad correction setting raises."""

from __future__ import annotations

from typing import Any

CONFIG_PATH = "algorithm.rollout_correction"


class ConfigError(ValueError):
    """A correction setting that is unknown, malformed, contradictory, or cannot take effect.

    Attributes:
        key: the setting's name under ``algorithm.rollout_correction``.
        value: what was given.
        problem: what is wrong with it.
        remedy: what to write instead.
    """

    def __init__(self, key: str, value: Any, problem: str, remedy: str) -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(f"{CONFIG_PATH}.{key}={value!r}: {problem}. {remedy}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from their message by default; a Ray worker sends this one to the driver whole.
        return type(self), (self.key, self.value, self.problem, self.remedy)
