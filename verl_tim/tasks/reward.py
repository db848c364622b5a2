"""verl's reward function: the reasoning-gym verifier's score in [0, 1], nothing added, nothing shaped.

    reward:
      custom_reward_function: {path: pkg://verl_tim.tasks.reward, name: compute_score}

`compute_conversation_score` does the same for conversations with a tool.

Where the answer is looked for in a response: `verl_tim.tasks.verifier.extract_answer` (a bare answer, or the last
`<answer>` tag; text up to the end of the turn).

Sources: verl 0.9.1 trainer/ppo/reward.py:36 (how it is loaded), experimental/reward_loop/reward_manager/naive.py:69
(how it is called: from a thread, one response at a time).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from verl_tim.tasks.catalog import task_of_data_source
from verl_tim.tasks.verifier import extract_answer, load_verifier, verify

logger = logging.getLogger(__name__)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score of one response.

    Args:
        data_source: `reasoning_gym/<task>`, as the rows of `build_dataset` say it.
        solution_str: the response's text.
        ground_truth: the generator's answer.
        extra_info: the row's `extra_info`; `metadata` in it is the generator's, as JSON.
        kwargs: what verl passes to every reward function (reward router handles); unused.

    Returns:
        The verifier's score. A response that no verifier can read (not a string, empty, far too long, or one that
        makes the verifier fail, which is logged) costs a 0: what a model says never stops a run.

    Raises:
        InputError: a row of a data set that has no verifier here.
        Exception: the verifier itself cannot be loaded, which is no answer's fault: every score would be a 0, and the
            run would train on them to its end.
    """
    task = task_of_data_source(data_source)
    load_verifier(task)
    if not isinstance(solution_str, str):
        return 0.0
    metadata = (extra_info or {}).get("metadata")
    entry = {"answer": ground_truth, "metadata": json.loads(metadata) if metadata else {}}
    answer = extract_answer(solution_str)
    try:
        return verify(task, answer, entry)
    except Exception:
        logger.exception("verifier of %s failed on answer %r; scored 0", task.name, answer)
        return 0.0


# What the chat template leaves between two replies once verl has taken the special tokens out (naive.py:55).
_NEXT_REPLY, _TOOL_SAYS = "\nassistant\n", "\ntool\n"


def compute_conversation_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score of a conversation with a tool: `compute_score` of its last reply that says something.

    Arguments, value and errors as of `compute_score`; `solution_str` holds all replies and what the tool said between
    them, as the ChatML template renders them, without special tokens.
    """
    reply = last_reply(solution_str) if isinstance(solution_str, str) else solution_str
    return compute_score(data_source, reply, ground_truth, extra_info, **kwargs)


def last_reply(conversation: str) -> str:
    """The last reply that says something, without what the tool answered; empty if none does."""
    replies = [part.partition(_TOOL_SAYS)[0].strip() for part in conversation.split(_NEXT_REPLY)]
    return next((reply for reply in reversed(replies) if reply), "")
