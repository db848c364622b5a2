"""What an agent loop's worker puts into TransferQueue, gathered: many samples in one message.

verl 0.9.1, trainer/ppo/v1/agent_loop_tq.py:188: each response is put by itself, in four messages between worker,
controller and storage, and its prompt's status twice. Of short responses of a small model those messages are a fifth of
what a step costs the machine's cores. `gather` gives verl's worker this in place of the module `transfer_queue`. A put
still returns when its sample is there, so what verl says of a prompt afterwards holds. Unnecessary once verl's worker
gathers. No upstream issue is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

# Of the time between two looks of the trainer at its replay buffer samples wait so much for others. Responses end with
# an engine's step; a step of the trainer begins when the last of them is there, so that it waits once for so long.
SHARE = 1 / 3

Row = Mapping[str, Any]


class GatheredPuts:
    """Stands before the module `transfer_queue`: its two ways to put are gathered, all else is the module's.

    Args:
        queue: the module.
        stacked: verl's `list_of_dict_to_tensordict`: rows -> TensorDict.
        seconds: how long samples wait for others.
    """

    def __init__(self, queue: Any, stacked: Callable[[list[dict[str, Any]]], Any], *, seconds: float) -> None:
        self._queue, self._stacked, self._seconds = queue, stacked, seconds
        self._open: dict[Any, _Group] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def async_kv_batch_put(
        self, *, keys: Sequence[str], partition_id: str, fields: Sequence[Row], tags: Sequence[Row]
    ) -> None:
        """Put samples.

        Args:
            fields: rows, which become a TensorDict when they are sent (`rows_as_they_are`).

        Raises:
            Whatever the queue raises, to everyone whose samples were sent together.
        """
        puts = [
            self._sent(key, partition_id, row, tag, _kind(row))
            for key, row, tag in zip(keys, fields, tags, strict=True)
        ]
        await asyncio.gather(*puts)

    async def async_kv_put(self, *, key: str, partition_id: str, tag: Row) -> None:
        """Put a tag alone.

        Raises:
            As `async_kv_batch_put`.
        """
        await self._sent(key, partition_id, None, tag, None)

    async def _sent(self, key: str, partition_id: str, row: Row | None, tag: Row, kind: Any) -> None:
        place = (partition_id, kind)
        group = self._open.get(place)
        if group is None or key in group.keys:
            group = self._open[place] = _Group()
            group.task = asyncio.ensure_future(self._send(place, group))
        group.keys.append(key)
        group.rows.append(row)
        group.tags.append(tag)
        assert group.task is not None
        # one caller that is cancelled does not take the others' samples with it
        await asyncio.shield(group.task)

    async def _send(self, place: tuple[str, Any], group: _Group) -> None:
        # tags are of prompts that begin, or end, at once
        await asyncio.sleep(self._seconds if group.rows[0] is not None else 0)
        if self._open.get(place) is group:
            del self._open[place]
        fields = None if group.rows[0] is None else self._stacked(group.rows)
        await self._queue.async_kv_batch_put(keys=group.keys, partition_id=place[0], fields=fields, tags=group.tags)


class _Group:
    """Samples that are sent together."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.rows: list[Any] = []
        self.tags: list[Row] = []
        self.task: asyncio.Future[None] | None = None


def _kind(row: Row) -> tuple[Any, ...]:
    """What rows must have in common to be stacked: their fields, and of each tensor all but its length."""
    return tuple(
        (name, value.dtype, value.dim(), value.shape[1:]) if isinstance(value, torch.Tensor) else (name,)
        for name, value in row.items()
    )


def rows_as_they_are(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In place of verl's `list_of_dict_to_tensordict`: rows are stacked once, with those that they are sent with."""
    return rows


def gather(agent_loop_tq: ModuleType, *, poll_interval: float) -> None:
    """Make verl's worker gather its puts.

    Args:
        agent_loop_tq: verl's module `verl.trainer.ppo.v1.agent_loop_tq`.
        poll_interval: seconds between two looks of the trainer at its replay buffer.
    """
    module: Any = agent_loop_tq
    if not isinstance(module.tq, GatheredPuts):
        module.tq = GatheredPuts(module.tq, module.list_of_dict_to_tensordict, seconds=SHARE * poll_interval)
        module.list_of_dict_to_tensordict = rows_as_they_are
