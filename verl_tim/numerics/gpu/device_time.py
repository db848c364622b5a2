"""Device time of a call: by a CUDA graph, without the launch overhead of Python, or by events where no graph can be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from verl_tim.numerics import collection

_REPLAYS = 7  # of a graph, whose median counts


def graph_us(runs: Callable[[], object] | Sequence[Callable[[], object]], *, calls: int = 20) -> float:
    """Median microseconds of one call.

    Args:
        runs: what to time, or several that do the same on different data, so that none finds its own in the cache.
        calls: calls per graph, at least one of each of `runs`.
    """
    functions = [runs] if callable(runs) else list(runs)
    total = max(calls, len(functions))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in functions:  # compiles, and fills the allocator
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with collection.paused(), torch.cuda.graph(graph):
        for call in range(total):
            functions[call % len(functions)]()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / total)
    return statistics.median(times)


def event_us(run: Callable[[], object], *, repeats: int = 5, warm_up: int = 1) -> float:
    """Median microseconds of one call as the device sees it: for what a CUDA graph cannot hold (autograd, FSDP).

    Args:
        repeats: timed calls, of which the median counts; warm_up: calls before them.
    """
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
