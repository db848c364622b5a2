"""Runs preflight on the nodes of a Ray cluster. Every call has a time limit: silence of a node is a finding."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_tim.preflight import collective as collectives
from verl_tim.preflight import contract, facts
from verl_tim.preflight.judge import CHECKS, Node, Trial, Wanted

# A file that a node wrote may show late on the others: network file systems cache folders for some seconds.
_SHARED_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """Seconds that each part may take on all nodes together.

    Attributes:
        wait: until the wanted nodes have joined.
        answer: a worker's start and one node's facts.
        collective: the group of all ranks and its sums.
        contract: the probe; a GPU compiles its kernels first.
    """

    wait: float = 0.0
    answer: float = 120.0
    collective: float = 120.0
    contract: float = 300.0


@dataclass(frozen=True)
class Look:
    """What to look at, beside what is wanted.

    Attributes:
        places: name -> folder whose free space counts.
        run_dir: the run folder, whose parent all nodes must share; None: not looked at.
        model, attention: for the contract's probe.
        checks: of `CHECKS`.
    """

    wanted: Wanted
    places: Mapping[str, str] = field(default_factory=dict)
    run_dir: str | None = None
    model: str | None = None
    attention: str = "auto"
    checks: Sequence[str] = CHECKS
    limits: Limits = Limits()


@ray.remote(num_cpus=0, max_restarts=0)
class _OnNode:
    """A process on one node; with a GPU of its own where it was asked for one."""

    def collect(self, places: Mapping[str, str], files: Mapping[str, str]) -> facts.NodeFacts:
        return facts.collect(places, files)

    def clock(self) -> float:
        return time.time()

    def write(self, path: str, text: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")

    def read(self, path: str) -> str | None:
        deadline = time.monotonic() + _SHARED_SECONDS
        while True:
            try:
                return Path(path).read_text(encoding="utf-8")
            except OSError:
                if time.monotonic() > deadline:
                    return None
            time.sleep(0.2)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def address(self) -> str:
        return collectives.free_address()

    def all_reduce(self, rank: int, ranks: int, address: str, gpu: bool, limit: float) -> collectives.Outcome:
        size = 1 << 24 if gpu else 1 << 20
        return collectives.all_reduce(rank, ranks, address, gpu=gpu, limit=limit, size=size)

    def probe(self, model: str | None, attention: str) -> Trial:
        return contract.probe_node(model, attention)


def look(what: Look, say: Callable[[str], None] = lambda line: None) -> list[Node]:
    """Look at every node of the cluster that this process is connected to (`ray.init`).

    Args:
        say: told what is being done.
    """
    alive = _wait_for_nodes(what.wanted, what.limits.wait, say)
    nodes = {one["NodeID"]: Node(one["NodeManagerAddress"], int(one["Resources"].get("GPU", 0))) for one in alive}
    nodes = _named_apart(nodes)
    if set(what.checks) <= {"nodes"}:
        return list(nodes.values())
    say(f"asking {len(nodes)} node(s)")
    actors = {node: _actor(node, gpu=False) for node in nodes}
    try:
        nodes = _ask(nodes, actors, what)
        answering = [node for node in nodes if nodes[node].facts is not None]
        if "clock" in what.checks:
            nodes = _compare_clocks(nodes, actors, answering, what.limits.answer)
        if "shared" in what.checks and what.run_dir is not None:
            nodes = _share(nodes, actors, answering, what.run_dir, what.limits.answer)
        if {"collective", "contract"} & set(what.checks):
            nodes = _try(nodes, answering, what, say)
    finally:
        _end(actors.values())
    return list(nodes.values())


def _named_apart(nodes: dict[str, Node]) -> dict[str, Node]:
    """Several nodes of Ray on one machine, as in tests, have one address."""
    names = [node.name for node in nodes.values()]
    return {
        key: dataclasses.replace(node, name=f"{node.name}/{key[:6]}") if names.count(node.name) > 1 else node
        for key, node in nodes.items()
    }


def _wait_for_nodes(wanted: Wanted, seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Alive nodes; those that are wanted have until the time is up to join."""
    deadline = time.monotonic() + seconds
    told = -1
    while True:
        alive = [one for one in ray.nodes() if one["Alive"]]
        enough = sum(one["Resources"].get("GPU", 0) >= (wanted.gpus or 0) for one in alive)
        if enough >= (wanted.nodes or 0) or time.monotonic() > deadline:
            # the driver's own node first: of two halves that differ, the others are told to follow it
            here = ray.get_runtime_context().get_node_id()
            return sorted(alive, key=lambda one: (one["NodeID"] != here, one["NodeManagerAddress"], one["NodeID"]))
        if enough != told:
            say(f"{enough} of {wanted.nodes} nodes have joined")
            told = enough
        time.sleep(0.5)


def _actor(node: str, *, gpu: bool) -> Any:
    remote: Any = _OnNode  # Ray's decorator adds what no type says
    return remote.options(
        num_gpus=1 if gpu else 0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    ).remote()


def _end(actors: Iterable[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _gather(calls: Mapping[Any, Any], seconds: float) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Results of remote calls by their key, and why the others have none."""
    references = list(calls.values())
    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds) if references else ([], [])
    good, bad = {}, {}
    for key, reference in calls.items():
        if reference not in done:
            bad[key] = f"did not answer within {seconds:g} s"
            continue
        try:
            good[key] = ray.get(reference)
        except Exception as error:  # whatever the node's process raised, or its end
            bad[key] = _cause(error)
    return good, bad


def _cause(error: Exception) -> str:
    """One line: of an exception on the node its own words, else Ray's."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    # Ray's own begins with the name of the error, and ends with advice
    return f"{type(cause).__name__}: {lines[0] if lines else 'no word'}"[:500]


def _ask(nodes: dict[str, Node], actors: Mapping[str, Any], what: Look) -> dict[str, Node]:
    calls = {node: actor.collect.remote(what.places, what.wanted.files) for node, actor in actors.items()}
    good, bad = _gather(calls, what.limits.answer)
    return {
        key: dataclasses.replace(node, facts=good.get(key), silence=bad.get(key, "")) for key, node in nodes.items()
    }


def _compare_clocks(
    nodes: dict[str, Node], actors: Mapping[str, Any], answering: Sequence[str], limit: float
) -> dict[str, Node]:
    """Each node's clock against this one's, in the middle of a call; what the call took bounds the error."""
    changed = dict(nodes)
    for key in answering:
        began = time.time()
        good, _ = _gather({key: actors[key].clock.remote()}, limit)
        ended = time.time()
        if key in good:
            offset = (good[key] - (began + ended) / 2, (ended - began) / 2)
            changed[key] = dataclasses.replace(nodes[key], clock=offset)
    return changed


def _share(
    nodes: dict[str, Node], actors: Mapping[str, Any], answering: Sequence[str], run_dir: str, limit: float
) -> dict[str, Node]:
    """The first node writes a file beside the run folder; the others must see it."""
    if not answering:
        return nodes
    changed = dict(nodes)
    writer, *readers = answering
    word = uuid.uuid4().hex
    path = str(Path(run_dir).parent / f".verl-tim-preflight-{word}")
    _, failed = _gather({writer: actors[writer].write.remote(path, word)}, limit)
    if failed:
        changed[writer] = dataclasses.replace(
            nodes[writer], shared=Trial(False, f"cannot write {path}: {failed[writer]}")
        )
        return changed
    changed[writer] = dataclasses.replace(nodes[writer], shared=Trial(True, "wrote"))
    good, bad = _gather({key: actors[key].read.remote(path) for key in readers}, limit)
    for key in readers:
        seen = good.get(key) == word
        problem = bad.get(key, f"does not see what {nodes[writer].name} wrote in {Path(run_dir).parent}")
        changed[key] = dataclasses.replace(nodes[key], shared=Trial(seen, "read" if seen else problem))
    _gather({writer: actors[writer].remove.remote(path)}, limit)
    return changed


def _try(nodes: dict[str, Node], answering: Sequence[str], what: Look, say: Callable[[str], None]) -> dict[str, Node]:
    """The all-reduce over all ranks, then the contract's probe on one rank of each node."""
    gpu = not what.wanted.cpu and any(nodes[key].ray_gpus for key in answering)
    if gpu:
        places = [(key, index) for key in answering for index in range(nodes[key].ray_gpus)]
    else:
        places = [(key, 0) for key in answering]
    changed = dict(nodes)
    if "collective" in what.checks:
        say(f"all-reduce over {len(places)} rank(s), {'NCCL' if gpu else 'gloo'}")
        with _actors(places, gpu) as ranks:
            changed = _all_reduce(changed, ranks, gpu, what.limits)
    if "contract" in what.checks:
        say("probing the contract")
        # new processes: one that hangs in the all-reduce would answer nothing more
        with _actors([place for place in places if place[1] == 0], gpu) as firsts:
            calls = {key: actor.probe.remote(what.model, what.attention) for (key, _), actor in firsts.items()}
            good, bad = _gather(calls, what.limits.contract)
        for key in calls:
            trial = good[key] if key in good else Trial(False, f"the probe: {bad[key]}")
            changed[key] = dataclasses.replace(changed[key], contract=trial)
    return changed


@contextmanager
def _actors(places: Sequence[tuple[str, int]], gpu: bool) -> Iterator[dict[tuple[str, int], Any]]:
    """A process per rank (node, number on it), each with a GPU of its own where `gpu`; they end with the block."""
    made = {place: _actor(place[0], gpu=gpu) for place in places}
    try:
        yield made
    finally:
        _end(made.values())


def _all_reduce(
    nodes: dict[str, Node], ranks: Mapping[tuple[str, int], Any], gpu: bool, limits: Limits
) -> dict[str, Node]:
    # a process that holds its GPU, before any of them waits for the others
    good, bad = _gather({rank: actor.address.remote() for rank, actor in ranks.items()}, limits.answer)
    outcomes: dict[tuple[str, int], Any] = {}
    if not bad:
        (address, *_), number = list(good.values()), len(ranks)
        calls = {
            rank: actor.all_reduce.remote(place, number, address, gpu, limits.collective)
            for place, (rank, actor) in enumerate(ranks.items())
        }
        # the group's own limit ends each call first, with its words; a rank that hangs below it ends here
        outcomes, bad = _gather(calls, 2 * limits.collective + 30)
    changed = dict(nodes)
    for key in dict.fromkeys(key for key, _ in ranks):
        mine = {index: outcomes.get((key, index)) for one, index in ranks if one == key}
        failed = {index: bad[(key, index)] for index in mine if (key, index) in bad}
        wrong = [index for index, outcome in mine.items() if outcome is not None and not outcome.correct]
        if failed:
            index, words = next(iter(failed.items()))
            trial = Trial(False, f"rank {index} of this node, of {len(failed)} that failed: {words}")
        elif wrong:
            trial = Trial(False, f"the sum is wrong on GPU(s) {', '.join(map(str, wrong))} of this node")
        elif bad:
            others = ", ".join(dict.fromkeys(nodes[one].name for one, _ in bad))
            changed[key] = dataclasses.replace(nodes[key], collective=None)
            if any(outcome is not None for outcome in mine.values()):
                continue
            trial = Trial(False, f"not tried, since ranks of {others} could not be started")
        else:
            rate = min(outcome.gigabytes_per_second for outcome in mine.values() if outcome is not None)
            seconds = max(outcome.seconds for outcome in mine.values() if outcome is not None)
            trial = Trial(True, f"{rate:.3g} GB/s" if rate else f"{seconds:.1f} s")
        changed[key] = dataclasses.replace(nodes[key], collective=trial)
    return changed
