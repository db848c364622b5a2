"""What stands for the engine of a server that died and was started again, until the trainer's next weights.

A rollout server has nothing on disk that a new process could go on from: its weights are those of the trainer's last
update, and its memory belongs to the trainer between two steps. So a new one holds neither, answers verl's calls on
memory and gate with what is true of an engine that is not there, and sends requests elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from verl_tim.engine import EngineStats


class ReplicaAwayError(RuntimeError):
    """This server was started again, and has no weights before the trainer's next update: ask another."""


class AwayEngine:
    """The calls of :class:`verl_tim.engine.AsyncEngine` that a server makes before weights come.

    Args:
        who: the server, for messages.
    """

    weight_version = -1
    moe_layers: tuple[int, ...] = ()
    is_open = False

    def __init__(self, who: str) -> None:
        self._who = who

    async def pause(self) -> None:
        pass

    async def finish(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def abort(self, request_id: str) -> bool:
        return False

    async def abort_all(self, *, reject_new: bool = False) -> list[str]:
        return []

    async def sleep(self, tags: Sequence[str]) -> None:
        pass

    async def wake(self, tags: Sequence[str]) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    async def stats(self, *, begin_marks: bool = False) -> EngineStats:
        return EngineStats()

    async def generate(self, *args: Any) -> NoReturn:
        self.refuse()

    async def update_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()

    async def describe(self) -> NoReturn:
        self.refuse()

    async def each_rank(self, function: Any) -> NoReturn:
        self.refuse()

    async def weight_checksum(self) -> NoReturn:
        self.refuse()

    def refuse(self) -> NoReturn:
        """
        Raises:
            ReplicaAwayError: always.
        """
        raise ReplicaAwayError(
            f"{self._who} died and was started again; it has no weights before the trainer's next update"
        )
