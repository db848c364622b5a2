"""`verl-tim bench routing`: what routing replay costs in memory, on the way and in time."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tim.commands.bench.shown import chosen_device, duration, machine_of, mebibytes
from verl_tim.commands.output import bad_input, print_json, table

NAME = "routing"
HELP = "Memory, transport and time of replayed routes: conversion, the record of r2, a router with given experts."


def command(
    layers: Annotated[int, typer.Option(min=1, help="Sparse layers.")] = 48,
    experts: Annotated[int, typer.Option(min=2)] = 128,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of all sequences, prompts included.")] = 65_536,
    sequences: Annotated[int, typer.Option(min=1, help="Equally long ones.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: PyTorch's own choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmark."""
    import torch

    from verl_tim.bench.routing import Shape, benchmark
    from verl_tim.commands.progress import Work
    from verl_tim.launch.errors import LaunchError

    with bad_input():
        where = chosen_device(device)
        if top_k > experts:
            raise LaunchError.of("--top-k", f"{top_k} is more than --experts {experts}", "lower it")
        if tokens < 2 * sequences:
            raise LaunchError.of("--tokens", f"{tokens} for --sequences {sequences}", "give at least two for each")
    if threads is not None:
        torch.set_num_threads(threads)
    shape = Shape(layers, experts, top_k, tokens, sequences)
    with Work("bench routing") as work:
        cost = benchmark(shape, where, repeats=repeats, done=work.advance)
    if as_json:
        facts = {**machine_of(where), **vars(shape), "bytes_per_token": shape.bytes_per_token, "repeats": repeats}
        results = {name: vars(one) for name, one in cost.parts.items()}
        print_json(
            {**facts, "wire_bytes_per_token": cost.wire_bytes, "host_bytes": cost.host_bytes, "results": results}
        )
        return
    counted = sequences * shape.length
    table(
        f"Routes of {layers} layers, {top_k} of {experts} experts: {shape.bytes_per_token} bytes per token, pickled "
        f"{cost.wire_bytes:.0f}; {counted:,} tokens in {sequences} sequences take {mebibytes(cost.host_bytes)} MiB "
        f"on the host; median of {repeats}",
        ("part", "time", "CPU time", "peak MiB"),
        [
            (name, duration(m.seconds), duration(m.cpu_seconds), mebibytes(m.peak_bytes))
            for name, m in cost.parts.items()
        ],
    )
