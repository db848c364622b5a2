"""Start-up checks of routing replay: wherever it would not take effect, the run is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig

from verl_tim.correction import ConfigError
from verl_tim.replay.routers import NUM_EXPERTS
from verl_tim.sequence_parallel import SEQUENCE_PARALLEL_KEYS
from verl_tim.training.config import EXTERNAL_LIB, EXTERNAL_LIBS, reader
from verl_tim.training.correction_config import CORRECTION_KEY, of_run
from verl_tim.training.finding import Finding
from verl_tim.training.model_file import model_file
from verl_tim.training.replay_config import (
    FILE_KEYS,
    FSDP,
    REPLAY_KEY,
    ROUTES_KEY,
    ROUTING_ROLLOUTS,
    STRATEGY_KEY,
    Mode,
    asks_for_replay,
    mode_of_run,
    unread,
)

_OFF = "set routing_replay=off"
_STAGES_KEY = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
_AGENT_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_AGENT_LOOP = "verl_tim.rollout.agent_loop.SeededAgentLoopManager"
_MODEL_KEY = "actor_rollout_ref.model.path"
_OFFLOAD_KEY = "actor_rollout_ref.model.enable_activation_offload"
_Get = Callable[..., Any]


def replay_findings(config: DictConfig, *, cpu_only: bool) -> Iterator[Finding]:
    """Every setting of a run under which routing replay by an FSDP trainer would not be what it says.

    Args:
        cpu_only: the run has no accelerator.
    """
    get = reader(config)
    if not asks_for_replay(get):
        return
    strategy = get(STRATEGY_KEY, "fsdp")
    if strategy not in FSDP:
        yield Finding(
            REPLAY_KEY,
            f"it is {get(REPLAY_KEY)}, and an actor with strategy {strategy} does not read it",
            f"Set {STRATEGY_KEY}=fsdp2, or {_OFF} and the key of that engine "
            f"(actor_rollout_ref.actor.{strategy}.router_replay.mode)",
        )
        return
    for key in unread(get):
        yield Finding(
            key,
            f"it is {get(key)}, and with an FSDP actor nobody reads it",
            f"Set it to disabled, and what is read, {REPLAY_KEY} (routing_replay=r2 or r3 does)",
        )
    mode = mode_of_run(get)
    if mode is None:
        group = REPLAY_KEY.removesuffix(".mode")
        yield Finding(
            REPLAY_KEY,
            f"verl knows no such mode: {group} is {get(group)}",
            "Set it to disabled, R2 or R3 (routing_replay=off, r2 or r3 does)",
        )
        return
    yield from _both_ends(get, mode)
    if mode == "off":
        return
    for key in FILE_KEYS:
        if get(key) is not None:
            yield Finding(
                key,
                f"it is {get(key)}, and nobody reads it: routes come from the step's own forward (R2) or rollout (R3)",
                "Leave it out",
            )
    yield from _engine(get)
    yield from _model(get)
    if mode == "r2":
        yield from _recorded(get, config)
    else:
        yield from _returned(get, cpu_only)


def _both_ends(get: _Get, mode: Mode) -> Iterator[Finding]:
    """The rollout returns routes, and the trainer takes them: one without the other is nothing."""
    returns = bool(get(ROUTES_KEY, False))
    if returns and mode == "off":
        yield Finding(
            ROUTES_KEY,
            "the rollout would record routes and send them, and the trainer would drop them without a word",
            f"Set {REPLAY_KEY}=R3 (routing_replay=r3 does), or set it to false",
        )
    elif returns and mode == "r2":
        yield Finding(
            ROUTES_KEY, "R2 replays what the trainer recorded, so the rollout's routes are of no use", "Set it to false"
        )
    elif not returns and mode == "r3":
        yield Finding(
            REPLAY_KEY,
            f"R3 replays the rollout's routes, and without {ROUTES_KEY} it returns none",
            f"Set {ROUTES_KEY}=true (routing_replay=r3 sets both)",
        )


def _engine(get: _Get) -> Iterator[Finding]:
    """Replay is in this package's FSDP2 engine, under transformers' forward or the contract's."""
    strategy = get(STRATEGY_KEY, "fsdp")
    if strategy != "fsdp2":
        yield Finding(STRATEGY_KEY, f"it is {strategy}, and routes are replayed under FSDP2", "Set it to fsdp2")
    library = get("actor_rollout_ref.model.external_lib")
    if library not in EXTERNAL_LIBS:
        yield Finding(
            "actor_rollout_ref.model.external_lib",
            f"it is {library}, and verl's own FSDP engine switches replay off without a word",
            f"Set it to {EXTERNAL_LIB}",
        )
    for key in SEQUENCE_PARALLEL_KEYS:
        if int(get(key, 1)) > 1:
            yield Finding(
                key,
                f"it is {get(key)}, and routes are not split over the ranks of a sequence",
                f"Set it to 1, or {_OFF}",
            )
    if get(_OFFLOAD_KEY, False):
        yield Finding(
            _OFFLOAD_KEY,
            "its checkpointing does not say which micro-batch it computes again",
            f"Set it to false (enable_gradient_checkpointing may stay), or {_OFF}",
        )


def has_experts(get: _Get) -> bool | None:
    """Whether the model's config.json names experts; None where it cannot be read here, as of a model on the hub."""
    model = model_file(get(_MODEL_KEY, ""))
    if not model:
        return None
    model = model.get("text_config") or model
    return any(isinstance(model.get(name), int) and model[name] > 0 for name in NUM_EXPERTS)


def _model(get: _Get) -> Iterator[Finding]:
    """A model without experts has nothing to replay. What cannot be read here the worker finds out."""
    if has_experts(get) is False:
        yield Finding(
            _MODEL_KEY, f"{get(_MODEL_KEY)} has no experts, so there are no routes to replay", _OFF.capitalize()
        )


def _recorded(get: _Get, config: DictConfig) -> Iterator[Finding]:
    """R2 records in the forward of the old log-probs (`reuse_checks` speaks of the runs that skip it by reuse)."""
    try:
        bypass = of_run(config).bypass_mode
    except ConfigError:
        return  # the check of the correction speaks of it
    if bypass:
        yield Finding(
            f"{CORRECTION_KEY}.bypass_mode",
            "bypass skips the forward of the old log-probs, in which R2 records",
            f"Set it to false, choose routing_replay=r3, or {_OFF}",
        )


def _returned(get: _Get, cpu_only: bool) -> Iterator[Finding]:
    """R3 needs a rollout that returns routes, and an agent loop that checks them."""
    name = get("actor_rollout_ref.rollout.name")
    if name not in ROUTING_ROLLOUTS:
        yield Finding(
            "actor_rollout_ref.rollout.name",
            f"rollout {name} is not known to return routes",
            f"Choose {', '.join(sorted(ROUTING_ROLLOUTS))}, or routing_replay=r2",
        )
    elif name == "vllm" and cpu_only:
        # vLLM 0.28, layers/fused_moe/routed_experts_capturer.py:289
        yield Finding(
            "actor_rollout_ref.rollout.name",
            "it is vllm, and on a CPU its kernels for experts give out no routes: its engine would die at its start",
            "Choose rollout=stock, whose routes are returned, or routing_replay=r2",
        )
    elif name in ("vexact", "stock") and not cpu_only and int(get(_STAGES_KEY) or 1) > 1:
        yield Finding(
            _STAGES_KEY,
            f"on a GPU the pipeline stages of rollout {name} give out no routes",
            "Set it to 1, or choose routing_replay=off: vexact needs no replay, its routes are the trainer's",
        )
    manager = get(_AGENT_KEY)
    if manager != _AGENT_LOOP:
        yield Finding(
            _AGENT_KEY,
            f"it is {manager}: verl's own agent loop fills what a rollout does not return with expert 0, and checks "
            "nothing",
            f"Set {_AGENT_KEY}={_AGENT_LOOP}",
        )
