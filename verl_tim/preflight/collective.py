"""A real all-reduce over every GPU of every node, or over the nodes' CPUs: the first thing a run's trainer does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

# fp32 values of the timed all-reduce: 64 MiB, where a network's speed and no longer its latency counts.
_SIZE = 1 << 24


@dataclass(frozen=True)
class Outcome:
    """One rank's part.

    Attributes:
        correct: every element of the sum was right.
        gigabytes_per_second: bus bandwidth of one large all-reduce, 2 (n - 1) / n times size over time; 0 for one rank.
        seconds: from the start until the group stood and the first sum was there.
    """

    correct: bool
    gigabytes_per_second: float
    seconds: float


def all_reduce(rank: int, ranks: int, address: str, *, gpu: bool, limit: float, size: int = _SIZE) -> Outcome:
    """Join a process group of all ranks, sum over it, and leave it.

    Args:
        address: tcp://HOST:PORT where rank 0 listens.
        gpu: over NCCL, on this process's first GPU; otherwise over gloo.
        limit: seconds that joining, and each collective, may take.
        size: fp32 elements of the sum.

    Raises:
        RuntimeError: of torch.distributed: who did not come, or which connection failed.
    """
    import torch
    import torch.distributed as dist

    begin = time.monotonic()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=address,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit),
        device_id=device if gpu else None,
    )
    try:
        values = torch.full((size,), float(rank + 1), device=device)
        dist.all_reduce(values)
        # small whole numbers: exact in fp32 in whatever order they are added
        correct = bool((values == ranks * (ranks + 1) / 2).all())
        _wait(device)
        seconds = time.monotonic() - begin
        dist.barrier()
        started = time.monotonic()
        dist.all_reduce(values)
        _wait(device)
        took = time.monotonic() - started
        moved = 2 * (ranks - 1) / ranks * values.numel() * values.element_size()
        return Outcome(correct, moved / took / 1e9, seconds)
    finally:
        dist.destroy_process_group()


def _wait(device: object) -> None:
    import torch

    if getattr(device, "type", "cpu") == "cuda":
        torch.cuda.synchronize()


def free_address() -> str:
    """tcp://HOST:PORT of this node, as other nodes reach it, at a port that is free now."""
    import socket

    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
