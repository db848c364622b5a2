"""verl's single-turn agent loop, made once for all responses of a worker.

verl makes one for each response (agent_loop.py:683): by Hydra, and with a builder of tokens that encodes texts to find
its special ones, a seventh of what a response of a small model costs its worker. The loop keeps nothing of a response.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_NAME = "single_turn_agent"
_OWN = f"{SingleTurnAgentLoop.__module__}.{SingleTurnAgentLoop.__qualname__}"
_made: SingleTurnAgentLoop | None = None


def share() -> None:
    """Register `shared` under verl's name for its loop; a user's own loop of that name stays."""
    registry = agent_loop._agent_loop_registry
    if dict(registry.get(_NAME, {})) == {"_target_": _OWN}:
        registry[_NAME] = {"_target_": f"{__name__}.{shared.__name__}"}


def shared(**given: Any) -> SingleTurnAgentLoop:
    """The loop of this process; another one where a worker gives other things to make it of.

    Args:
        given: as verl's worker gives them to the class.
    """
    global _made
    if _made is None or not _is_of(_made, given):
        _made = SingleTurnAgentLoop(**given)
    return _made


def _is_of(loop: SingleTurnAgentLoop, given: dict[str, Any]) -> bool:
    return (
        loop.config is given["trainer_config"].config
        and loop.server_manager is given["server_manager"]
        and loop.tokenizer is given["tokenizer"]
        and loop.processor is given["processor"]
        and loop.data_config is given["data_config"].config
    )
