"""Buffers that two processes see, without a GPU: mapped files. In place of CUDA IPC (`shared_buckets.share`)."""

from __future__ import annotations

from pathlib import Path

import torch


def share_file(prefix: Path, buffer: torch.Tensor) -> tuple[str, int]:
    """Move a sender's buffer, with what is in it, into a file; its handle."""
    path = next(path for n in range(99) if not (path := prefix.with_name(f"{prefix.name}.{n}")).exists())
    size = buffer.numel()
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    buffer.set_(mapped.copy_(buffer))  # it is shared when it is full
    return str(path), size


def open_file(handle: tuple[str, int], device: torch.device) -> torch.Tensor:
    """The buffer behind a handle."""
    path, size = handle
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
