"""The seeded agent loop of verl's V1 trainer; apart from `agent_loop`, since it needs TransferQueue."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_tim.rollout import gathered_puts
from verl_tim.rollout.agent_loop import SeededResponses, marks
from verl_tim.rollout.own_reward import own_reward_worker
from verl_tim.rollout.recorded import RECORD_PARAM
from verl_tim.rollout.routes import CheckedRoutes
from verl_tim.training.config import TimConfig

# verl decorates the class with ray.remote where it defines it; Ray keeps the plain class for inheritance.
_actor_class: Any = AgentLoopWorkerTQ
_PlainWorkerTQ: Any = _actor_class.__ray_metadata__.modified_class.__ray_actor_class__


class SeededWorkerV1(SeededResponses, CheckedRoutes, _PlainWorkerTQ):
    """Worker of the V1 trainer, which numbers the responses of a prompt itself (`session_id`)."""

    reward_loop_worker_handles: list[Any] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray ships inherited methods by value when their class cannot be found by name, as here, where the name is the
        # actor's; a shipped `super()` then refers to a copy of the class. Defined here, it is found by name.
        super().__init__(*args, **kwargs)
        tim = TimConfig.of(self.config)
        gathered_puts.gather(agent_loop_tq, poll_interval=tim.poll_interval)
        if self.reward_loop_worker_handles is not None and tim.reward_in_loop:
            self.reward_loop_worker_handles = [own_reward_worker(self.config)]
        self._failures: list[str] = []

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        # Defined here for the same reason: a shipped function has a copy of its module, in which nothing is gathered.
        await super()._run_prompt(*args, **kwargs)

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        session, marked_S = int(kwargs["session_id"]), kwargs.pop(RECORD_PARAM, ())
        record = session < len(marked_S) and bool(marked_S[session])
        params = self.with_seed(
            sampling_params, trajectory, sample=session, prompt=kwargs.get("raw_prompt"), record=record
        )
        try:
            return await super()._run_agent_loop(params, trajectory, **kwargs)
        except (Exception, asyncio.CancelledError) as error:
            self._failures.append(_in_words(error))
            raise

    async def take_failures(self) -> list[str]:
        """Why responses failed since the last call: in the rollout, a reward function or a loop of the user's.

        verl logs it, marks the prompt and trains on without the response (`_run_prompt`).
        """
        failures, self._failures = self._failures, []
        return failures


def _in_words(error: BaseException) -> str:
    """Class and message; of an error in another process those of that one, for Ray's message is both tracebacks."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return f"{type(error).__name__}: {error}"


class SeededManagerV1(AgentLoopManagerTQ):
    """`AgentLoopManagerTQ` with seeded workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededWorkerV1)

    def generate_sequences(self, prompts: Any) -> None:
        if "validate" not in prompts or not prompts["validate"]:
            sessions = int(self.config.actor_rollout_ref.rollout.n)
            marked = marks(self.config, len(prompts) * sessions, int(prompts["global_steps"]))
            prompts[RECORD_PARAM] = torch.from_numpy(marked).view(len(prompts), sessions)
        super().generate_sequences(prompts)
