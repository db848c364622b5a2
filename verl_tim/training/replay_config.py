"""Routing replay as a run's config asks for it: verl's own keys, which `routing_replay=` sets together.

verl 0.9.1 reads them for its Megatron and VeOmni engines only and switches replay off for others without a word
(workers/engine_workers.py:498). `EngineConfig` has the key for every engine (workers/config/engine.py:115), so a plain
verl YAML can say it for FSDP, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

Mode = Literal["off", "r2", "r3"]

_GROUP = "actor_rollout_ref.actor.fsdp_config.router_replay"
REPLAY_KEY = f"{_GROUP}.mode"
FILE_KEYS = (f"{_GROUP}.record_file", f"{_GROUP}.replay_file")  # verl 0.9.1 documents them, and reads them nowhere
# The key of verl's other engines, of its older actor, and of models that are no policy: with an FSDP actor nobody reads
# them.
UNREAD_KEYS = (
    "actor_rollout_ref.actor.router_replay.mode",
    "actor_rollout_ref.actor.megatron.router_replay.mode",
    "actor_rollout_ref.actor.veomni.router_replay.mode",
    "actor_rollout_ref.ref.fsdp_config.router_replay.mode",
    "critic.fsdp.router_replay.mode",
)
ROUTES_KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
STRATEGY_KEY = "actor_rollout_ref.actor.strategy"
FSDP = ("fsdp", "fsdp2")
# Rollouts that return the routes of every sequence; a plugin adds its own.
ROUTING_ROLLOUTS = {"vexact", "stock", "vllm"}

_MODES: dict[str, Mode] = {"disabled": "off", "R2": "r2", "R3": "r3"}


def asks_for_replay(get: Callable[[str, Any], Any]) -> bool:
    """Whether a run with an FSDP trainer sets one of verl's keys of it, or another run that of FSDP.

    Args:
        get: (key, default) -> value.
    """
    if mode_of_run(get) != "off":
        return True
    # other engines of verl's have keys of their own, and need the rollout's routes as well
    return get(STRATEGY_KEY, "fsdp") in FSDP and (bool(get(ROUTES_KEY, False)) or bool(unread(get)))


def unread(get: Callable[[str, Any], Any]) -> list[str]:
    """Those of `UNREAD_KEYS` that ask for replay."""
    return [key for key in UNREAD_KEYS if str(get(key, "disabled")) != "disabled"]


def mode_of_run(get: Callable[[str, Any], Any]) -> Mode | None:
    """The mode of a run with an FSDP trainer; None for a value that verl does not know."""
    return _MODES.get(_name(get(_GROUP, None)))


def mode_of_engine(engine_config: Any) -> Mode:
    """The mode of a worker's engine, from its `FSDPEngineConfig`.

    Raises:
        ReplayError: a value that verl does not know.
    """
    name = _name(getattr(engine_config, "router_replay", None))
    if name not in _MODES:
        # brings torch along, which `training.config` and the commands that read it do without
        from verl_tim.replay import ReplayError

        raise ReplayError(f"{REPLAY_KEY}={name}: choose {', '.join(_MODES)} (routing_replay=off, r2 or r3)")
    return _MODES[name]


def _name(group: Any) -> str:
    """Of verl's `router_replay`: a dataclass, or as it stood in a YAML without `_target_`."""
    if group is None:
        return "disabled"
    if isinstance(group, Mapping):
        value = group.get("mode")
    elif hasattr(group, "mode"):
        value = group.mode
    else:
        return f"{group}, without .mode"  # router_replay: R3, which verl would take for no mode at all
    return "disabled" if value is None else str(value)
