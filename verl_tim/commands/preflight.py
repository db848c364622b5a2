"""`verl-tim preflight`: is every node of a Ray cluster fit for a run? One table, and what to do about the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, first_line, print_json, stderr, stdout

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tim.launch.errors import LaunchError
    from verl_tim.preflight.cluster import Look
    from verl_tim.preflight.judge import Node, Problem

NAME = "preflight"
HELP = (
    "Look at every node of a Ray cluster before a run: versions, GPUs, NCCL, the contract, disks, files.\n\n"
    "[dim]verl-tim preflight recipe=dense_grpo cluster=gpu8x8 --wait 600\n\n"
    "verl-tim preflight runs/NAME --json\n\n"
    "verl-tim preflight --address 10.0.0.1:6379    [not dim]the nodes alone, whatever will run there[/][/]\n\n"
    "Exit code: 0 the run may start, 1 it may not, 2 nothing could be looked at. docs/launching.md lists the checks."
)
_ANSWER_SECONDS = 30.0


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | FILE.yaml | RUN_FOLDER] [KEY=VALUE]...", help="A config, then overrides."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray's head, HOST:PORT. Default: the config's, RAY_ADDRESS, or a Ray of its own.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that missing nodes may take to join.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for an answer, and for the all-reduce.")] = 120,
    probe_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the contract's probe.")] = 300,
    min_disk: Annotated[float, typer.Option(min=0, help="GiB that run folder, cache and /tmp must have free.")] = 10,
    checks: Annotated[
        str | None, typer.Option(help="Only these, by comma: nodes,versions,... (docs/launching.md).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at the nodes."""
    from verl_tim.preflight.cluster import Limits, look
    from verl_tim.preflight.judge import problems

    with bad_input():
        what, config = _look(words or [], checks, min_disk)
        what = dataclasses.replace(what, limits=Limits(wait, timeout, timeout, probe_timeout))
        with _ray(config, address):
            nodes = look(what, lambda line: stderr().print(line, style="dim", markup=False))
    found = problems(nodes, what.wanted, what.checks)
    good = not any(one.error for one in found)
    if as_json:
        print_json(
            {
                "ok": good,
                "nodes": [dataclasses.asdict(node) for node in nodes],
                "findings": [one._asdict() for one in found],
            }
        )
    else:
        _show(nodes, found, what.checks)
    if not good:
        raise typer.Exit(1)


def _look(words: Sequence[str], checks: str | None, min_disk: float) -> tuple[Look, DictConfig | None]:
    import tempfile

    from omegaconf import OmegaConf

    from verl_tim.doctor.source import read
    from verl_tim.launch.errors import LaunchError
    from verl_tim.launch.prepare import complete
    from verl_tim.launch.recipes import closest
    from verl_tim.launch.words import with_recipe
    from verl_tim.preflight.cluster import Look
    from verl_tim.preflight.judge import CHECKS, GIB, Wanted
    from verl_tim.preflight.wanted import cluster_size, contract_of, files_of

    chosen = tuple(checks.split(",")) if checks is not None else CHECKS
    for name in chosen:
        if name not in CHECKS:
            raise LaunchError.of(
                "--checks", f"there is no check {name!r}", closest(name, list(CHECKS)) + f"known: {', '.join(CHECKS)}"
            )
    places = {"temporary files": tempfile.gettempdir()}
    if not words:
        # the probe's shapes are the model's
        chosen = tuple(name for name in chosen if name != "contract")
        return Look(Wanted(min_disk=int(min_disk * GIB)), places, checks=chosen), None
    config = read(with_recipe(words)).config
    complete(config)
    nodes, gpus = cluster_size(config)
    cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    run_dir = OmegaConf.select(config, "tim.run_dir")
    for key in ("tim.run_dir", "tim.cache_dir"):
        folder = OmegaConf.select(config, key)
        places |= {key: str(folder)} if folder else {}
    attention = contract_of(config)
    if attention is None:
        chosen = tuple(name for name in chosen if name != "contract")
    files = files_of(config)
    wanted = Wanted(nodes, gpus, cpu, files, int(min_disk * GIB))
    return Look(wanted, places, run_dir, files.get("actor_rollout_ref.model.path"), attention or "auto", chosen), config


@contextmanager
def _ray(config: DictConfig | None, address: str | None) -> Iterator[None]:
    """This process in the cluster, with the environment that the run's workers will have."""
    import logging
    import os

    import ray
    from omegaconf import OmegaConf

    from verl_tim.launch.errors import LaunchError
    from verl_tim.training.config import OWN_CLUSTER

    given: dict[str, Any] = {}
    if config is not None:
        container = OmegaConf.to_container(OmegaConf.select(config, "ray_kwargs.ray_init") or OmegaConf.create({}))
        assert isinstance(container, dict)
        given = {str(key): value for key, value in container.items() if value is not None}
    address = address or given.get("address") or os.environ.get("RAY_ADDRESS")
    if address == OWN_CLUSTER:
        given["address"] = address
    elif address:
        given = {"address": address, "runtime_env": given.get("runtime_env", {})}
        if address != "auto":
            _answers(address)
    try:
        ray.init(**given, log_to_driver=False, logging_level=logging.ERROR)
    # of Ray: no cluster there, one of another version, an argument that does not belong there
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        raise LaunchError.of(
            "ray_kwargs.ray_init.address" if address else "ray_kwargs.ray_init",
            f"{address or 'a Ray of its own'}: {first_line(error)}",
            "start Ray (ray start --head), give its --address, or leave the address out for this machine alone",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    """Raise LaunchError unless a Ray head answers there soon: `ray.init` waits for minutes where nothing listens."""
    import socket
    import subprocess
    import sys

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except ValueError as error:
        raise _unreachable(address, "not HOST:PORT") from error
    except OSError as error:
        raise _unreachable(address, str(error)) from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
        said = (answer.stderr or answer.stdout).strip().splitlines()
        problem = "" if answer.returncode == 0 else said[-1] if said else "no Ray answers there"
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_ANSWER_SECONDS:.0f} s"
    if problem:
        raise _unreachable(address, problem)


def _unreachable(address: str, problem: str) -> LaunchError:
    from verl_tim.launch.errors import LaunchError

    return LaunchError.of(
        "ray_kwargs.ray_init.address",
        f"{address}: {problem}",
        "start Ray (ray start --head), give its --address HOST:PORT, or leave the address out for this machine alone",
    )


def _show(nodes: Sequence[Node], found: Sequence[Problem], checks: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from verl_tim.preflight.table import cell

    columns = [name for name in checks if name != "nodes"]
    table = Table(title=f"Preflight: {len(nodes)} node(s)", title_justify="left")
    for column in ("node", *columns):
        table.add_column(column, overflow="fold")
    for node in nodes:
        mine = [one for one in found if one.node == node.name]
        style = "red" if any(one.error for one in mine) else "yellow" if mine else "green"
        label = f"{node.name}\n{node.facts.host}" if node.facts is not None else node.name
        table.add_row(Text(label, style=style), *(cell(node, name, mine) for name in columns))
    stdout().print(table)
    console = stderr()
    for one in found:
        head = f"{one.node or 'cluster'}: {one.check}: "
        console.print(Text.assemble((head, "bold red" if one.error else "bold yellow"), one.problem), soft_wrap=True)
        console.print(Text.assemble(("  -> ", "bold"), one.remedy), soft_wrap=True)
    errors = sum(one.error for one in found)
    if not found:
        stdout().print("Nothing found: the run may start.")
    else:
        end = "the run must not start" if errors else "the run may start"
        stdout().print(f"{errors} error(s), {len(found) - errors} warning(s): {end}.")
