"""verl's asynchronous V1 trainers with verl_tim's eyes and correction (`trainer_v1`).

`colocate_async` stops the rollout while it trains and lets unfinished responses go on under the new weights;
`separate_async` draws on GPUs of its own meanwhile. Either way a response may hold tokens of several versions of the
weights. Our client keeps the version of each, and the gate compares those of the trainer's own.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_tim.plugin import loaded
from verl_tim.training.config import ROLLOUTS
from verl_tim.training.trainer_v1 import TimTrainer


class TimTrainerColocateAsync(TimTrainer, PPOTrainerColocateAsync):
    """`trainer.v1.trainer_mode=colocate_async` as verl_tim registers it."""

    asynchronous = True

    def get_llm_client(self) -> Any:
        return _client(self, self.llm_server_manager) or super().get_llm_client()


class TimTrainerSeparateAsync(TimTrainer, PPOTrainerSeparateAsync):
    """`trainer.v1.trainer_mode=separate_async` as verl_tim registers it."""

    asynchronous = True

    def get_llm_client(self) -> Any:
        return _client(self, self.standalone_server_manager) or super().get_llm_client()


def _client(trainer: Any, manager: Any) -> Any:
    """Our client for servers whose answers it can put together: ours, and vLLM's, which end at a weight update and name
    one version each. None for others."""
    if trainer.tim is None or trainer.config.actor_rollout_ref.rollout.name not in (*ROLLOUTS, "vllm"):
        return None
    from verl_tim.rollout.partial_client import PartialRolloutClient

    return manager.get_client(client_cls=PartialRolloutClient)


loaded(__name__)
