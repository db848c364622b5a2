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


class ReplicaFailedError(ReplicaAwayError):
    """So it is, since its engine had failed; the message has the engine's error. Where no other server is left the run
    would meet it again."""


class AwayEngine:
    """The calls of :class:`verl_tim.engine.AsyncEngine` that a server makes before weights come.

    Args:
        who: the server, for messages.
        engine_error: why the engine before this one failed, class and message; empty: its process was killed or lost.
    """

    weight_version = -1
    moe_layers: tuple[int, ...] = ()
    is_open = False
    turns = None

    def __init__(self, who: str, engine_error: str = "") -> None:
        self._who = who
        self.engine_error = engine_error

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
            ReplicaFailedError: the engine before this one had failed.
            ReplicaAwayError: its process had ended otherwise.
        """
        again = "was started again; it has no weights before the trainer's next update"
        if self.engine_error:
            raise ReplicaFailedError(f"{self._who} ended with its engine and {again}. The engine: {self.engine_error}")
        raise ReplicaAwayError(f"{self._who} died and {again}")
