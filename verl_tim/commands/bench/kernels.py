"""`verl-tim bench kernels`: the contract's GPU kernels, and a whole trainer step, beside what they replace."""

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, table

if TYPE_CHECKING:
    from verl_tim.bench.row import BenchRow

NAME = "kernels"
HELP = (
    "GPU kernels of the contract (linear, attention, row operations, experts, head) and a whole trainer step, against "
    "cuBLAS, cuDNN, FlashAttention and stock Hugging Face. Needs a GPU."
)
PARTS = {
    "gemm": "kernels_gemm",
    "attention": "kernels_attention",
    "rows": "kernels_rows",
    "moe": "kernels_moe",
    "head": "kernels_head",
    "trainer": "trainer_step",
}


def command(
    part: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; repeat for several. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes of each instead of all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmarks; exit code 1 if one of them failed, after the others have run."""
    with bad_input():
        names = _parts(part)
    from verl_tim.commands.progress import Work

    rows: list[BenchRow] = []
    failed: dict[str, str] = {}
    with Work("bench kernels", len(names)) as work:
        for name in names:
            work.doing(name)
            began = time.monotonic()
            try:
                rows += importlib.import_module(f"verl_tim.bench.{PARTS[name]}").run(quick)
            except Exception as error:
                # A part that cannot run here (memory, a missing peer) must not take the others' figures with it.
                failed[name] = f"{type(error).__name__}: {error}"
            work.ended(f"{name}: {'failed' if name in failed else 'measured'}, {time.monotonic() - began:.1f} s")
            work.advance()
    if as_json:
        print_json({**_machine(), "rows": [row.as_json() for row in rows], "failed": failed})
    else:
        _print(rows, failed)
    if failed:
        raise typer.Exit(1)


def _parts(given: list[str] | None) -> list[str]:
    import torch

    from verl_tim.launch.errors import LaunchError

    for name in given or ():
        if name not in PARTS:
            raise LaunchError.of("--part", f"{name!r} is unknown", f"choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        raise LaunchError.of("bench kernels", "PyTorch sees no GPU here", "run it on a machine with one")
    return given or list(PARTS)


def geometric_means(rows: list[BenchRow]) -> dict[str, float]:
    """Of the peer's time over ours, per operation that has a peer."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.ratio is not None:
            ratios[row.op].append(row.ratio)
    return {op: math.exp(sum(map(math.log, values)) / len(values)) for op, values in ratios.items()}


def _machine() -> dict[str, Any]:
    import torch

    from verl_tim.diagnosis.process import package_versions

    versions = package_versions(("torch", "triton", "vllm", "verl-tim"))
    return {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "versions": versions}


def _print(rows: list[BenchRow], failed: dict[str, str]) -> None:
    machine = _machine()
    cells = [
        (row.op, row.shape, _time(row.ours_us), row.peer, _time(row.peer_us), _ratio(row.ratio), row.note)
        for row in rows
    ]
    title = f"{machine['device']}, {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"
    table(title, ("op", "shape", "ours", "peer", "its time", "its time / ours", "note"), cells)
    means = [(op, f"{mean:.2f}") for op, mean in geometric_means(rows).items()]
    table("Geometric mean of peer's time / ours; above 1 ours is faster", ("op", "mean"), means)
    for name, problem in failed.items():
        stderr().print(f"[red]{name} failed: {problem}[/red]", soft_wrap=True)


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    return f"{microseconds / 1e3:.4g} ms" if microseconds >= 1e3 else f"{microseconds:.4g} us"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
