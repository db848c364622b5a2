"""Rewards in the agent loop's own process (`tim.reward_in_loop`), for rules that take microseconds.

verl 0.9.1, experimental/agent_loop/agent_loop.py:1026: each response goes to a reward worker, an actor of Ray's, and
its score comes back. Of a small model's short responses those two messages are a tenth of what a step costs the
machine's cores. `OwnRewardWorker` stands in the place of the actor's handle, with verl's class of that worker behind
it. A reward that takes long would keep the loop from its other responses. Unnecessary once verl lets a loop score. No
upstream issue is known.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

from verl.protocol import DataProto


class OwnRewardWorker:
    """What an agent loop asks of a reward worker's handle: `compute_score.remote(data)`.

    Args:
        make: -> verl's `RewardLoopWorker`; called once, in the loop that scores.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._worker: Any = None
        self.compute_score = _Method(self._compute_score)

    async def _compute_score(self, data: DataProto) -> dict[str, Any]:
        if self._worker is None:
            # it keeps the event loop that it is made in
            self._worker = self._make()
        # a message is a copy, and a reward manager writes into what it is given; pickle is quicker than deepcopy
        objects = pickle.loads(pickle.dumps(data.non_tensor_batch, protocol=pickle.HIGHEST_PROTOCOL))
        own = DataProto(batch=data.batch, non_tensor_batch=objects)
        result: dict[str, Any] = await self._worker.compute_score(own)
        return result


class _Method:
    def __init__(self, method: Callable[[DataProto], Awaitable[dict[str, Any]]]) -> None:
        self._method = method

    def remote(self, data: DataProto) -> Awaitable[dict[str, Any]]:
        return asyncio.ensure_future(self._method(data))


def own_reward_worker(config: Any) -> OwnRewardWorker:
    """Of a run's config; one that needs a reward model is refused at the start (`start_checks`)."""
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    return OwnRewardWorker(lambda: RewardLoopWorker(config))
