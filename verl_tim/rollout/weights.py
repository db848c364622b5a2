"""New weights on their way from a trainer rank to its server: a stream of tensors, cut into buckets.

The trainer's generator gathers one parameter after another over all FSDP ranks (a collective), so each rank has to
pull it to its end even when its own receiver has failed; otherwise the other ranks wait in the gather for ever.

A bucket is one flat byte array with a table of contents. Ray moves it through shared memory, where the receiver reads
it in place: beside the model no second full copy of the weights exists, only the bucket in flight and the one being
packed. Tensors are cast to the engine's dtype before they travel: rounding the fp32 master is what FSDP2's cast does,
too.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl_tim.rollout.shared_buckets import SharedBuffer

# torch views need aligned storage for their element size; 64 also suits vectorised copies.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One tensor, or a part of one that is larger than a bucket, in a bucket's bytes.

    Attributes:
        name, shape, dtype: of the whole tensor (Hugging Face name).
        start: first byte in the bucket.
        nbytes: how many bytes of the tensor this bucket holds.
        offset: where they start in the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int
    offset: int

    @property
    def total(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass
class Bucket:
    """Consecutive tensors of the stream; `number` counts from 0 within one update.

    Its bytes are `data` (uint8), or lie in `shared`, a device buffer that receiver and sender both see.
    """

    number: int
    entries: list[Entry] = field(default_factory=list)
    data: np.ndarray | None = None
    shared: SharedBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""
        return sum(entry.nbytes for entry in self.entries)


class WeightStreamError(RuntimeError):
    """The stream of weights is broken: a bucket out of order, or a tensor cut short."""


async def pack(weights: Any, bucket_bytes: int, dtype: torch.dtype | None) -> AsyncIterator[Bucket]:
    """Cut a stream of (name, tensor) into buckets of at most `bucket_bytes`.

    Args:
        weights: iterable or asynchronous iterable of (Hugging Face name, full tensor), on any device.
        bucket_bytes: size of a bucket; a larger tensor is spread over several.
        dtype: floating tensors of another dtype are cast to it; None: none is.

    Yields:
        Buckets in the order of the stream; an array is not reused after it was yielded.
    """
    from verl.workers.rollout.utils import ensure_async_iterator

    bucket = _Filling(0, bucket_bytes)
    async for name, tensor in ensure_async_iterator(weights):
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        offset = 0
        while True:
            take = min(len(raw) - offset, bucket.room)
            if take > 0 or len(raw) == 0:
                bucket.add(name, tuple(tensor.shape), tensor.dtype, raw[offset : offset + take], offset)
                offset += take
            if offset == len(raw):
                break
            yield bucket.close()
            bucket = _Filling(bucket.number + 1, bucket_bytes)
    if bucket.entries:
        yield bucket.close()


class _Filling:
    """A bucket that is being packed."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.entries: list[Entry] = []
        self._parts: list[tuple[int, np.ndarray]] = []
        self._size = nbytes
        self._used = 0

    @property
    def room(self) -> int:
        return max(0, self._size - aligned(self._used))

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, raw: np.ndarray, offset: int) -> None:
        start = aligned(self._used) if len(raw) else self._used
        self.entries.append(Entry(name, shape, dtype, start, len(raw), offset))
        self._parts.append((start, raw))
        self._used = start + len(raw)

    def close(self) -> Bucket:
        data = np.empty(self._used, dtype=np.uint8)
        for start, raw in self._parts:
            data[start : start + len(raw)] = raw
        return Bucket(self.number, self.entries, data)


def aligned(position: int) -> int:
    """The next byte where a tensor may start."""
    return (position + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _empty(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype)  # no bytes, which torch cannot view as another dtype


class Unpacker:
    """Buckets back into tensors; a tensor that spans buckets is put together before it is handed on."""

    def __init__(self) -> None:
        self._expected = 0
        self._partial: torch.Tensor | None = None  # uint8, the whole tensor
        self._entry: Entry | None = None
        self._filled = 0

    def unpack(self, bucket: Bucket, shared: torch.Tensor | None = None) -> Iterable[tuple[str, torch.Tensor]]:
        """(name, tensor) of the bucket. Tensors are views of its bytes: use them before the next bucket.

        Args:
            shared: uint8, the bytes of a bucket without data.

        Raises:
            WeightStreamError: out of order, or a tensor's parts do not fit together.
        """
        if bucket.number != self._expected:
            raise WeightStreamError(f"bucket {bucket.number} arrived where bucket {self._expected} was due")
        self._expected += 1
        data = shared
        if data is None:
            assert bucket.data is not None
            with warnings.catch_warnings():
                # Ray's shared memory is read-only, of which torch warns; nothing here writes into it.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                data = torch.from_numpy(bucket.data)
        for entry in bucket.entries:
            whole = self._join(entry, data[entry.start : entry.start + entry.nbytes])
            if whole is not None:
                yield entry.name, whole.view(entry.dtype).view(entry.shape) if entry.total else _empty(entry)

    def _join(self, entry: Entry, part: torch.Tensor) -> torch.Tensor | None:
        if self._entry is None:
            if entry.offset:
                raise WeightStreamError(f"{entry.name} starts in the middle, at byte {entry.offset}")
            if entry.nbytes == entry.total:
                return part
            self._entry, self._filled = entry, 0
            self._partial = torch.empty(entry.total, dtype=torch.uint8, device=part.device)
        if entry.name != self._entry.name or entry.offset != self._filled:
            raise WeightStreamError(f"{self._entry.name} was cut short at byte {self._filled} of {self._entry.total}")
        assert self._partial is not None
        self._partial[entry.offset : entry.offset + entry.nbytes] = part
        self._filled += entry.nbytes
        if self._filled < entry.total:
            return None
        whole, self._partial, self._entry = self._partial, None, None
        return whole

    def finish(self) -> None:
        """Raises WeightStreamError if a tensor is still incomplete."""
        if self._entry is not None:
            raise WeightStreamError(f"the stream ended within {self._entry.name}")


async def send(
    weights: Any,
    *,
    bucket_bytes: int,
    dtype: torch.dtype,
    deliver: Callable[[Bucket], Awaitable[Any]],
    packing: Callable[[Any, int, torch.dtype], AsyncIterator[Bucket]] = pack,
) -> int:
    """Pull the stream to its end and deliver each bucket; the next one is packed while the last one travels.

    Args:
        weights: as in `pack`.
        deliver: hands one bucket to the receiver; returns when the receiver is done with it.
        packing: `pack`, or `shared_buckets.pack_shared` for a device.

    Returns:
        Bytes sent.

    Raises:
        Whatever the receiver raised, after the stream was pulled to its end for the sake of the other ranks; whatever
        the stream raises, at once.
    """
    from verl.workers.rollout.utils import ensure_async_iterator

    stream = ensure_async_iterator(weights)
    sent = 0
    in_flight: asyncio.Future | None = None
    try:
        async for bucket in packing(stream, bucket_bytes, dtype):
            if in_flight is not None:
                await in_flight
            sent += bucket.nbytes
            in_flight = asyncio.ensure_future(deliver(bucket))
        if in_flight is not None:
            await in_flight
    except Exception:
        async for _ in stream:
            pass
        raise
    return sent
