"""The one error of this package: what the user gave cannot run, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_tim.training.finding import Finding

if TYPE_CHECKING:
    from verl_tim.diagnosis.errors import DiagnosisError

__all__ = ["Finding", "LaunchError"]


class LaunchError(ValueError):
    """The run cannot start. `findings` names every key and remedy that is known."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))

    @classmethod
    def of(cls, key: str, problem: str, remedy: str) -> LaunchError:
        return cls([Finding(key, problem, remedy)])

    @classmethod
    def of_input(cls, error: DiagnosisError, key: str, remedy: str) -> LaunchError:
        """What diagnosis cannot use; `key` and `remedy`: where the error knows none itself."""
        return cls([Finding(error.key or key, error.problem, error.remedy or remedy)])
