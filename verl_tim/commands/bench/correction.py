"""`verl-tim bench correction`: the correction and its loss against verl's own, in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, print_json, table

if TYPE_CHECKING:
    from verl_tim.bench.correction import Row

NAME = "correction"
HELP = (
    "Time and peak memory of the rollout correction, and of the policy loss with it (forward, backward, metrics), "
    "against verl's."
)
_MIB = 2**20


def command(
    rows: Annotated[int, typer.Option(min=1, help="Sequences.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Width of the tensors.")] = 20480,
    preset: Annotated[
        list[str] | None, typer.Option(help="A preset; repeat for several. Default: seven of them.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: PyTorch's own choice.")] = None,
    seed: Annotated[int, typer.Option(help="Of the made-up batch.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmark."""
    with bad_input():
        where = _device(device)
        names = _presets(preset)
    import torch

    from verl_tim.bench.correction import benchmark, calls, make_batch
    from verl_tim.commands.progress import Work

    if threads is not None:
        torch.set_num_threads(threads)
    measured: list[Row] = []
    with Work("bench correction", calls(names, repeats=repeats)) as work:
        work.doing("making a batch")
        batch = make_batch(rows, tokens, where, seed=seed)
        work.doing("measuring")
        for row in benchmark(names, batch, repeats=repeats, done=work.advance):
            measured.append(row)
            work.ended(f"{row.preset}, {row.part}: {_time(row.ours.seconds)}")
    valid = float(batch.response_mask.double().mean())
    if as_json:
        print_json(
            {**_machine(where), "rows": rows, "tokens": tokens, "valid_share": valid, "repeats": repeats}
            | {"results": [_as_dict(row) for row in measured]}
        )
        return
    title = f"Correction, ({rows}, {tokens:,}) tensors with {valid:.0%} valid tokens, {where}, median of {repeats}"
    table(
        title, ("preset", "part", "ours", "verl", "ours / verl", "peak MiB, ours / verl"), [_cells(r) for r in measured]
    )


def _device(name: str) -> Any:
    import torch

    from verl_tim.launch.errors import LaunchError

    if name not in ("cpu", "cuda"):
        raise LaunchError.of("--device", f"{name!r} is not known", "give cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LaunchError.of("--device", "PyTorch sees no CUDA device here", "give --device cpu")
    return torch.device(name)


def _presets(given: Sequence[str] | None) -> tuple[str, ...]:
    from verl_tim.bench.correction import PRESETS
    from verl_tim.correction import ConfigError, RolloutCorrectionConfig
    from verl_tim.launch.errors import LaunchError

    names = tuple(given or PRESETS)
    for name in names:
        try:
            RolloutCorrectionConfig.from_mapping({"preset": name})
        except ConfigError as error:
            remedy = error.remedy if error.key == "preset" else "choose a preset that has a threshold"
            raise LaunchError.of("--preset", f"{name}: {error.problem}", remedy) from error
    return names


def _machine(device: Any) -> dict[str, Any]:
    import os

    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # above the number of threads: other work ran beside, and times are upper bounds
        "load": round(os.getloadavg()[0], 2),
    }


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "preset": row.preset,
        "part": row.part,
        "ours": vars(row.ours),
        "verl": None if row.verl is None else vars(row.verl),
    }


def _cells(row: Row) -> tuple[str, ...]:
    if row.verl is None:
        return row.preset, row.part, _time(row.ours.seconds), "has none", "", _mib(row.ours.peak_bytes)
    ratio = row.ours.seconds / row.verl.seconds
    peaks = f"{_mib(row.ours.peak_bytes)} / {_mib(row.verl.peak_bytes)}"
    return row.preset, row.part, _time(row.ours.seconds), _time(row.verl.seconds), f"{ratio:.2f}", peaks


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _mib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / _MIB:,.0f}"
