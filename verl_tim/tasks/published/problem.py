"""A row's problem and its true answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math.answer import last_box
from verl_tim.tasks.published.prompt import PUBLISHED_STYLE, fill, unfill


@dataclass(frozen=True)
class Problem:
    """One problem as published.

    Attributes:
        text: the problem alone, or the whole prompt where no template is known to take off.
        answer: the true answer.
        messages: the published prompt; None where only the problem was published.
        row_id: the data set's own name of it; empty if it has none.
    """

    text: str
    answer: str
    messages: tuple[Mapping[str, str], ...] | None
    row_id: str = ""


def _after_hash(value: str) -> str | None:
    """GSM8K: the solution ends in `#### answer`; thousands separators go, as in verl's example."""
    _, mark, answer = value.rpartition("####")
    return answer.strip().replace(",", "") if mark else None


def _last_box(value: str) -> str | None:
    found = last_box(value)
    return None if found is None else found.strip()


# How the true answer stands in its column.
ANSWERS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {"text": str.strip, "after_hash": _after_hash, "boxed": _last_box}
)


def read_problem(
    row: Mapping[str, Any], columns: Mapping[str, str], answer: str, template: str | None, where: str
) -> Problem:
    """The problem of a row.

    Args:
        columns: `problem`, `answer` and perhaps `id`, by the name of the column.
        answer: a key of ANSWERS.
        template: the one the published prompts were made with, if known.
        where: file and row, for messages.

    Raises:
        InputError: a column that is missing, empty, or of another form.
    """
    value = _field(row, columns["problem"], where)
    messages: tuple[Mapping[str, str], ...] | None = None
    if isinstance(value, str):
        text = value.strip()
    else:
        messages = _messages(value, columns["problem"], where)
        message = messages[-1]["content"]
        bare = unfill(template, message) if template is not None and len(messages) == 1 else None
        text = (message if bare is None else bare).strip()
    if not text:
        raise InputError(
            f"{where}: column {columns['problem']} holds no problem; remove the row or name another column"
        )
    return Problem(text, _answer(row, columns["answer"], answer, where), messages, _row_id(row, columns, where))


def prompt_of(problem: Problem, style: str, template: str | None, where: str) -> list[dict[str, str]]:
    """The chat messages that put the problem to the model.

    Raises InputError where the style needs the problem alone and the published prompt cannot be taken apart.
    """
    if style == PUBLISHED_STYLE:
        if problem.messages is None:
            raise InputError(
                f"prompt_style: {where} has a bare problem and no published prompt; choose another style than "
                f"{PUBLISHED_STYLE}"
            )
        return [dict(message) for message in problem.messages]
    whole = problem.messages is not None and (
        template is None or len(problem.messages) != 1 or unfill(template, problem.messages[0]["content"]) is None
    )
    if whole:
        raise InputError(
            f"prompt_style: {where} is a whole prompt whose template is not known, so {style} cannot be put in its "
            f"place; choose prompt_style={PUBLISHED_STYLE}"
        )
    return [{"role": "user", "content": fill(style, problem.text)}]


def identity(problem: Problem) -> str:
    """What makes two rows the same problem: its text, whatever its white space."""
    return re.sub(r"\s+", " ", problem.text).strip()


def _answer(row: Mapping[str, Any], column: str, rule: str, where: str) -> str:
    value = _field(row, column, where)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{where}: column {column} holds {_short(value)}; a true answer is a text or a number")
    found = ANSWERS[rule](str(value))
    if not found:
        how = {"text": "is empty", "after_hash": "has no answer behind ####", "boxed": "has no \\boxed answer"}[rule]
        raise InputError(
            f"{where}: column {column} {how} ({_short(value)}), so no response could be right; remove the row or name "
            "another column"
        )
    return found


def _row_id(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> str:
    return str(_field(row, columns["id"], where)) if "id" in columns else ""


def _field(row: Mapping[str, Any], column: str, where: str) -> Any:
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise InputError(f"{where}: has no {column}; it has {', '.join(sorted(row))}")
        value = value[name]
    if value is None:
        raise InputError(f"{where}: column {column} is null; remove the row or name another column")
    return value


def _messages(value: Any, column: str, where: str) -> tuple[Mapping[str, str], ...]:
    if isinstance(value, Sequence) and value and all(_is_message(item) for item in value):
        return tuple({"role": item["role"], "content": item["content"]} for item in value)
    raise InputError(
        f'{where}: column {column} holds {_short(value)}; it must be a text or a list of {{"role", "content"}} messages'
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(name), str) for name in ("role", "content"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
