"""What travelled between the stages of a split engine, kept on each rank, and an account of what went wrong with it.

    with watched(engine, got, want): ...

Along a pipeline every plan passes every link once and in order, so that the k-th message of a link is of the k-th plan.
Sender and receiver each keep a digest of it, taken on the device and in the order of its work, without a wait: where
two digests of one message differ, the link or what lies around it (a buffer filled too early) is at fault; where none
do, the stage whose part comes first is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_MOST = 1 << 14  # messages of a kind that are kept
_KINDS = ("send", "receive", "from_stage")


def digest(x: Tensor) -> Tensor:
    """int64 scalar on x's device: the bits of a tensor, each word by its place. No wait for the device."""
    words = x.contiguous().view(-1).view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    parts = 64 if words.numel() % 64 == 0 else 1
    sums = words.view(-1, parts).sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=x.device)).sum()


@dataclass
class Journal:
    """Of one rank. plans: (request ids, first positions, positions) of each plan, in order; digests: by kind of
    message, int64 on the device; count: how many of them are filled."""

    device: torch.device
    plans: list[tuple[list[str], list[int], list[int]]] = field(default_factory=list)
    digests: dict[str, Tensor] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def keep(self, kind: str, x: Tensor) -> None:
        at = self.count[kind]
        if at < _MOST:
            self.digests[kind][at] = digest(x)
            self.count[kind] = at + 1


@dataclass(frozen=True)
class RankReport:
    """What one rank tells: Journal's fields as plain values, and its device's memory in words."""

    rank: int
    stage: int
    plans: list[tuple[list[str], list[int], list[int]]]
    digests: dict[str, list[int]]
    memory: str


def begin(engine: Any) -> None:
    """On a rank, by `each_rank`: keep a journal from now on. Without stages there is nothing to keep."""
    ranks = engine._ranks
    if ranks is None or ranks.place.stages == 1:
        return
    journal = Journal(ranks.device)
    for kind in _KINDS:
        journal.digests[kind] = torch.zeros(_MOST, dtype=torch.int64, device=ranks.device)
        journal.count[kind] = 0
    if hasattr(ranks, "journal"):
        end(engine)
    ranks.journal = journal
    for kind in _KINDS:
        setattr(ranks, kind, _kept(journal, kind, getattr(ranks, kind)))
    runner, name = _runner(engine)
    started = getattr(runner, name)

    def start(plan: Any, *arguments: Any) -> Any:
        if plan is not None:
            ids = [engine._rows.requests[slot].request_id for slot in plan.slots_B.tolist()]
            journal.plans.append((ids, plan.start_B.tolist(), plan.count_B.tolist()))
        return started(plan, *arguments)

    setattr(runner, name, start)


def end(engine: Any) -> None:
    """On a rank: the messages of its links are nobody's any more. `Ranks` outlives its engines."""
    for name in (*_KINDS, "journal"):
        vars(engine._ranks).pop(name, None)
    runner, name = _runner(engine)
    vars(runner).pop(name, None)


def _runner(engine: Any) -> tuple[Any, str]:
    """What runs a plan, and its method that starts one."""
    if engine._graph_runner is not None:
        return engine._graph_runner, "launch"
    return engine._stage_runner or engine._runner, "tick"


def _kept(journal: Journal, kind: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *arguments: Any) -> Any:
        if kind == "send":  # before: the link may not touch it, and nor may anyone until it is gone
            journal.keep(kind, x)
        result = exchange(x, *arguments)
        if kind != "send":
            journal.keep(kind, x)
        return result

    return run


def report(engine: Any) -> RankReport:
    """On a rank, by `each_rank`: waits for the device."""
    ranks = engine._ranks
    journal: Journal | None = getattr(ranks, "journal", None)
    digests = {} if journal is None else {k: journal.digests[k][: journal.count[k]].tolist() for k in _KINDS}
    return RankReport(
        ranks.rank, ranks.place.stage, [] if journal is None else journal.plans, digests, memory(ranks.device)
    )


def memory(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}"
    free, total = torch.cuda.mem_get_info(device)
    sizes = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)
    tensors, held, free_gib, total_gib = (f"{size / (1 << 30):.2f}" for size in sizes)
    return f"{device}: {tensors} GiB in tensors, {held} held by torch, {free_gib} of {total_gib} free"


def differing(got: dict[str, tuple], want: dict[str, tuple]) -> dict[str, int]:
    """Request -> first token that differs in itself, in its log-prob's bits, its likeliest token or more."""
    found = {}
    for request, wanted in want.items():
        mine = got.get(request)
        if mine == wanted:
            continue
        rows = (
            []
            if mine is None
            else zip(*(zip(a, b, strict=False) for a, b in zip(mine, wanted, strict=True) if a and b), strict=False)
        )
        found[request] = next((at for at, row in enumerate(rows) if any(a != b for a, b in row)), -1)
    return found


def links_that_changed_bits(reports: list[RankReport]) -> list[str]:
    """Messages that did not arrive as they were sent, in words; of a tensor-parallel split none are compared."""
    found = []
    by_stage = {r.stage: r for r in reports}
    if len(by_stage) != len(reports) or not reports or not reports[0].digests:
        return []
    for stage in range(len(reports) - 1):
        sent, arrived = by_stage[stage].digests["send"], by_stage[stage + 1].digests["receive"]
        found += _unequal(f"hidden states from stage {stage} to {stage + 1}, plan", sent, arrived)
        first, other = by_stage[0].digests["from_stage"], by_stage[stage + 1].digests["from_stage"]
        found += _unequal(f"what all stages are told, on stages 0 and {stage + 1}, message", first, other)
        if by_stage[0].plans != by_stage[stage + 1].plans:
            at = next(
                (
                    k
                    for k, (a, b) in enumerate(zip(by_stage[0].plans, by_stage[stage + 1].plans, strict=False))
                    if a != b
                ),
                min(len(by_stage[0].plans), len(by_stage[stage + 1].plans)),
            )
            found.append(f"stages 0 and {stage + 1} made other plans from plan {at} on")
    return found


def _unequal(what: str, sent: list[int], arrived: list[int]) -> list[str]:
    found = [
        f"{what} {k}: {a & (1 << 64) - 1:x} became {b & (1 << 64) - 1:x}"
        for k, (a, b) in enumerate(zip(sent, arrived, strict=False))
        if a != b
    ]
    if len(sent) != len(arrived):
        found.append(f"{what}s: {len(sent)} were sent and {len(arrived)} arrived")
    return found


def account(
    engine: Any, got: dict[str, tuple], want: dict[str, tuple], prompt_lens: dict[str, int], again: Callable[[], dict]
) -> str:
    """Everything about outputs that differ, in words.

    Args:
        got, want: request -> (token ids, bits of their log-probs, likeliest tokens, ...).
        again: runs the same requests once more on the engine: whether the fault stays.
    """
    reports = engine.each_rank(report)
    lines = []
    for request, at in differing(got, want).items():
        if request not in got:
            lines.append(f"request {request}: no output")
            continue
        mine, wanted = got[request], want[request]
        same = (len(mine[0]), len(wanted[0]), sum(a != b for a, b in zip(mine[1], wanted[1], strict=False)))
        lines.append(
            f"request {request}: {same[0]} tokens for {same[1]}, {same[2]} other log-probs, the first at token {at}"
        )
        if 0 <= at < min(same[:2]):
            a, b = (bits[1][at] & 0xFFFFFFFF for bits in (mine, wanted))
            lines.append(
                f"  token {mine[0][at]} for {wanted[0][at]}, log-prob {a:08x} for {b:08x} (bits {a ^ b:08x}), "
                f"likeliest {mine[2][at]} for {wanted[2][at]}"
            )
            position = prompt_lens[request] + at - 1
            lines += [f"  drawn in plan {k}: {row}" for k, row in _plans_of(reports[0], request, position)]
    changed = links_that_changed_bits(reports)
    lines += changed[:20] or ["every message that was compared arrived as it was sent"]
    lines += [f"rank {r.rank}, stage {r.stage}: {len(r.plans)} plans, {r.memory}" for r in reports]
    repeated = differing(again(), want)
    lines.append(f"once more on the same engine: {'no difference' if not repeated else f'{repeated} differ'}")
    return "\n".join(lines)


def _plans_of(of_rank: RankReport, request: str, position: int) -> list[tuple[int, str]]:
    found = []
    for k, (ids, start, count) in enumerate(of_rank.plans):
        if request in ids:
            i = ids.index(request)
            if start[i] <= position < start[i] + count[i]:
                found.append((k, f"row {sum(count[:i]) + position - start[i]} of {sum(count)}, {len(ids)} sequences"))
    return found


@contextlib.contextmanager
def told(crew: Any) -> Iterator[None]:
    """An error within also tells what became of the crew's processes, and of this process's memory."""
    try:
        yield
    except BaseException as error:
        codes = {f"rank {rank}": process.poll() for rank, process in enumerate(crew.processes, 1)}
        lines = [f"exit codes (None: it runs): {codes}", f"lost: {crew._loss}", memory(crew.ranks.device)]
        if isinstance(error, Exception):
            raise AssertionError("\n".join([f"{type(error).__name__}: {error}", *lines])) from error
        raise
