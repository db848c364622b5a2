"""reasoning-gym's verifiers, and where in a response the answer stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from verl_tim.tasks.catalog import Task, get_task, make_generator, resolve_difficulty

# The longest true answer of any task has a few dozen characters. Anything longer is not an answer, and the
# verifiers' regular expressions and big-number parsers never see it.
MAX_ANSWER_CHARS = 256

END_OF_TURN = ("<|im_end|>", "<|endoftext|>")


def extract_answer(response: str) -> str:
    """The answer in a response. No format is forced on the model:

    1. the text ends at the first end-of-turn token, where the caller kept those;
    2. what a reasoning model thinks aloud, up to the last `</think>`, is not its answer;
    3. the last `<answer>...</answer>` if there is one (the format of reasoning-gym's own system prompts), else
    4. the last line that is not blank: a bare answer, below whatever work was shown;

    in each case stripped of white space. Linear in the length of the response.
    """
    for marker in END_OF_TURN:
        response = response.partition(marker)[0]
    response = response.rpartition("</think>")[2]
    head, closed, _ = response.rpartition("</answer>")
    if closed:
        _, opened, inner = head.rpartition("<answer>")
        if opened:
            return inner.strip()
    return response.rstrip().rpartition("\n")[2].strip()


def verify(task: Task, answer: str, entry: Mapping[str, Any]) -> float:
    """The verifier's score of an extracted answer, in [0, 1].

    Args:
        entry: `{"answer": ground truth, "metadata": {...}}` as the generator made it.

    An empty answer, or one of more than MAX_ANSWER_CHARS characters, scores 0 unseen.

    Raises:
        RuntimeError: the verifier left [0, 1], which would be a fault of the verifier.
    """
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    score = float(_scorer(task.name).score_answer(answer, entry))
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise RuntimeError(f"verifier of {task.name} returned {score} for answer {answer!r}")
    return score


def load_verifier(task: Task) -> None:
    """Import and make a task's verifier, once in a process; what goes wrong in that propagates."""
    _scorer(task.name)


@cache
def _scorer(name: str) -> Any:
    # a verifier looks at answer and entry only; the instance is needed for its method
    task = get_task(name)
    return make_generator(task, resolve_difficulty(task, None), seed=0, size=1)
