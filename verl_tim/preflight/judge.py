"""From what every node said to what is wrong: pure functions over plain records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_tim.preflight.facts import NodeFacts

GIB = 1 << 30

# The checks, in the order of the table's columns.
CHECKS = (
    "nodes",
    "versions",
    "gpus",
    "memory",
    "variables",
    "disk",
    "files",
    "shared",
    "clock",
    "collective",
    "contract",
)

# Below so many seconds clocks may differ: log lines of several nodes can still be put in order.
CLOCK_SECONDS = 1.0
# A trainer plans with all memory of a GPU; what stays free of a driver's own use is more than this share.
FREE_SHARE = 0.9
# /dev/shm: NCCL and Ray's objects between the processes of a node. A pod has 64 MB unless it asks for more.
SHM_GPU, SHM_CPU = 8 * GIB, GIB // 4


class Problem(NamedTuple):
    """One finding. `node` is empty where it is of the whole cluster; `error`: the run must not start."""

    check: str
    node: str
    problem: str
    remedy: str
    error: bool = True


@dataclass(frozen=True)
class Wanted:
    """What the run needs of the cluster.

    Attributes:
        nodes: with `gpus` GPUs each; None: as many as there are.
        gpus: of each node (Ray's slots where `cpu`); None: whatever is there.
        files: key -> path that must be on every node.
        min_disk: bytes, of every place.
    """

    nodes: int | None = None
    gpus: int | None = None
    cpu: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    min_disk: int = 10 * GIB


@dataclass(frozen=True)
class Trial:
    """How a trial went on one node: its words where it went well, or what went wrong."""

    good: bool
    text: str


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, and what it answered.

    Attributes:
        name: its address, as Ray has it.
        ray_gpus: GPUs that Ray counts there.
        facts: None where it did not answer; `silence` says why.
        clock: (its clock minus this process's, and how wrong that may be), seconds.
        shared: it saw the file that the first node wrote; collective, contract: the trials. None: not tried.
    """

    name: str
    ray_gpus: int = 0
    facts: NodeFacts | None = None
    silence: str = ""
    clock: tuple[float, float] | None = None
    shared: Trial | None = None
    collective: Trial | None = None
    contract: Trial | None = None


def problems(nodes: Sequence[Node], wanted: Wanted, checks: Sequence[str] = CHECKS) -> list[Problem]:
    """Everything that is wrong, in the order of `CHECKS`; errors before warnings within each."""
    found: list[Problem] = []
    for check in CHECKS:
        if check in checks:
            found += sorted(_JUDGES[check](nodes, wanted), key=lambda one: not one.error)
    return found


def _nodes(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    enough = [node for node in nodes if node.ray_gpus >= (wanted.gpus or 0)]
    if wanted.nodes is not None and len(enough) < wanted.nodes:
        has = ", ".join(f"{node.name} ({node.ray_gpus})" for node in nodes) or "none"
        yield Problem(
            "nodes",
            "",
            f"{len(enough)} of {wanted.nodes} nodes with {wanted.gpus} GPU(s) have joined; nodes (GPUs): {has}",
            "start Ray on the missing nodes with the head's address, raise --wait, or lower trainer.nnodes",
        )
    for node in nodes:
        if node.silence:
            yield Problem("nodes", node.name, node.silence, "look at this node, or take it out of the cluster")


def _versions(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    said = {node.name: {**node.facts.versions} for node in nodes if node.facts is not None}
    yield from _unlike(
        "versions", said, "{name} is {value}, elsewhere {usual}", "install {usual} there", absent="absent"
    )
    yield from _unlike(
        "versions",
        {node.name: {"verl_tim's source": node.facts.source} for node in nodes if node.facts is not None},
        "{name} is {value}, elsewhere {usual}: equal versions, other files",
        "install the same commit on every node, or one from a folder that all nodes share",
    )


def _gpus(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    if wanted.cpu:
        return
    answered = [node for node in nodes if node.facts is not None and (node.facts.gpus or node.ray_gpus)]
    for node in answered:
        assert node.facts is not None
        if node.facts.gpu_error:
            yield Problem(
                "gpus", node.name, f"nvidia-smi: {node.facts.gpu_error}", "repair the driver, or leave it out"
            )
            continue
        if len(node.facts.gpus) < node.ray_gpus:
            yield Problem(
                "gpus",
                node.name,
                f"Ray counts {node.ray_gpus} GPU(s), nvidia-smi {len(node.facts.gpus)}",
                "start Ray there with the --num-gpus that it has; a GPU may have fallen off the bus (dmesg)",
            )
        for index, gpu in enumerate(node.facts.gpus):
            if gpu.total and gpu.free < FREE_SHARE * gpu.total:
                by = f", by {', '.join(gpu.users)}" if gpu.users else ""
                yield Problem(
                    "gpus",
                    node.name,
                    f"GPU {index} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free{by}",
                    "end what holds it (nvidia-smi)",
                )
    kinds = {node.name: {"GPU": node.facts.gpus[0].name} for node in answered if node.facts and node.facts.gpus}
    why = "take nodes of one kind: bits differ between chips"
    yield from _unlike("gpus", kinds, "its GPUs are {value}, elsewhere {usual}", why)
    drivers = {node.name: {"driver": node.facts.driver} for node in answered if node.facts and node.facts.driver}
    yield from _unlike("gpus", drivers, "its driver is {value}, elsewhere {usual}", "install {usual}", error=False)


def _memory(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    for node in nodes:
        if node.facts is None:
            continue
        least = SHM_CPU if wanted.cpu or not node.facts.gpus else SHM_GPU
        total, free = node.facts.shm or (0, 0)
        if free < least:
            yield Problem(
                "memory",
                node.name,
                f"/dev/shm has {free / GIB:.2f} GiB free of {total / GIB:.2f}, and NCCL and Ray want {least / GIB:g}",
                "tim.launch.shm in Kubernetes, --shm-size or --ipc=host in Docker; or remove files there",
            )


def _variables(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    said = {node.name: {**node.facts.variables} for node in nodes if node.facts is not None}
    for problem in _unlike(
        "variables",
        said,
        "{name} is {value} for its workers, elsewhere {usual}",
        "set it under tim.launch.env, which sets it for all",
        absent="unset",
    ):
        # collectives of ranks that choose different algorithms never end
        yield problem if problem.problem.startswith("NCCL_") else problem._replace(error=False)


def _disk(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    for node in nodes:
        for place, free in (node.facts.disk if node.facts is not None else {}).items():
            if isinstance(free, str):
                yield Problem("disk", node.name, f"{place}: {free}", f"give another folder as {place}")
            elif free < wanted.min_disk:
                yield Problem(
                    "disk",
                    node.name,
                    f"{place}: {free / GIB:.1f} GiB free, less than {wanted.min_disk / GIB:g}",
                    "make room, give another folder, or lower --min-disk",
                )


def _files(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    answered = {node.name: node.facts.files for node in nodes if node.facts is not None}
    for name, files in answered.items():
        for key, path in wanted.files.items():
            if files.get(key) is None:
                yield Problem(
                    "files",
                    name,
                    f"{key}: {path} is not there, or cannot be read",
                    "put it on a file system that every node mounts at the same place, or copy it to each",
                )
    there = {name: {key: text for key, text in files.items() if text} for name, files in answered.items()}
    for key in wanted.files:
        had = {name: {key: files[key]} for name, files in there.items() if key in files}
        yield from _unlike("files", had, "{name} is {value}, elsewhere {usual}", "copy one and the same to every node")


def _shared(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    for node in nodes:
        if node.shared is not None and not node.shared.good:
            yield Problem(
                "shared",
                node.name,
                node.shared.text,
                "give a tim.run_dir on a file system that every node mounts: all of them write checkpoints and dumps",
            )


def _clock(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    for node in nodes:
        if node.clock is not None and abs(node.clock[0]) - node.clock[1] > CLOCK_SECONDS:
            way = "ahead of" if node.clock[0] > 0 else "behind"
            yield Problem(
                "clock",
                node.name,
                f"its clock is {abs(node.clock[0]):.1f} s {way} the driver's",
                "run a time service (chrony) there; times of files and logs are compared across nodes",
                error=False,
            )


def _collective(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    for node in nodes:
        if node.collective is not None and not node.collective.good:
            yield Problem(
                "collective",
                node.name,
                node.collective.text,
                "NCCL_DEBUG=INFO says which interface it takes; NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) under "
                "tim.launch.env chooses another; a firewall may close ports between the nodes",
            )


def _contract(nodes: Sequence[Node], wanted: Wanted) -> Iterator[Problem]:
    tried = {node.name: node.contract for node in nodes if node.contract is not None}
    for name, trial in tried.items():
        if not trial.good:
            yield Problem(
                "contract", name, trial.text, "verl-tim verify --ops on that node shows it alone; or trainer=stock"
            )
    held = {name: {"contract": trial.text} for name, trial in tried.items() if trial.good}
    yield from _unlike(
        "contract",
        held,
        "it keeps {value}, elsewhere {usual}",
        "take nodes of one kind: exact here and there, and not the same bits",
    )


_JUDGES = {
    "nodes": _nodes,
    "versions": _versions,
    "gpus": _gpus,
    "memory": _memory,
    "variables": _variables,
    "disk": _disk,
    "files": _files,
    "shared": _shared,
    "clock": _clock,
    "collective": _collective,
    "contract": _contract,
}


def _unlike(
    check: str,
    said: Mapping[str, Mapping[str, str]],
    problem: str,
    remedy: str,
    *,
    absent: str | None = None,
    error: bool = True,
) -> Iterator[Problem]:
    """A problem for every node and name whose value is not the usual one: the most frequent, of equals the first.

    Args:
        said: node -> name -> value.
        absent: what a missing name counts as; None: it is passed over.
    """
    for name in sorted({name for values in said.values() for name in values}):
        values = {
            node: values.get(name, absent) for node, values in said.items() if absent is not None or name in values
        }
        # most_common keeps the order of first appearance
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                yield Problem(
                    check,
                    node,
                    problem.format(name=name, value=value, usual=usual),
                    remedy.format(usual=f"{name} {usual}"),
                    error,
                )
