"""`actor_rollout_ref.rollout.multi_turn.format=last_line`: a reply's last line is what the only tool is called with.

For models too small to write JSON. Registered with verl's tool parsers by `verl_tim.plugin`.
"""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

_ENDS = ("<|im_end|>", "<|endoftext|>")


class LastLineParser(ToolParser):
    """Every reply that says something calls the tool."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """(text of the reply, its call of the tool; none for a reply that says nothing).

        Args:
            responses_ids: token ids of the reply.
            tools: schemas of the tools of this conversation.

        Raises:
            ValueError: there is not exactly one tool with exactly one argument.
        """
        name, argument = _only_tool(tools or [])
        text = self.tokenizer.decode(responses_ids)
        for end in _ENDS:
            text = text.partition(end)[0]
        line = text.rstrip().rpartition("\n")[2].strip()
        return text, [FunctionCall(name=name, arguments=json.dumps({argument: line}))] if line else []


def _only_tool(tools: list[Any]) -> tuple[str, str]:
    names = [(tool.function.name, list(tool.function.parameters.properties)) for tool in tools]
    if len(names) != 1 or len(names[0][1]) != 1:
        raise ValueError(
            "actor_rollout_ref.rollout.multi_turn.format=last_line needs one tool with one argument, and there are "
            f"{names}: list one in tool_config_path, or set format=hermes"
        )
    ((name, (argument,)),) = names
    return name, argument
