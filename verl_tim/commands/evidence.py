"""`verl-tim evidence`: the runs behind docs/evidence.md as archives, figures and the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout, writing

if TYPE_CHECKING:
    from verl_tim.commands.progress import Work
    from verl_tim.evidence.runs import Evidence

NAME = "evidence"
HELP = (
    "What the runs of +matrix=evidence show: pack them into small archives, unpack them, the models too, draw a "
    "figure, write docs/evidence.md."
)

app = typer.Typer(no_args_is_help=True)

_RUNS = typer.Argument(metavar="[RUNS]", help="Folder of the runs: tim.run_dir of +matrix=evidence.")
_ALONE = typer.Option(help="Runs of the same names that had the GPU to themselves: times are taken from them.")


@app.command("pack")
def pack_command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of the runs.")],
    out: Annotated[Path, typer.Option(help="Folder for evidence-1.tar.xz, ...")] = Path("runs/archives"),
    mib: Annotated[float, typer.Option(min=0.01, help="Size of one archive, at most.")] = 15.0,
    files: Annotated[int, typer.Option(min=1, help="Archives, at most.")] = 4,
    used: Annotated[bool, typer.Option("--used", help="Of metrics and token dumps, only what figures read.")] = False,
    dump_steps: Annotated[int, typer.Option(min=0, help="Steps of each run's token dumps, at most.")] = 8,
    only: Annotated[list[str] | None, typer.Option(help="Runs by name, with * and ?; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write run folders (config, manifest, metrics, some token dumps) into small archives; fewer dumps where there is
    no room."""
    from fnmatch import fnmatchcase

    from verl_tim.evidence.archive import MIB, pack
    from verl_tim.evidence.runs import found_in

    with bad_input(), _evidence_errors(), writing("--out"):
        names = None
        if only:
            names = [name for name in found_in(runs) if any(fnmatchcase(str(name), pattern) for pattern in only)]
        packed = pack(runs, out, mib=mib, files=files, used_only=used, dump_steps=dump_steps, names=names)
    sizes = {str(path): path.stat().st_size for path in packed.files}
    if as_json:
        print_json({"files": sizes, "runs": list(packed.runs), "dump_steps": dict(packed.dump_steps)})
        return
    for path, size in sizes.items():
        stdout().print(f"{path}  {size / MIB:.2f} MiB", soft_wrap=True)
    steps = [count for count in packed.dump_steps.values() if count]
    dumps = f"token dumps of {len(steps)} of them, {min(steps)} or more steps each" if steps else "no token dumps"
    stdout().print(f"{len(packed.runs)} runs; {dumps}")


@app.command("unpack")
def unpack_command(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="From pack.")],
    out: Annotated[Path, typer.Option(help="Folder for the run folders.")] = Path("runs/evidence"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make run folders of archives. A run that is there already with as many steps stays as it is."""
    from verl_tim.evidence.archive import unpack

    with bad_input(), _evidence_errors(), writing("--out"):
        unpacked = unpack(archives, out)
    if as_json:
        print_json({"folder": str(out), "written": list(unpacked.written), "kept": list(unpacked.kept)})
        return
    stdout().print(f"{len(unpacked.written)} runs written to {out}", soft_wrap=True)
    if unpacked.kept:
        stdout().print(f"{len(unpacked.kept)} were there with as many steps or more, and stay", soft_wrap=True)


_CACHE = typer.Option(help="tim.cache_dir.")


@app.command("pack-models")
def pack_models_command(
    out: Annotated[Path, typer.Option(help="Folder for MODEL.01-of-07.part, ...")] = Path("runs/models"),
    cache_dir: Annotated[Path, _CACHE] = Path("~/.cache/verl_tim"),
    mib: Annotated[float, typer.Option(min=0.01, help="Size of one part, at most.")] = 15.0,
    only: Annotated[list[str] | None, typer.Option(help="Models by folder, with * and ?; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the models that were made here into parts, so that another machine need not make them."""
    from verl_tim.commands.data import input_errors
    from verl_tim.tasks.parts import MIB, models_in, pack_model

    with bad_input(), input_errors("evidence pack-models"), writing("--out"):
        paths = [path for model in _chosen(models_in(cache_dir), only) for path in pack_model(model, out, mib=mib)]
    sizes = {str(path): path.stat().st_size for path in paths}
    if as_json:
        print_json({"files": sizes})
        return
    for path, size in sizes.items():
        stdout().print(f"{path}  {size / MIB:.2f} MiB", soft_wrap=True)


@app.command("unpack-models")
def unpack_models_command(
    parts: Annotated[list[Path], typer.Argument(metavar="PART...", help="From pack-models, all of each model.")],
    cache_dir: Annotated[Path, _CACHE] = Path("~/.cache/verl_tim"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put packed models where a start finds them. Damaged, incomplete and mixed sets of parts are refused."""
    from verl_tim.commands.data import input_errors
    from verl_tim.tasks.parts import unpack_models

    with bad_input(), input_errors("evidence unpack-models"), writing("--cache-dir"):
        unpacked = unpack_models(parts, cache_dir)
    for path, versions in unpacked.not_found_here.items():
        stderr().print(f"{path}: a start here makes its own: made with {versions}", style="yellow", soft_wrap=True)
    if as_json:
        said = {"written": unpacked.written, "kept": unpacked.kept}
        others = {str(path): versions for path, versions in unpacked.not_found_here.items()}
        print_json({**{name: list(map(str, paths)) for name, paths in said.items()}, "not_found_here": others})
        return
    for path in unpacked.written:
        stdout().print(f"{path}  written", soft_wrap=True)
    for path in unpacked.kept:
        stdout().print(f"{path}  was there with the same weights", soft_wrap=True)


def _chosen(models: list[Path], only: list[str] | None) -> list[Path]:
    from fnmatch import fnmatchcase

    from verl_tim.tasks.errors import InputError

    chosen = [path for path in models if not only or any(fnmatchcase(path.name, pattern) for pattern in only)]
    if not chosen:
        raise InputError(f"--only picks none of {', '.join(path.name for path in models)}")
    return chosen


@app.command("figure")
def figure_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="curves, position (pictures); first, tail, length, rejected, rejected_in_training, thresholds, speed, "
            "speed_side_by_side, forecast (tables).",
        ),
    ],
    runs: Annotated[Path, _RUNS] = Path("runs/evidence"),
    alone: Annotated[Path | None, _ALONE] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture or table.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print a table as JSON.")] = False,
) -> None:
    """Draw one picture (a PNG per model and algorithm) or write one table (Markdown)."""
    from dataclasses import asdict

    from verl_tim.commands.progress import Work
    from verl_tim.evidence.parts import write_part
    from verl_tim.evidence.tables import TABLES

    with bad_input(), _evidence_errors(), writing("--out"):
        out = Path(os.path.abspath(out))  # `..` is no folder's name
        with Work(f"evidence figure {name}") as work:
            evidence = _read(runs, alone, work)
            paths = write_part(name, evidence, out)
    if as_json:
        print_json(asdict(TABLES[name](evidence)) if name in TABLES else [str(path) for path in paths])
    elif name in TABLES:
        stdout().print(paths[0].read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    for path in paths:
        stderr().print(f"written: {path}", soft_wrap=True)


@app.command("page")
def page_command(
    runs: Annotated[Path, _RUNS] = Path("runs/evidence"),
    alone: Annotated[Path | None, _ALONE] = None,
    out: Annotated[Path, typer.Option(help="Folder for evidence.md and evidence/.")] = Path("docs"),
) -> None:
    """Write docs/evidence.md and its pictures."""
    from verl_tim.commands.progress import Work
    from verl_tim.evidence.page import write_page
    from verl_tim.evidence.parts import parts_of_page

    with bad_input(), _evidence_errors(), writing("--out"), Work("evidence page") as work:
        evidence = _read(runs, alone, work)
        work.of(parts_of_page(evidence))
        paths = write_page(evidence, Path(os.path.abspath(out)))
    for path in paths:
        stdout().print(str(path), soft_wrap=True)


def _read(runs: Path, alone: Path | None, work: Work) -> Evidence:
    from verl_tim.evidence.runs import Evidence

    begun: list[str] = []

    def on_part(what: str) -> None:
        if begun:  # the one before has ended
            work.advance()
        begun.append(what)
        work.doing(what)

    return Evidence.read(runs, alone, on_part)


@contextmanager
def _evidence_errors() -> Iterator[None]:
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.launch.errors import LaunchError

    try:
        yield
    except DiagnosisError as error:
        raise LaunchError.of_input(error, "evidence", "see recipes/evidence/README.md") from error
