"""verl's single-turn agent loop, made once for all responses of a worker.

verl 0.9.1 makes one for each response (agent_loop.py:683), with a builder of tokens that encodes texts to find its
special ones, and it has Hydra make it: Hydra merges and copies configs each time, which alone is two fifths of what a
response of a small model costs its worker. And it renders and encodes a prompt once for each of its responses. Here the
loop is made once and without Hydra, and a prompt is encoded once. The loop keeps nothing of a response. Unnecessary
once verl's worker keeps its loops. No upstream issue is known.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_NAME = "single_turn_agent"
_OWN = f"{SingleTurnAgentLoop.__module__}.{SingleTurnAgentLoop.__qualname__}"
_made: SharedLoop | None = None

# Prompts whose tokens are kept. The responses of one prompt begin together.
_KEPT_PROMPTS = 256


class SharedLoop(SingleTurnAgentLoop):
    """verl's loop; the responses of one prompt share its tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts: dict[tuple[int, ...], tuple[list[Any], asyncio.Future[list[int]]]] = {}

    async def ct_build_initial_tokens(self, messages: list[dict], *args: Any, **kwargs: Any) -> list[int]:
        """As verl's, which is a function of what it is given. Prompts with anything but text are verl's own affair.

        Args:
            messages: of the prompt. Those of one prompt are one and the same objects, and are not changed.
        """
        if args or any(kwargs.get(kind) for kind in ("tools", "images", "videos", "audios")):
            return await super().ct_build_initial_tokens(messages, *args, **kwargs)
        key = tuple(map(id, messages))
        if key not in self._prompts:
            while len(self._prompts) >= _KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            task = asyncio.ensure_future(super().ct_build_initial_tokens(messages, **kwargs))
            # with the messages themselves: an object's number is another's when it is gone
            self._prompts[key] = list(messages), task
        # a response that is cancelled does not take the others' tokens with it; each has a list of its own
        return list(await asyncio.shield(self._prompts[key][1]))


class _WithoutHydra:
    """Stands before the module `hydra` in verl's module: our loop is made without it, all else is Hydra's."""

    def __init__(self, hydra: Any) -> None:
        self._hydra = hydra
        self.utils = _Utils(hydra.utils)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hydra, name)


class _Utils:
    def __init__(self, utils: Any) -> None:
        self._utils = utils

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def instantiate(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config is _ENTRY and not args:
            return shared(**kwargs)
        return self._utils.instantiate(config, *args, **kwargs)


def share() -> None:
    """Register `shared` under verl's name for its loop; a user's own loop of that name stays."""
    module: Any = agent_loop
    registry = module._agent_loop_registry
    if dict(registry.get(_NAME, {})) == {"_target_": _OWN}:
        registry[_NAME] = _ENTRY
    if not isinstance(module.hydra, _WithoutHydra):
        module.hydra = _WithoutHydra(module.hydra)


def shared(**given: Any) -> SharedLoop:
    """The loop of this process; another one where a worker gives other things to make it of.

    Args:
        given: as verl's worker gives them to the class.
    """
    global _made
    if _made is None or not _is_of(_made, given):
        _made = SharedLoop(**given)
    return _made


# What verl's worker hands to Hydra; whoever replaces it in the registry has a loop of his own.
_ENTRY = {"_target_": f"{__name__}.{shared.__name__}"}


def _is_of(loop: SingleTurnAgentLoop, given: dict[str, Any]) -> bool:
    return (
        loop.config is given["trainer_config"].config
        and loop.server_manager is given["server_manager"]
        and loop.tokenizer is given["tokenizer"]
        and loop.processor is given["processor"]
        and loop.data_config is given["data_config"].config
    )
