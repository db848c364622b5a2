"""Weights from the trainer's ranks to rollout servers elsewhere, over gloo: verl's checkpoint engine for a CPU.

verl's own engines (nccl, nixl, ...) need GPUs or a fabric. Chosen by `actor_rollout_ref.rollout.checkpoint_engine:
{backend: gloo, custom_backend_module: verl_tim.rollout.gloo_checkpoint_engine}`. Actor rank 0 broadcasts buckets to all
rollout workers; the other actor ranks pull the stream, which is a collective of theirs, and send nothing.

What travels is JSON and the tensors' bytes, never a pickle: the group's store asks nobody who he is, and whoever can
reach its port could otherwise run code in the servers.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_tim.rollout.weights import Bucket, Entry, Unpacker, WeightStreamError, pack
from verl_tim.training.pairing import Card, card_with

Item = Bucket | str | None | Card
"""What travels: buckets of weights, before them the sender's card; then its error, or None, the end."""

BACKEND = "gloo"
_TIMEOUT = datetime.timedelta(minutes=10)


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """verl's `CheckpointEngine` on a gloo group of its own, made anew for every update.

    Args:
        bucket_size: bytes of a bucket.
        is_master: True on actor rank 0; verl says so.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = -1
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """Where the group meets, a store of the master; nothing from the others."""
        if not self.is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actor rank 0 is the group's rank 0, the rollout workers follow, the other actor ranks stand outside (-1)."""
        world_size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, world_size)))

    def init_process_group(self, *, rank: int, world_size: int, master: dict[str, Any]) -> None:  # type: ignore[override]
        """Meet the others; torch's error where they do not come."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(master["host"], master["port"], is_master=False, timeout=_TIMEOUT)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None
        self.rank = -1

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Broadcast a stream of (Hugging Face name, tensor), in the dtypes it has.

        Raises:
            Whatever the stream raises; the receivers are told.
        """
        if self.rank < 0:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        card = await card_with(weights)
        try:
            if card is not None:
                await asyncio.to_thread(self._send, card)
            # the receiver's adapter casts to the engine's dtype
            async for bucket in pack(weights, self.bucket_size, None):
                await asyncio.to_thread(self._send, bucket)
        except Exception as error:
            await asyncio.to_thread(self._send, f"{type(error).__name__}: {error}")
            raise
        await asyncio.to_thread(self._send, None)

    def receive_weights(  # type: ignore[override]  # verl's annotation is of a coroutine, its engines yield
        self, global_steps: int | None = None
    ) -> ReceivedWeights:
        """The stream as it was sent."""
        return ReceivedWeights(self._receive)

    def _send(self, item: Item) -> None:
        """The sender's card, a bucket, the sender's error, or the end."""
        data = item.data if isinstance(item, Bucket) else None
        raw = torch.frombuffer(bytearray(encoded(item)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(raw), 0 if data is None else len(data)]))
        self._broadcast(raw)
        if data is not None and len(data):
            self._broadcast(torch.from_numpy(data))

    def _receive(self) -> Item:
        sizes = torch.zeros(2, dtype=torch.int64)
        self._broadcast(sizes)
        raw, data = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
        self._broadcast(raw)
        item = decoded(raw.numpy().tobytes(), len(data))
        if isinstance(item, Bucket):
            if len(data):
                self._broadcast(data)
            item.data = data.numpy()
        return item

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


class ReceivedWeights:
    """A stream of (name, tensor), and the card that came before it.

    Args:
        receive: the next item from the sender; waits for it.

    Raises (both ways to read):
        WeightStreamError: the sender failed, or the stream is broken.
    """

    def __init__(self, receive: Callable[[], Item]) -> None:
        self._receive = receive
        self._card: Card | None = None
        self._first: list[Item] = []  # what came where a card might have
        self._begun = False

    async def card(self) -> Card | None:
        """The sending trainer rank's; None where it has none."""
        if not self._begun:
            self._begun = True
            item = await asyncio.to_thread(self._receive)
            if isinstance(item, Mapping):
                self._card = item
            else:
                self._first.append(item)
        return self._card

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        await self.card()
        unpacker = Unpacker()
        while True:
            item = self._first.pop() if self._first else await asyncio.to_thread(self._receive)
            if item is None:
                unpacker.finish()
                return
            if isinstance(item, str):
                raise WeightStreamError(f"the trainer's stream failed: {item}")
            if isinstance(item, Mapping):
                raise WeightStreamError("a second card arrived within the trainer's stream")
            for named in unpacker.unpack(item):
                yield named


def encoded(item: Item) -> bytes:
    """JSON of a card, of a bucket without its bytes, of the sender's error, or of the end."""
    if isinstance(item, Mapping):
        return json.dumps({"card": dict(item)}).encode()
    if item is None:
        return json.dumps({"end": True}).encode()
    if isinstance(item, str):
        return json.dumps({"error": item}).encode()
    entries = [
        [
            entry.name,
            list(entry.shape),
            str(entry.dtype).removeprefix("torch."),
            entry.start,
            entry.nbytes,
            entry.offset,
        ]
        for entry in item.entries
    ]
    return json.dumps({"number": item.number, "entries": entries}).encode()


def decoded(raw: bytes, nbytes: int) -> Item:
    """`encoded` backwards.

    Args:
        nbytes: of the bucket's data, which must hold every tensor that is named.

    Raises:
        WeightStreamError: it is something else.
    """
    try:
        header = json.loads(raw)
        if "end" in header:
            return None
        if "error" in header:
            return str(header["error"])
        if "card" in header:
            return _card(**header["card"])
        return Bucket(int(header["number"]), [_entry(nbytes, *fields) for fields in header["entries"]])
    except (ValueError, TypeError, KeyError) as error:
        raise WeightStreamError(
            f"what arrived is no bucket of weights ({type(error).__name__}: {error}): the trainer and the rollout must "
            "have one version of verl-tim, and nobody else may reach the group's port"
        ) from error


def _card(process: str, contract_id: str, versions: dict[str, str]) -> Card:
    return {"process": str(process), "contract_id": str(contract_id), "versions": dict(versions)}


def _entry(nbytes: int, name: str, shape: list[int], dtype: str, start: int, size: int, offset: int) -> Entry:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{name} has dtype {dtype!r}")
    if not 0 <= start <= start + size <= nbytes:
        raise ValueError(f"{name} lies at bytes {start} to {start + size} of {nbytes}")
    return Entry(name, tuple(shape), kind, start, size, offset)
