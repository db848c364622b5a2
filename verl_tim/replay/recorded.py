"""Routes that the trainer recorded (r2), by row of the step's batch, in host memory until the step is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_tim.replay.errors import ReplayError


class RecordedRoutes:
    """One worker's record. Pinned where there is a GPU, so that copies run beside its work."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Host memory held, bytes."""
        return sum(routes.numel() * routes.element_size() for routes in self._rows.values())

    def keep(self, rows: Sequence[int], lengths: Sequence[int], routes_TLK: Tensor) -> None:
        """Keep the routes of a micro-batch, int16 [sum of lengths, layers, k]; a row recorded before is replaced.

        The copy is submitted to the current stream, on which `of` reads it.
        """
        if routes_TLK.shape[0] != sum(lengths):
            raise ReplayError(f"{routes_TLK.shape[0]} rows of routes for sequences of {sum(lengths)} tokens")
        on_gpu = routes_TLK.is_cuda
        host = torch.empty(routes_TLK.shape, dtype=torch.int16, pin_memory=on_gpu)
        host.copy_(routes_TLK, non_blocking=on_gpu)
        for row, routes in zip(rows, host.split(list(lengths)), strict=True):
            self._rows[row] = routes

    def of(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
        """The routes of rows, one behind the other, on a device.

        Raises:
            ReplayError: a row was not recorded here, or with another length.
        """
        found = []
        for row, length in zip(rows, lengths, strict=True):
            routes = self._rows.get(row)
            if routes is None:
                raise ReplayError(
                    f"sample {row}: its routes were not recorded on this rank in the forward of the old log-probs, so "
                    "there is nothing to replay"
                )
            if len(routes) != length:
                raise ReplayError(f"sample {row}: {len(routes)} positions were recorded, and it has {length}")
            found.append(routes.to(device, non_blocking=True))
        return torch.cat(found)

    def clear(self) -> None:
        self._rows.clear()
