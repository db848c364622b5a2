"""Where the answer stands in a response to a mathematical problem.

| format | asked for by | the answer is |
|---|---|---|
| `boxed` | MATH, AIME, Sanity-Test-R1D | what the last `\\boxed{...}` (or `\\fbox{...}`) holds |
| `answer_line` | DAPO-Math-17k | what follows the last `Answer:`, to the end of its line |
| `hash` | GSM8K | what follows the last `####`, to the end of its line |
| `auto` | data of the user's own | the first of the three above, in this order, that the response holds |

`answer_line` and `hash` fall back to `boxed`, as verl's scorer of DAPO does (verl 0.9.1
utils/reward_score/math_dapo.py, `verify`): many models box whatever they are asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.verifier import END_OF_TURN

_THINK_END = "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# verl 0.9.1 utils/reward_score/math_dapo.py, `is_correct_minerva`
_ANSWER_LINE = re.compile(r"answer\s*:", re.IGNORECASE)


def check_answer_format(answer_format: str, key: str = "answer_format") -> str:
    """`answer_format` itself. Raises InputError that lists the known ones."""
    if answer_format not in ORDER:
        raise InputError(f"{key}: unknown format {answer_format!r}; known formats: {', '.join(ORDER)}")
    return answer_format


def extract_answer(response: str, answer_format: str = "auto", *, require_think_end: bool = False) -> str | None:
    """The answer in a response, stripped of white space; None where there is none, or an empty one.

    Args:
        response: the decoded response. It ends at the first end-of-turn token, where the caller kept those, and what
            a reasoning model thinks aloud, up to the last `</think>`, is not its answer.
        answer_format: see the table above.
        require_think_end: a response without exactly one `</think>` has no answer. The reward of the paper's dense
            runs asks for that (VeXact 88ad2a9 examples/math_reward_model/math_grader.py).

    A box that is not closed, as in a response cut off at its limit, is no answer, nor are those before it. Linear in
    the length of the response.

    Raises:
        InputError: an unknown format.
    """
    check_answer_format(answer_format)
    for marker in END_OF_TURN:
        response = response.partition(marker)[0]
    if require_think_end and response.count(_THINK_END) != 1:
        return None
    response = response.rpartition(_THINK_END)[2]
    for find in ORDER[answer_format]:
        found = find(response)
        if found is not None:
            return found.strip() or None
    return None


def last_box(text: str) -> str | None:
    """What the last `\\boxed` holds: its braces' content, or without braces the next word. None: no box, or an open
    one. In nested boxes the innermost is the last."""
    end = _end_of_last(_BOX, text)
    if end is None:
        return None
    rest = text[end:].lstrip()
    if not rest.startswith("{"):
        word = re.match(r"[^\s$]+", rest)
        return word.group() if word else None
    depth = 0
    escaped = False
    for index, character in enumerate(rest):
        if escaped:
            escaped = False  # \{ and \} are set braces, not groups
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:index]
    return None


def _answer_line(text: str) -> str | None:
    end = _end_of_last(_ANSWER_LINE, text)
    return None if end is None else _line_from(text, end)


def _hash(text: str) -> str | None:
    head, mark, _ = text.rpartition("####")
    return _line_from(text, len(head) + len(mark)) if mark else None


def _end_of_last(pattern: re.Pattern[str], text: str) -> int | None:
    end = None
    for found in pattern.finditer(text):
        end = found.end()
    return end


def _line_from(text: str, start: int) -> str | None:
    # the answer may begin below its mark, as verl's pattern allows
    line = text[start:].lstrip(" \t\r\n*:").partition("\n")[0]
    if _BOX.search(line):
        return last_box(line)
    return line.strip().strip("*")


ORDER: Mapping[str, tuple[Callable[[str], str | None], ...]] = MappingProxyType(
    {
        "auto": (last_box, _answer_line, _hash),
        "boxed": (last_box,),
        "answer_line": (_answer_line, last_box),
        "hash": (_hash, last_box),
    }
)
