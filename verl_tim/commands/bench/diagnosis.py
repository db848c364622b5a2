"""`verl-tim bench diagnosis`: what `tim/*`, sampled choices and token dumps cost a training step."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tim.commands.bench.shown import duration, machine_of, mebibytes
from verl_tim.commands.output import print_json, table

NAME = "diagnosis"
HELP = "Time and peak memory, on the trainer's side, of a step's `tim/*` metrics, recorded choices and token dump."


def command(
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 20480,
    mini_batches: Annotated[int, typer.Option(min=1, help="Optimiser steps per training step.")] = 16,
    sampled: Annotated[int, typer.Option(min=0, help="Sequences whose choices are recorded.")] = 8,
    layers: Annotated[int, typer.Option(min=0, help="Sparse layers; 0: a dense model.")] = 48,
    experts: Annotated[int, typer.Option(min=1)] = 128,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    dumped_tokens: Annotated[int, typer.Option(min=1, help="tim.dump.tokens_per_step.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: PyTorch's own choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmark."""
    import torch

    from verl_tim.bench.correction import make_batch
    from verl_tim.bench.diagnosis import Routed, benchmark
    from verl_tim.commands.progress import Work

    if threads is not None:
        torch.set_num_threads(threads)
    device = torch.device("cpu")
    with Work("bench diagnosis") as work:
        batch = make_batch(rows, tokens, device)
        routed = Routed(layers, experts, min(top_k, experts)) if layers else None
        measured = benchmark(
            batch,
            sampled=sampled,
            routed=routed,
            dumped_tokens=dumped_tokens,
            mini_batches=mini_batches,
            repeats=repeats,
            done=work.advance,
        )
    valid = int(batch.response_mask.sum())
    chosen = int(batch.response_mask[:sampled].sum())
    if as_json:
        shape = {"rows": rows, "tokens": tokens, "valid_tokens": valid, "recorded_tokens": chosen, "repeats": repeats}
        print_json({**machine_of(device), **shape, "results": {name: vars(one) for name, one in measured.items()}})
        return
    table(
        f"Diagnosis of {valid:,} tokens, ({rows}, {tokens:,}); {chosen:,} with choices recorded; median of {repeats}",
        ("part", "time", "CPU time", "peak MiB"),
        [(name, duration(m.seconds), duration(m.cpu_seconds), mebibytes(m.peak_bytes)) for name, m in measured.items()],
    )
