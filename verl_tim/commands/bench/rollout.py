"""`verl-tim bench rollout`: tokens per second of this engine beside vLLM's, and their share of the memory's speed."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.model_folder import check_model
from verl_tim.commands.output import bad_input, print_json, stderr, table, writing

if TYPE_CHECKING:
    from verl_tim.bench.rollout import Figures, Load, Split

NAME = "rollout"
HELP = (
    "Rollout throughput: this engine, vLLM and vLLM batch-invariant on the same requests, and the floor of the memory."
)
_DEFAULT_ENGINES = ("vexact", "vllm", "vllm-batch-invariant")
_BANDWIDTH = {"NVIDIA H200": 4.3}  # TB/s that reads reach


def command(
    shape: Annotated[
        list[str] | None, typer.Option(help="Model shape, such as qwen3-1.7b; repeat for several. Default: all.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder with a config.json, instead of a shape.")] = None,
    load: Annotated[
        list[str] | None, typer.Option(help="REQUESTSxPROMPTxOUTPUT; repeat for several. Default: those of the shape.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="vexact, stock, vllm or vllm-batch-invariant; repeat for several. Default: all but stock. On several "
            "GPUs with :tpN (ranks share each weight), :ppN (stages share the layers) or :dpN (replicas share the "
            "requests) behind it, such as vexact:tp2."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    repeats: Annotated[int, typer.Option(min=1, help="Runs per engine and load, after a warm-up.")] = 3,
    memory: Annotated[float, typer.Option(help="Share of the GPU's memory that an engine may hold.")] = 0.85,
    bandwidth: Annotated[
        float | None, typer.Option(help="TB/s that reads reach, for the floor. Default: known for an H200 (4.3).")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which an engine that has no new figure is ended as failed.")
    ] = 3600.0,
    profile: Annotated[
        Path | None, typer.Option(help="Write a profile of this engine's decode steps to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the benchmark; exit code 1 if an engine that is here failed, 130 if it was stopped, and what it had measured
    is printed."""
    from verl_tim.bench import rollout
    from verl_tim.launch.exit_code import INTERRUPTED
    from verl_tim.launch.process import stop_requests
    from verl_tim.models import load_model_config

    with bad_input():
        models = _models(shape, model, load, device)
        engines = [_engine(text, device) for text in engine or _DEFAULT_ENGINES]
        _check_shares(engines, models)
        with writing("TMPDIR"):
            tempfile.gettempdir()
        if profile is not None:
            with writing("--profile"):
                profile.touch()
    machine = _machine(device)
    if bandwidth is None:
        bandwidth = _BANDWIDTH.get(machine["device"])
    speed = None if bandwidth is None else bandwidth * 1e12  # of one device
    console = stderr()
    sections: list[dict[str, Any]] = []
    stopped = failed = False
    with stop_requests() as ignore_more:
        for name, loads in models.items():
            with _folder(name, model) as folder, console.status(name) as status:
                figures: list[rollout.Figures] = []
                rows = rollout.run(
                    folder,
                    engines,
                    loads,
                    device=device,
                    repeats=repeats,
                    memory=memory,
                    limit=limit,
                    profile=profile,
                    progress=lambda text, name=name, status=status: status.update(f"{name}: {text}"),  # type: ignore[misc]
                    stopping=ignore_more,
                )
                try:
                    for row in rows:
                        figures.append(row)
                        failed |= bool(row.problem) and rollout.unavailable(row.engine, device) is None
                        console.print(f"{name}, {_told(row)}", highlight=False)
                except KeyboardInterrupt:
                    stopped = True
                sections.append({"model": name, "rows": rollout.as_json(figures, load_model_config(folder), speed)})
            if stopped:
                break
    if as_json:
        print_json({**machine, "bandwidth": speed, "repeats": repeats, "models": sections})
    else:
        _print(machine, sections)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(1)


def _told(row: Figures) -> str:
    speed = row.tokens_per_second
    return f"{row.name}, {row.load}: {row.problem if speed is None else f'{speed:,.0f} tokens/s'}"


def _engine(text: str, device: str) -> tuple[str, Split]:
    """An engine's name, and how it uses the devices."""
    import torch

    from verl_tim.bench.rollout import ENGINES, Split
    from verl_tim.launch.errors import LaunchError

    name, _, form = text.partition(":")
    if name not in ENGINES:
        raise LaunchError.of("--engine", f"{name!r} is unknown", f"choose from {', '.join(ENGINES)}")
    try:
        split = Split.parse(form) if ":" in text else Split()
    except ValueError as error:
        raise LaunchError.of("--engine", str(error), "for example --engine vexact:tp2") from None
    if name == "stock" and split.tensor * split.pipeline > 1:
        raise LaunchError.of("--engine", "rollout stock runs on one rank", "give stock alone, or stock:dpN")
    if device == "cuda" and torch.cuda.device_count() < split.devices:
        what = f"{text} takes {split.devices} GPUs, and PyTorch sees {torch.cuda.device_count()}"
        raise LaunchError.of("--engine", what, "ask for fewer")
    return name, split


def _check_shares(engines: list[tuple[str, Split]], models: dict[str, list[Load]]) -> None:
    from verl_tim.launch.errors import LaunchError

    fewest = min(load.requests for loads in models.values() for load in loads)
    for name, split in engines:
        if split.data > fewest:
            what = f"{name}:{split} has {split.data} replicas, and a load has {fewest} requests"
            raise LaunchError.of("--load", what, "give each replica a request at least")


def _models(shape: list[str] | None, model: Path | None, load: list[str] | None, device: str) -> dict[str, list[Load]]:
    """Loads by model name."""
    import torch

    from verl_tim.bench.rollout import WORKLOADS, Load
    from verl_tim.launch.errors import LaunchError
    from verl_tim.tasks.random_model import SHAPES

    if device not in ("cuda", "cpu"):
        raise LaunchError.of("--device", f"{device!r} is unknown", "choose cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError.of("--device", "PyTorch sees no GPU here", "run it on a machine with one, or --device cpu")
    if model is not None and shape:
        raise LaunchError.of("--model", "both a folder and a shape are given", "give one of them")
    if model is not None:
        check_model(model, "--model")
    names = [str(model)] if model is not None else shape or list(WORKLOADS)
    for name in names:
        if model is None and name not in SHAPES:
            raise LaunchError.of("--shape", f"{name!r} is unknown", f"choose from {', '.join(SHAPES)}")
    try:
        given = [Load.parse(text) for text in load or ()]
    except ValueError as error:
        raise LaunchError.of("--load", str(error), "for example --load 16x128x512") from None
    models = {name: given or list(WORKLOADS.get(name, ())) for name in names}
    for name, loads in models.items():
        if not loads:
            raise LaunchError.of("--load", f"{name} has no workloads of its own", "give some: --load 16x128x512")
    return models


def _folder(name: str, model: Path | None) -> Any:
    """The model's folder; of a shape, one that holds its config alone, and only for a while."""
    import contextlib

    from verl_tim.tasks.random_model import hf_config

    if model is not None:
        return contextlib.nullcontext(model)

    @contextlib.contextmanager
    def made():
        with tempfile.TemporaryDirectory() as place:
            hf_config(name).save_pretrained(place)
            yield Path(place)

    return made()


def _machine(device: str) -> dict[str, Any]:
    import platform

    import torch

    from verl_tim.diagnosis.process import package_versions

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = package_versions(("torch", "triton", "vllm", "verl-tim"))
    return {"date": time.strftime("%Y-%m-%d"), "device": name, "versions": versions}


def _print(machine: dict[str, Any], sections: list[dict[str, Any]]) -> None:
    where = f"{machine['device']}, {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"
    for section in sections:
        cells = []
        for row in section["rows"]:
            load = row["load"]
            cells.append(
                (
                    f"{load['requests']} x {load['prompt']} -> {load['output']}",
                    row["engine"],
                    _cell(row["tokens_per_second"], "{:,.0f}"),
                    _cell(row["spread"], "{:.1%}"),
                    _cell(row["share_of_floor"], "{:.0%}"),
                    _cell(row["over_vllm"], "{:.2f}"),
                    row["problem"] or _host(row["host"]),
                )
            )
        columns = ("load", "engine", "tokens/s", "spread", "of the floor", "over vLLM", "note")
        table(f"{section['model']}: {where}", columns, sorted(cells, key=lambda cell: cell[0]))


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _host(host: dict[str, float]) -> str:
    if not host:
        return ""
    busy = sum(value for name, value in host.items() if name.endswith("_us") and name != "wait_us")
    return f"{host['steps']:.0f} steps, host {busy:,.0f} us of each, waiting {host['wait_us']:,.0f} us"
