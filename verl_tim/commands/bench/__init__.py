"""`verl-tim bench NAME`: one module per benchmark, listed in BENCHMARKS."""

from __future__ import annotations

import typer

from verl_tim.commands.bench import correction, determinism, diagnosis, kernels, rollout, routing

NAME = "bench"
HELP = "Measure time and memory of this package's parts against what they replace."

# How the help lists them; each module has NAME, HELP and a function `command`.
BENCHMARKS = (correction, determinism, diagnosis, kernels, rollout, routing)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
for benchmark in BENCHMARKS:
    app.command(benchmark.NAME, help=benchmark.HELP)(benchmark.command)
