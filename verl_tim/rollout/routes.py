"""The routes that a rollout returned, checked where a response becomes a sample (r3).

verl carries them by itself from there: `AgentLoopOutput.routed_experts` becomes the field `routed_experts` of the
batch, by absolute position. Where a rollout returns none verl would write expert 0, so each sample leaves here at full
length. An error must end the run, and verl's V1 trainer drops a response whose agent loop raised, so it travels with
the sample (`ROUTE_ERROR_FIELD`) and the trainer raises it (`raise_route_errors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from verl_tim.replay import ReplayError, RouterMap, converted
from verl_tim.replay.cursor import LIVE
from verl_tim.rollout.options import local_model_folder

ROUTE_ERROR_FIELD = "tim_route_error"  # extra field of a sample: why its routes cannot be used


class CheckedRoutes:
    """Mixed into an agent-loop worker, before verl's class: checks the routes of its responses."""

    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # here, where an error ends the run: verl's V1 trainer drops a response whose agent loop raised
        returned = self.config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay", False)
        self.router_map = self._router_map() if returned else None

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        if self.router_map is not None:
            name = "_".join(str(kwargs[key]) for key in ("uid", "session_id") if key in kwargs)
            for number, one in enumerate(output if isinstance(output, list) else [output]):
                if validate:
                    one.routed_experts = None  # nobody trains on it
                else:
                    take_routes(one, self.router_map, sample=f"{name or kwargs.get('index', '?')}_{number}")
        return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]

    def _router_map(self) -> RouterMap:
        model = self.config.actor_rollout_ref.model
        return RouterMap.of_folder(
            local_model_folder(model.path), trust_remote_code=bool(model.get("trust_remote_code", False))
        )


def take_routes(output: Any, routers: RouterMap, *, sample: str) -> None:
    """Put the checked routes of one of verl's `AgentLoopOutput`s in place of what the rollout returned.

    A conversation ends with tokens that nobody drew (a tool's answer), or is cut to the response's length: the routes
    cover its tokens up to the last drawn one.
    """
    prompt, response, mask = len(output.prompt_ids), len(output.response_ids), list(output.response_mask)
    drawn = max((place + 1 for place, value in enumerate(mask) if value), default=0)
    shape = (prompt + response, len(routers.layers), routers.top_k)
    if not drawn:
        output.routed_experts = np.full(shape, LIVE, np.int16)
        return
    turns = not all(mask)
    try:
        output.routed_experts = converted(
            output.routed_experts,
            routers,
            prompt=prompt,
            response=response,
            sample=sample,
            routed=prompt + drawn - 1,
            or_more=turns,
        )
    except ReplayError as error:
        output.routed_experts = np.full(shape, LIVE, np.int16)
        output.extra_fields[ROUTE_ERROR_FIELD] = str(error)


def raise_route_errors(errors: Iterable[Any]) -> None:
    """Raise what `take_routes`, or vLLM's record of a sampled sequence, found of one step's samples.

    Args:
        errors: each sample's `ROUTE_ERROR_FIELD`, or None.

    Raises:
        ReplayError: the first of them, with how many more there are.
    """
    found: Sequence[str] = [str(error) for error in errors if error]
    if found:
        more = f" (and {len(found) - 1} more of this step's samples)" if len(found) > 1 else ""
        raise ReplayError(f"the rollout's routes cannot be used: {found[0]}{more}")
