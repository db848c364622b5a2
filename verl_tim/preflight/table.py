"""A cell of preflight's table: a node's value, or that something is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from verl_tim.preflight.judge import GIB, Node, Problem

# Packages that fit a cell.
_SHOWN = ("verl", "torch", "vllm", "ray")


def cell(node: Node, check: str, problems: Sequence[Problem]) -> Text:
    """What a node said for one check, green, yellow or red."""
    mine = [one for one in problems if one.check == check]
    value = _value(node, check)
    if any(one.error for one in mine):
        return Text(f"FAILS {value}".strip(), style="red")
    if mine:
        return Text(f"! {value}".strip(), style="yellow")
    return Text(value or "-", style="green" if value else "dim")


def _value(node: Node, check: str) -> str:
    facts = node.facts
    trials = {"shared": node.shared, "collective": node.collective, "contract": node.contract}
    if check in trials:
        trial = trials[check]
        return "" if trial is None or not trial.good else trial.text
    if check == "clock":
        return "" if node.clock is None else f"{node.clock[0]:+.2f} s"
    if facts is None:
        return ""
    if check == "versions":
        known = [f"{name} {facts.versions[name]}" for name in _SHOWN if name in facts.versions]
        return "\n".join([*known, f"source {facts.source}"])
    if check == "gpus":
        if not facts.gpus:
            return "none"
        free = min(gpu.free for gpu in facts.gpus) / GIB
        return f"{len(facts.gpus)} x {facts.gpus[0].name}\n{free:.0f} GiB free\ndriver {facts.driver}"
    if check == "memory":
        return "" if facts.shm is None else f"shm {facts.shm[1] / GIB:.1f} GiB"
    if check == "disk":
        least = [free for free in facts.disk.values() if isinstance(free, int)]
        return f"{min(least) / GIB:.0f} GiB" if least else ""
    if check == "files":
        return f"{sum(text is not None for text in facts.files.values())} of {len(facts.files)}" if facts.files else ""
    return f"{len(facts.variables)} set" if check == "variables" else ""
