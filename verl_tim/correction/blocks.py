"""A batch cut into blocks of rows that fit a CPU's cache.

Everything here is elementwise, per row, or a sum, so blocks give what the whole batch gives. On a CPU the whole batch
would be read and written some hundred times over, each time through memory that the system has to hand out anew: at
(512, 20480) that takes several times as long as computing. On other devices the batch stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_ELEMENTS = 2**18  # 1 MiB of fp32


def row_blocks(response_mask: Tensor, *, whole: bool, **tensors: Tensor | None) -> Iterator[dict[str, Any]]:
    """The same tensors by name, block by block of rows; at least one block.

    Args:
        response_mask: (B, T); the other tensors have its shape or are None.
        whole: one block, whatever the size.

    `torch.split` has one backward for all blocks, so gradients come back without a copy per block.
    """
    given = {"response_mask": response_mask, **{name: tensor for name, tensor in tensors.items() if tensor is not None}}
    absent = dict.fromkeys(tensors.keys() - given.keys())
    fits = response_mask.device.type != "cpu" or response_mask.numel() <= _ELEMENTS
    if whole or fits or any(tensor.shape != response_mask.shape for tensor in given.values()):
        yield {**given, **absent}  # shapes that differ are refused where they are read
        return
    rows = max(1, _ELEMENTS // response_mask.shape[-1])
    split = [tensor.split(rows) for tensor in given.values()]
    for parts in zip(*split, strict=True):
        yield {**dict(zip(given, parts, strict=True)), **absent}
