"""Start-up checks of `tim.reuse_rollout_log_probs`: where the rollout's log-probs cannot be the trainer's old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig

from verl_tim.correction import ConfigError, RolloutCorrectionConfig
from verl_tim.training.config import BACKEND_KEY, CONTRACT_BACKEND, reader
from verl_tim.training.correction_config import CORRECTION_KEY, of_run
from verl_tim.training.finding import Finding
from verl_tim.training.replay_config import REPLAY_KEY, UNREAD_KEYS
from verl_tim.training.reuse import ENABLED_KEY

_OFF = f"set {ENABLED_KEY}=false"
_ROLLOUT = "actor_rollout_ref.rollout"
# verl's switches that serve a batch from a file, whatever the weights are by then.
_SKIP_KEYS = tuple(f"skip.{name}.enable" for name in ("rollout", "rollout_tq", "async_rollout"))


def reuse_findings(config: DictConfig) -> Iterator[Finding]:
    """Every setting of a run config under which reuse would not be recomputation; nothing where it is off."""
    get = reader(config)
    if get(ENABLED_KEY, False) is not True:
        return
    yield from _pair(get)
    yield from _gate(get)
    yield from _same_weights(get)
    yield from _by_products(get)
    try:
        correction = of_run(config)
    except ConfigError:
        return  # the check of the correction speaks of it
    yield from correction_obstacles(correction)


def _pair(get: Callable[..., Any]) -> Iterator[Finding]:
    """Both sides must be those whose bits are verified equal."""
    name = get(f"{_ROLLOUT}.name")
    if name != "vexact":
        yield Finding(
            ENABLED_KEY,
            f"it takes the rollout's log-probs for the trainer's, and those of {_ROLLOUT}.name={name} differ from them",
            f"Choose rollout=vexact trainer=contract, or {_OFF} (correction=bypass_ppo is verl's mode for rollouts "
            "that mismatch)",
        )
    if get(BACKEND_KEY) != CONTRACT_BACKEND:
        yield Finding(
            ENABLED_KEY,
            "it takes the rollout's log-probs for the trainer's, and the stock trainer's differ from them",
            f"Choose trainer=contract ({BACKEND_KEY}={CONTRACT_BACKEND}), or {_OFF}",
        )
    temperature = get(f"{_ROLLOUT}.temperature", 1.0)
    if isinstance(temperature, (int, float)) and temperature <= 0:
        yield Finding(
            f"{_ROLLOUT}.temperature",
            f"it is {temperature}: a greedy rollout records log-probs at temperature 1, the trainer divides by it",
            f"Set it above 0, or {_OFF}",
        )


def _gate(get: Callable[..., Any]) -> Iterator[Finding]:
    """Without a gate that stops, an audit is nothing."""
    if get("tim.gate.exact", True) is False:
        yield Finding(
            "tim.gate.exact",
            f"it is false, and {ENABLED_KEY} rests on the gate's comparison",
            f"Set it to true, or {_OFF}",
        )
    if get("tim.gate.on_mismatch", "stop") != "stop":
        yield Finding(
            "tim.gate.on_mismatch",
            f"it is {get('tim.gate.on_mismatch')}, and a run that went on after a difference would train on log-probs "
            f"known to be wrong ({ENABLED_KEY})",
            f"Set it to stop, or {_OFF}",
        )


def _same_weights(get: Callable[..., Any]) -> Iterator[Finding]:
    """Every token must have been drawn under the weights that the update starts from."""
    mode = get("trainer.v1.trainer_mode", "sync")
    if get("trainer.use_v1", True) and mode != "sync":
        yield Finding(
            ENABLED_KEY,
            f"with trainer.v1.trainer_mode={mode} tokens are drawn under older weights than those that the update "
            "starts from",
            f"Set trainer.v1.trainer_mode=sync, or {_OFF}",
        )
    for key in _SKIP_KEYS:
        if get(key, False):
            yield Finding(
                key,
                f"it serves batches from a file, drawn under other weights than the trainer's ({ENABLED_KEY})",
                f"Set it to false, or {_OFF}",
            )


def _by_products(get: Callable[..., Any]) -> Iterator[Finding]:
    """What verl takes from the pass beside log-probs, and not for a metric only."""
    estimator = str(get("algorithm.adv_estimator", "gae"))
    if "optimal_token_baseline" in estimator:
        yield Finding(
            "algorithm.adv_estimator",
            f"{estimator} needs sums over the vocabulary that come from the pass for the old log-probs",
            f"Choose another estimator, or {_OFF}",
        )
    # whichever engine reads it (verl 0.9.1, utils/config.py:80)
    for key in (REPLAY_KEY, *UNREAD_KEYS):
        if get(key, "disabled") == "R2":
            yield Finding(key, "R2 records routes in the pass for the old log-probs", f"Set it to disabled, or {_OFF}")


def correction_obstacles(correction: RolloutCorrectionConfig) -> Iterator[Finding]:
    """A correction that has another meaning for the old log-probs, or that would compare them with themselves."""
    if correction.bypass_mode:
        yield Finding(
            f"{CORRECTION_KEY}.bypass_mode",
            f"it puts the rollout into PPO's ratio as a policy of its own, and {ENABLED_KEY} keeps the objective of "
            "recomputation: choose one",
            f"Choose correction=none, or {_OFF}",
        )
        return
    trivial = "the old log-probs are the rollout's own, so r_corr would be 1 by construction, whatever the engine did"
    if correction.rollout_is is not None:
        yield Finding(f"{CORRECTION_KEY}.rollout_is", f"{trivial} ({ENABLED_KEY})", f"Set it to null, or {_OFF}")
    names = [rule.name for rule in correction.rules if rule.reads_signal]
    if names and correction.rollout_rs_signal == "r_corr":
        yield Finding(
            f"{CORRECTION_KEY}.rollout_rs",
            f"{', '.join(names)} reads r_corr, and {trivial} ({ENABLED_KEY})",
            f"Set {CORRECTION_KEY}.rollout_rs=null, {CORRECTION_KEY}.rollout_rs_signal=r_ppo, or {_OFF}",
        )
