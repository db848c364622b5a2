"""The machine in hand, for runs that are on no GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine's memory.

    Attributes:
        memory: bytes in all; a container's limit below that is not looked at.
        available: bytes that are free now.
    """

    memory: int
    available: int

    @classmethod
    def here(cls) -> Host:
        """The machine that this process runs on."""
        import psutil

        found = psutil.virtual_memory()
        return cls(found.total, found.available)
