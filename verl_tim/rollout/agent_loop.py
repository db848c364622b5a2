"""verl's agent loop with a fixed seed per response (`rollout.agent.agent_loop_manager_class`).

verl gives requests random ids and no seed, so no run can be repeated. These subclasses add `sampling_params["seed"]`,
mark the few training sequences of a step whose choices are recorded (`verl_tim.rollout.recorded`), check the routes
that are to be replayed (`verl_tim.rollout.routes`), and make verl's single-turn loop once
(`verl_tim.rollout.single_turn`); all else is verl's. One name serves both trainers:
`SeededAgentLoopManager.create` picks by `trainer.use_v1`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker

from verl_tim.rollout import single_turn
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDING_ROLLOUTS, mark
from verl_tim.rollout.routes import CheckedRoutes
from verl_tim.rollout.seeds import response_seed
from verl_tim.training.config import TimConfig


class SeededResponses:
    """Mixed into an agent-loop worker: a copy of the sampling parameters with this response's seed and mark."""

    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        single_turn.share()

    def with_seed(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, sample: int, prompt: Any, record: bool
    ) -> dict[str, Any]:
        seed = response_seed(
            self.config.actor_rollout_ref.rollout.seed,
            index=_plain(trajectory["sample_index"]),
            prompt=_plain(prompt),
            step=int(trajectory["step"]),
            sample=sample,
            validate=bool(trajectory["validate"]),
        )
        marked = {RECORD_PARAM: True} if record else {}
        return {**self.without_text(sampling_params), "seed": seed, **marked}

    def without_text(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """The same, for token ids alone: vLLM turns every token, and those it gives log-probs of, into text, which verl
        does not look at. Strings to stop at are looked for in it."""
        if self.config.actor_rollout_ref.rollout.name != "vllm" or sampling_params.get("stop"):
            return sampling_params
        return {"detokenize": False, **sampling_params}

    def samples_per_prompt(self, trajectory: dict[str, Any]) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return int(rollout.val_kwargs.n if trajectory["validate"] else rollout.n)


class SeededAgentLoopWorker(SeededResponses, CheckedRoutes, AgentLoopWorker):
    """Worker of the legacy trainer, where a row's place in the batch comes as `priority` (agent_loop.py:1244)."""

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        sample = int(kwargs["priority"]) % self.samples_per_prompt(trajectory)
        record = bool(kwargs.pop(RECORD_PARAM, False))
        params = self.with_seed(
            sampling_params, trajectory, sample=sample, prompt=kwargs.get("raw_prompt"), record=record
        )
        return await super()._run_agent_loop(params, trajectory, **kwargs)


class _SeededManager(AgentLoopManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)
        super().__init__(*args, **kwargs)

    def generate_sequences(self, prompts: Any) -> Any:
        if not prompts.meta_info.get("validate", False):
            step = int(prompts.meta_info.get("global_steps", 0))
            prompts.non_tensor_batch[RECORD_PARAM] = marks(self.config, len(prompts), step)
        return super().generate_sequences(prompts)


class SeededAgentLoopManager:
    """Value of `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """verl's manager for the trainer that the config asks for, with seeded workers."""
        config = kwargs["config"] if "config" in kwargs else args[0]
        if config.trainer.use_v1:
            from verl_tim.rollout.agent_loop_v1 import SeededManagerV1

            return SeededManagerV1.create(*args, **kwargs)
        return _SeededManager.create(*args, **kwargs)


def marks(config: Any, places: int, step: int) -> np.ndarray:
    """bool (places,): which of the step's sequences are recorded; none where the rollout cannot."""
    rollout = config.actor_rollout_ref.rollout
    wanted = TimConfig.of(config).sample_sequences if rollout.name in RECORDING_ROLLOUTS else 0
    return mark(places, wanted, seed=int(rollout.seed), step=step)


def _plain(value: Any) -> Any:
    """NumPy values as plain Python, so that one prompt has one representation in both trainers."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items())}
    return value
