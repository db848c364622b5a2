"""What diagnosis was given and cannot use: one base for its errors, so that a command tells key and remedy once."""

from __future__ import annotations


class DiagnosisError(ValueError):
    """A run, a file or an option that cannot be used.

    Attributes:
        problem: what is wrong, with the offending value.
        remedy: what to do about it; empty where only the caller knows.
        key: the option as it is written on the command line; empty for what is no option, as a run is.
    """

    def __init__(self, problem: str, remedy: str = "", *, key: str = "") -> None:
        super().__init__(": ".join(part for part in (key, problem, remedy) if part))
        self.problem, self.remedy, self.key = problem, remedy, key
