"""The ranks of one engine and what travels between them.

`tensor_parallel_size` ranks make a stage and share every weight's outputs; `pipeline_parallel_size` stages share the
layers. Rank = stage x tensor_parallel_size + place in the stage; rank 0 is the driver. All ranks run the same engine
over the same verbs, with the same deterministic scheduler, and see the same tokens, so that control needs no exchange.

Only copies travel: columns within a stage (`Shards`), hidden states from a stage to the next, and what the last stage
drew to all others. On a GPU these are NCCL collectives on the current stream, without a wait of the host, so that CUDA
graphs hold those of a stage; communicators are made and used once before anything is recorded. On a CPU: gloo.

Process groups are made directly, not through torch.distributed's default group, which may be the trainer's.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from verl_tim.models.place import Place
from verl_tim.numerics.shards import Shards

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits for another in one exchange. One that died is noticed at once; this is for one that hangs."""

_HOST = "127.0.0.1"


def make_store(port: int = 0) -> dist.TCPStore:
    """The meeting place of all ranks, on this machine; port 0: its own, for the driver."""
    return dist.TCPStore(_HOST, port, is_master=port == 0, timeout=TIMEOUT, wait_for_workers=False)


class Communicator:
    """Collectives of some ranks. Every member calls the same ones in the same order.

    Args:
        members: ranks, in the order of their parts in a gather.
    """

    def __init__(self, store: dist.Store, name: str, members: Sequence[int], rank: int, device: torch.device) -> None:
        self.members, self.device = tuple(members), device
        self.index = self.members.index(rank)
        store = dist.PrefixStore(name, store)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, self.index, len(self.members), options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupGloo(store, self.index, len(self.members), options)
        self.gather(torch.zeros(1, device=device))  # a communicator that is made while a graph is recorded breaks it

    def gather(self, x: Tensor) -> Tensor:
        """[members, *x.shape]."""
        x = x.contiguous()
        every = x.new_empty(len(self.members), *x.shape)
        if x.numel():
            options = c10d.AllgatherOptions()
            options.asyncOp = False
            _wait(self._group._allgather_base(_words(every), _words(x), options))
        return every

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of member `source` (an index), written over the others' `x`, which must be contiguous."""
        if x.numel():
            options = c10d.BroadcastOptions()
            options.rootRank, options.asyncOp = source, False
            _wait(self._group.broadcast([_words(x)], options))
        return x

    def abort(self) -> None:
        """Let go of whatever waits in here; a rank is lost."""
        if self.device.type == "cuda":
            self._group.abort()


def _wait(work: dist.Work | None) -> None:
    """NCCL gives none: what is not asynchronous is on the current stream, as a recorded step needs it. So what was sent
    may be freed, or written again, by work submitted after it, and no tensor needs `record_stream`."""
    if work is not None:
        work.wait()


def _words(x: Tensor) -> Tensor:
    """A tensor as flat integers: what travels are bits, of any dtype."""
    flat, size = x.view(-1), x.element_size()
    fits = size * flat.numel() % 4 == 0 and size * flat.storage_offset() % 4 == 0
    return flat.view(torch.int32 if fits else torch.uint8)


class Ranks:
    """This process among the ranks of its engine.

    Args:
        tensor, stages: ranks of a stage, and stages.

    Attributes:
        rank, size: of all; place: the part of the model held here; device: its device.
    """

    def __init__(self, tensor: int, stages: int, rank: int, store: dist.Store, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, tensor * stages, device
        stage, position = divmod(rank, tensor)

        self._made: dict[tuple[int, ...], Communicator] = {}  # on the device: each holds buffers there

        def communicator(*members: int) -> Communicator:
            if members not in self._made:
                self._made[members] = Communicator(store, f"of {members}", members, rank, device)
            return self._made[members]

        everyone = tuple(range(self.size))
        self._world = communicator(*everyone)
        self._host = self._world
        if device.type != "cpu":
            self._host = Communicator(store, "host", everyone, rank, torch.device("cpu"))
        shards = Shards()
        if tensor > 1:
            shards = Shards(position, tensor, communicator(*everyone[stage * tensor : (stage + 1) * tensor]).gather)
        self.place = Place(shards, stage, stages)
        self._column: Communicator | None = None
        self._before: Communicator | None = None
        self._behind: Communicator | None = None
        if stages > 1:
            self._column = communicator(*everyone[position::tensor])
            # Along the chain, so that no two neighbours wait for each other.
            if stage > 0:
                self._before = communicator(rank - tensor, rank)
            if stage < stages - 1:
                self._behind = communicator(rank, rank + tensor)

    def place_of(self, stage: int) -> Place:
        """Place of the rank of that stage which holds the same outputs as this one."""
        return dataclasses.replace(self.place, stage=stage)

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self._host.gather(torch.tensor([number])).min())

    def share(self, x: Tensor) -> Tensor:
        """The driver's `x`, written over everyone's."""
        return self._world.broadcast(x, 0)

    def receive(self, into: Tensor) -> None:
        """What the stage before sends, same shape and dtype."""
        assert self._before is not None
        self._before.broadcast(into, 0)

    def send(self, x: Tensor) -> None:
        """To the next stage."""
        assert self._behind is not None
        self._behind.broadcast(x.contiguous(), 0)

    def from_stage(self, x: Tensor, stage: int) -> Tensor:
        """A stage's `x`, written over that of the other stages (between ranks at the same place of their stages)."""
        assert self._column is not None
        return self._column.broadcast(x, stage)

    def abort(self) -> None:
        """Let go of every exchange that waits for a lost rank."""
        for made in self._made.values():
            made.abort()
