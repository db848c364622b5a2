"""The trainer ranks of one replica, which send one weight update together: they meet at its beginning and its end."""

from __future__ import annotations

import asyncio
from typing import Any

TIMEOUT = 600.0
"""Seconds that the ranks that are there wait for the others."""


class SendersError(RuntimeError):
    """The ranks of a replica did not come together."""


class Gathering:
    """Waits until every rank of 0..size-1 has come, each with something to say.

    All that have come go on together, with one result, or with one error when one of them gives up.
    """

    def __init__(self, size: int, what: str) -> None:
        self._size, self._what = size, what
        self.said: dict[int, Any] = {}
        self._result: asyncio.Future = asyncio.get_running_loop().create_future()

    def come(self, rank: int, says: Any = None) -> bool:
        """Whether all are there now.

        Raises:
            SendersError: the rank is none of these, or came before.
        """
        if not 0 <= rank < self._size or rank in self.said:
            reason = "came twice" if rank in self.said else f"is none of {self._size}"
            raise SendersError(f"{self._what}: rank {rank} {reason}")
        self.said[rank] = says
        return len(self.said) == self._size

    def go_on(self, result: Any) -> None:
        if not self._result.done():
            self._result.set_result(result)

    def give_up(self, error: Exception) -> None:
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # where nobody waits, nobody must be told

    async def result(self) -> Any:
        """What `go_on` was given; SendersError when some rank does not come in time."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._result), TIMEOUT)
        except asyncio.TimeoutError:
            missing = sorted(set(range(self._size)) - set(self.said))
            raise SendersError(f"{self._what}: after {TIMEOUT:.0f} s rank {missing} has not come") from None
