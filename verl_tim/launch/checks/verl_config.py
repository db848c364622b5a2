"""What verl_tim's rollouts and trainer cannot do, and verl's own validation of the config."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import warnings
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.launch.checks import keys
from verl_tim.launch.errors import Finding
from verl_tim.training.config import uses_verl_tim


def check_verl_tim(config: DictConfig) -> Iterator[Finding]:
    """Keys that vexact, stock, the contract or the machine do not allow (the list that also runs inside `main_ppo`)."""
    from verl_tim.training.start_checks import findings

    yield from findings(config)


def check_verl(config: DictConfig, misspelt: Sequence[str] | None = None) -> Iterator[Finding]:
    """What verl's config classes and its validate_config refuse.

    Args:
        misspelt: keys that `keys.check_spelling` names, where it has been asked already.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    refused = False
    # keys that it has not are named one by one by their own check
    if misspelt is None:
        misspelt = [finding.key for finding in keys.check_spelling(config)]
    config = _without(config, misspelt)
    for key in keys.CLASSES:
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, key))
        except Exception as error:  # Hydra wraps whatever a config class raises
            refused = True
            yield Finding(
                key, _reason(error), "see verl's documentation of this group; keys added with + must be known to verl"
            )
    if refused:
        return
    with warnings.catch_warnings():
        # it warns that grpo needs no critic
        warnings.simplefilter("ignore")
        critic = need_critic(config)
    if critic and uses_verl_tim(config):
        yield Finding(
            "algorithm.adv_estimator",
            f"{config.algorithm.adv_estimator} needs a critic, which verl_tim's recipes do not configure",
            "take grpo or reinforce_plus_plus",
        )
        return
    if critic:
        try:
            omega_conf_to_dataclass(config.critic)
        except Exception as error:  # of its model's path, say
            yield Finding(
                "critic",
                _reason(error),
                "set the key of critic that the message names (critic.model.path, where it is a place), or take an "
                "estimator without a critic: algorithm.adv_estimator=grpo",
            )
            return
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # verl's own: the plugin puts check_verl_tim in front of it
            inspect.unwrap(validate_config)(
                config=config, use_reference_policy=need_reference_policy(config), use_critic=critic
            )
    except (AssertionError, ValueError) as error:
        yield Finding("verl", _reason(error), "change the keys that the message names")
        return


def _without(config: DictConfig, names: Sequence[str]) -> DictConfig:
    """A copy of the config that lacks some keys."""
    config = copy.deepcopy(config)
    with open_dict(config):
        for key in names:
            group, _, name = key.rpartition(".")
            del (OmegaConf.select(config, group) if group else config)[name]
    return config


def _reason(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(cause).strip().replace("\n", " ") or type(cause).__name__
