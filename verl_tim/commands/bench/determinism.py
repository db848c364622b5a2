"""`verl-tim bench determinism`: what deterministic kernels cost a trainer's update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_tim.commands.bench.shown import duration, machine_of, mebibytes
from verl_tim.commands.model_folder import check_model, refuse_unreadable
from verl_tim.commands.output import bad_input, print_json, table
from verl_tim.commands.quiet import quiet_libraries

NAME = "determinism"
HELP = (
    "Time and peak memory of a trainer's update (forward, backward, optimiser) with deterministic kernels against the "
    "same without. On a GPU set CUBLAS_WORKSPACE_CONFIG=:16:8 before, which torch demands in deterministic mode."
)


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder; verl-tim model makes small ones.")],
    numerics: Annotated[str, typer.Option(help="contract or stock.")] = "contract",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of an update.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates of each; the median counts.")] = 9,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: PyTorch's own choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmark."""
    from verl_tim.launch.errors import LaunchError

    with bad_input():
        if not (model / "config.json").is_file():
            raise LaunchError.of("MODEL", f"{model} holds no config.json", "give a folder in Hugging Face format")
        for name, value, known in (
            ("--numerics", numerics, ("contract", "stock")),
            ("--dtype", dtype, ("bfloat16", "float32")),
        ):
            if value not in known:
                raise LaunchError.of(name, f"is {value}", f"choose {' or '.join(known)}")
        refuse_unreadable(str(model), "config", "tokenizer")
        if numerics == "contract":
            check_model(model)

    import torch

    from verl_tim.bench.determinism import OFF, benchmark
    from verl_tim.commands.progress import Work
    from verl_tim.training.in_process import single_rank_group

    if threads is not None:
        torch.set_num_threads(threads)
    with Work("bench determinism") as work, quiet_libraries(), single_rank_group():
        measured = benchmark(
            str(model),
            numerics=numerics,
            dtype=dtype,
            sequences=sequences,
            tokens=tokens,
            repeats=repeats,
            done=work.advance,
        )
    base = measured[OFF]
    if as_json:
        shape = {"numerics": numerics, "dtype": dtype, "sequences": sequences, "tokens": tokens, "repeats": repeats}
        machine = machine_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        results = {
            name: {**vars(m), "cpu_ratio": m.cpu_seconds / base.cpu_seconds, "ratio": m.seconds / base.seconds}
            for name, m in measured.items()
        }
        print_json({**machine, **shape, "results": results})
        return
    table(
        f"An update of {sequences} x {tokens} tokens, {numerics}, {dtype}; median of {repeats}, taken in turn",
        ("kernels", "time", "CPU time", "ratio of CPU time", "peak MiB"),
        [
            (
                name,
                duration(m.seconds),
                duration(m.cpu_seconds),
                f"{m.cpu_seconds / base.cpu_seconds:.2f}",
                mebibytes(m.peak_bytes),
            )
            for name, m in measured.items()
        ],
    )
