"""Routing replay: the trainer's experts are those that another forward chose, of the rollout (r3) or its own (r2).

`routers` finds a model's routers, `convert` checks what a rollout returned, `cursor` and `replay` hand each router
the experts of its micro-batch, forward and backward, `recorded` keeps what the trainer itself recorded, and `agreement`
says what replay changed. Knows tensors and Hugging Face models, not verl; `training` connects the two.
"""

from verl_tim.replay.agreement import Agreement, agreement
from verl_tim.replay.convert import converted
from verl_tim.replay.errors import ReplayError
from verl_tim.replay.recorded import RecordedRoutes
from verl_tim.replay.replay import RoutingReplay
from verl_tim.replay.routers import Router, RouterMap, find_routers

__all__ = [
    "Agreement",
    "RecordedRoutes",
    "ReplayError",
    "Router",
    "RouterMap",
    "RoutingReplay",
    "agreement",
    "converted",
    "find_routers",
]
