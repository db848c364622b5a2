"""`verl-tim bench correction`: the correction and its loss against verl's own, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.bench.shown import chosen_device, duration, machine_of, mebibytes
from verl_tim.commands.output import bad_input, print_json, table

if TYPE_CHECKING:
    from verl_tim.bench.correction import Row

NAME = "correction"
HELP = (
    "Time and peak memory of the rollout correction, and of the policy loss with it (forward, backward, metrics), "
    "against verl's."
)


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
        where = chosen_device(device)
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
            work.ended(f"{row.preset}, {row.part}: {duration(row.ours.seconds)}")
    valid = float(batch.response_mask.double().mean())
    if as_json:
        print_json(
            {**machine_of(where), "rows": rows, "tokens": tokens, "valid_share": valid, "repeats": repeats}
            | {"results": [_as_dict(row) for row in measured]}
        )
        return
    title = f"Correction, ({rows}, {tokens:,}) tensors with {valid:.0%} valid tokens, {where}, median of {repeats}"
    table(
        title, ("preset", "part", "ours", "verl", "ours / verl", "peak MiB, ours / verl"), [_cells(r) for r in measured]
    )


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


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "preset": row.preset,
        "part": row.part,
        "ours": vars(row.ours),
        "verl": None if row.verl is None else vars(row.verl),
    }


def _cells(row: Row) -> tuple[str, ...]:
    if row.verl is None:
        return row.preset, row.part, duration(row.ours.seconds), "has none", "", mebibytes(row.ours.peak_bytes)
    ratio = row.ours.seconds / row.verl.seconds
    peaks = f"{mebibytes(row.ours.peak_bytes)} / {mebibytes(row.verl.peak_bytes)}"
    return row.preset, row.part, duration(row.ours.seconds), duration(row.verl.seconds), f"{ratio:.2f}", peaks
