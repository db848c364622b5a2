"""A tool for sums: it says whether an answer is right, too low or too high."""

from __future__ import annotations

import re
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

# The sum in a question of the task chain_sum: terms, each after a + or a -, before the = that ends it.
_SUM = re.compile(r"(-?\d+(?:\s*[+-]\s*\d+)*)\s*=")
_TERM = re.compile(r"([+-]?)\s*(\d+)")


class CompareSum(BaseTool):
    """`compare_sum(answer)`, for conversations that begin with a question of chain_sum."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """The verdict on `parameters["answer"]`, read off the question that the conversation begins with.

        Returns:
            The words, a reward of 0 (the task's verifier scores the conversation), no metrics.

        Raises:
            ValueError: the conversation does not begin with a sum.
        """
        question = next(message["content"] for message in agent_data.messages if message["role"] == "user")
        return ToolResponse(text=verdict(total_of(question), parameters["answer"])), 0.0, {}


def total_of(question: str) -> int:
    """The sum that a question asks for. Raises ValueError where there is none."""
    found = _SUM.search(question)
    if found is None:
        raise ValueError(f"compare_sum is for questions of the task chain_sum, not for {question!r}")
    return sum(int(sign + digits) for sign, digits in _TERM.findall(found[1]))


def verdict(total: int, answer: str) -> str:
    """What the tool says of an answer."""
    try:
        given = int(answer.replace(" ", ""))
    except ValueError:
        return "no number"
    return "right" if given == total else "too low" if given < total else "too high"
