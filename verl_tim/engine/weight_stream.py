"""New weights on their way to every rank of a split engine: each takes its part of each full tensor.

Two ways, which may alternate within one update. A tensor of the driver is copied to all ranks. `LocalTensors` are
tensors that each rank reads by itself (`weight_reader.py`); nothing of them travels here.

The streams of all ranks hold the same tensors in the same order, and end together. A rank whose load fails still
takes part in every copy until the driver says that the stream is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from verl_tim.engine.crew import Crew
from verl_tim.engine.link import Link
from verl_tim.engine.parallel import Ranks
from verl_tim.engine.weight_reader import LocalTensors, Reader
from verl_tim.models import WeightError


class SentWeights:
    """The driver's stream: what it yields, the other ranks get too.

    Args:
        weights: (Hugging Face name, full tensor) pairs, or `LocalTensors`.
        dtype: of the model; floating tensors are cast to it before they travel.
    """

    def __init__(
        self, weights: Iterable[Any], crew: Crew, ranks: Ranks, dtype: torch.dtype, reader: Reader | None
    ) -> None:
        self._weights, self._crew, self._ranks, self._dtype, self._reader = weights, crew, ranks, dtype, reader
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._weights:
            if isinstance(item, LocalTensors):
                yield from self._local(item)
            else:
                name, value = item
                yield name, self._share(name, value)
        self._end("end", None)

    def _share(self, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        value = value.to(self._ranks.device, self._dtype if value.is_floating_point() else None).contiguous()
        self._crew.tell("tensor", name, tuple(value.shape), value.dtype)
        return self._ranks.share(value)

    def _local(self, item: LocalTensors) -> Iterator[tuple[str, Tensor]]:
        assert self._reader is not None, "local tensors without a reader"
        self._crew.tell_each([("local", payload) for payload in item.payloads[1:]])
        yield from self._reader.read(item.payloads[0], self._ranks.device)
        self._reader.done()
        self._crew.replies("taken")

    def finish(self, reason: str = "") -> None:
        """Tell the other ranks that the stream is over, unless it came to its end."""
        self._end("stop", reason)
        if self._reader is not None:
            self._reader.close()

    def _end(self, kind: str, reason: str | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._crew.tell(kind, reason)


class ReceivedWeights:
    """A worker's stream."""

    def __init__(self, link: Link, ranks: Ranks, reader: Reader | None) -> None:
        self._link, self._ranks, self._reader = link, ranks, reader
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while not self._is_over:
            kind, *content = self._link.receive()
            if kind == "tensor":
                name, shape, dtype = content
                yield name, self._shared(shape, dtype)
            elif kind == "local":
                assert self._reader is not None, "local tensors without a reader"
                try:
                    yield from self._reader.read(content[0], self._ranks.device)
                finally:
                    self._reader.done()
                    self._link.send(("taken", None))
            else:
                self._is_over = True
                if kind == "stop":
                    raise WeightError(f"the driver's stream of weights stopped: {content[0]}")

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._ranks.share(torch.empty(shape, dtype=dtype, device=self._ranks.device))

    def finish(self) -> None:
        """Take part in the rest of the stream, if the model did not take all of it."""
        while not self._is_over:
            kind, *content = self._link.receive()
            if kind == "tensor":
                self._shared(*content[1:])
            elif kind == "local":
                self._link.send(("taken", None))
            else:
                self._is_over = True
        if self._reader is not None:
            self._reader.close()
