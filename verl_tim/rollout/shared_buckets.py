"""Weights from a trainer rank to a server on the same GPU: buckets in device memory that both processes see.

The sender copies tensors into one of two device buffers and shares the buffer (CUDA IPC); the server's model copies out
of it, straight into its own fused layout. So beside trainer and engine only the two buckets exist, nothing passes
through host memory, and each weight moves twice over device memory.

While the server reads one buffer, the next bucket is packed into the other; a buffer is filled again only after the
server has said, device synchronised, that it is done with it (`weights.send` awaits that).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from verl_tim.rollout.weights import Bucket, Entry, Unpacker, WeightStreamError, aligned

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor: the device's number in the receiving process


@dataclass(frozen=True)
class SharedBuffer:
    """A device buffer of another process.

    Attributes:
        turn: which of the sender's buffers, 0 or 1; a receiver opens each once per update.
        handle: arguments that rebuild it (torch's CUDA IPC).
    """

    turn: int
    handle: tuple[Any, ...]


def share(buffer: torch.Tensor) -> tuple[Any, ...]:
    """The handle of a CUDA buffer for other processes on its GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    _rebuild, arguments = reduce_tensor(buffer)
    return arguments


def open_shared(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The buffer behind a handle, as this process sees it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle)
    arguments[_DEVICE_ARGUMENT] = device.index or 0
    return rebuild_cuda_tensor(*arguments)


def device_identity(device: torch.device) -> str:
    """Which GPU of the world this is; "" for a CPU. Equal identities mean that buckets can be shared."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


async def pack_shared(
    weights: Any,
    bucket_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    share: Callable[[torch.Tensor], tuple[Any, ...]] = share,
) -> AsyncIterator[Bucket]:
    """As `weights.pack`, into two device buffers in turn; into one where all fits there.

    A yielded bucket's buffer is filled again when the bucket after the next is asked for.
    """
    from verl.workers.rollout.utils import ensure_async_iterator

    buffers: list[torch.Tensor] = []
    shared: list[SharedBuffer] = []

    def buffer(number: int) -> torch.Tensor:
        turn = number % 2
        if turn == len(buffers):
            buffers.append(torch.empty(bucket_bytes, dtype=torch.uint8, device=device))
        return buffers[turn]

    def close(number: int, entries: list[Entry]) -> Bucket:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what another process reads must be there
        turn = number % 2
        if turn == len(shared):
            # Only with the first bucket that is in it: torch keeps a shared buffer until a receiver that has opened
            # it lets go, so one that no bucket names would stay for ever.
            shared.append(SharedBuffer(turn, share(buffer(number))))
        return Bucket(number, entries, shared=shared[turn])

    number, used, entries = 0, 0, list[Entry]()
    async for name, tensor in ensure_async_iterator(weights):
        tensor = tensor.detach().to(device)
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        shape, kind = tuple(tensor.shape), tensor.dtype
        raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else buffer(number)[:0]
        offset = 0
        while True:
            start = aligned(used)
            take = min(len(raw) - offset, bucket_bytes - start)
            if take > 0 or len(raw) == 0:
                buffer(number)[start : start + max(take, 0)].copy_(raw[offset : offset + max(take, 0)])
                entries.append(Entry(name, shape, kind, start if take > 0 else used, max(take, 0), offset))
                used, offset = (start + take, offset + take) if take > 0 else (used, offset)
            if offset == len(raw):
                break
            yield close(number, entries)
            number, used, entries = number + 1, 0, []
    if entries:
        yield close(number, entries)


class SharedBuffers:
    """The receiver's view of a sender's buffers during one update."""

    def __init__(
        self,
        device: torch.device,
        open_shared: Callable[[tuple[Any, ...], torch.device], torch.Tensor] = open_shared,
    ) -> None:
        self._device, self._open = device, open_shared
        self._buffers: dict[int, torch.Tensor] = {}

    def data(self, bucket: Bucket) -> torch.Tensor:
        """The bytes of a bucket that came without data."""
        if bucket.shared is None:
            raise WeightStreamError(f"bucket {bucket.number} holds neither data nor a shared buffer")
        turn = bucket.shared.turn
        if turn not in self._buffers:
            self._buffers[turn] = self._open(bucket.shared.handle, self._device)
        return self._buffers[turn]

    def done(self) -> None:
        """All that read the buffers has run when this returns, so their sender may fill them again."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers.clear()


class BucketReader:
    """A rank of a split engine reads its own sender's buckets (`engine.weight_reader.Reader`).

    Args:
        open_shared: as `SharedBuffers` takes it.
    """

    def __init__(self, open_shared: Callable[[tuple[Any, ...], torch.device], torch.Tensor] = open_shared) -> None:
        self._open = open_shared
        self._buffers: SharedBuffers | None = None
        self._unpacker = Unpacker()

    def read(self, payload: Bucket, device: torch.device) -> Iterable[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of one bucket; views of the sender's buffer."""
        if self._buffers is None:
            self._buffers = SharedBuffers(device, self._open)
        return self._unpacker.unpack(payload, self._buffers.data(payload))

    def done(self) -> None:
        """What was read may be overwritten when this returns."""
        if self._buffers is not None:
            self._buffers.done()

    def close(self) -> None:
        """The update is over."""
        if self._buffers is not None:
            self._buffers.close()
