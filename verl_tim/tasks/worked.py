"""Worked solutions: what the small models are shown in their supervised phase.

A worked solution is a list of lines of which the last is the answer, so that the reward function reads it without
any markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from verl_tim.tasks.catalog import Task
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.problems import Problem


def running_totals(problem: Problem) -> list[str]:
    """`6 - 9 + 4 + 1` is worked as the lines `-3`, `1`, `2`: the total after each operation."""
    first, *rest = problem.metadata["expression"].split(" ")
    total = int(first)
    lines = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if operator == "+" else -int(term)
        lines.append(str(total))
    return lines or [first]


WORKED: Mapping[str, Callable[[Problem], list[str]]] = MappingProxyType({"chain_sum": running_totals})


def check_has_worked_solutions(task: Task) -> None:
    """Raises InputError for a task of which no worked solutions are known here."""
    if task.name not in WORKED:
        raise InputError(
            f"task: small models are warmed up on {', '.join(sorted(WORKED))}, not on {task.name}; for {task.name} "
            "give a model that can do it: actor_rollout_ref.model.path=FOLDER"
        )


def worked_solution(task: Task, problem: Problem) -> list[str]:
    """The lines of a problem's solution; the last is its answer."""
    lines = WORKED[task.name](problem)
    if lines[-1] != problem.answer:
        raise RuntimeError(f"worked solution {lines} of {problem.question!r} does not end in {problem.answer!r}")
    return lines
