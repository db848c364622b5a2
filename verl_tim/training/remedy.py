"""A remedy as it can be typed behind the config that it is for.

Rules and start-up checks speak of this package's groups (`rollout=vexact`), and of keys as verl has them. A plain
config of verl's has none of these groups, so there the same is said key by key; Hydra wants a + before a key that a
config does not have, and refuses one before a key that it has; and a shell takes quotes, brackets and dollars for its
own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.training.config import BACKEND_KEY, CONTRACT_BACKEND, EXTERNAL_LIB, WORKER_ENVIRONMENT
from verl_tim.training.correction_config import CORRECTION_KEY
from verl_tim.training.replay_config import REPLAY_KEY, ROUTES_KEY

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))

OVERRIDES: dict[str, tuple[str, ...]] = {
    "rollout=vexact": (f"{_ROLLOUT}.name=vexact",),
    "rollout=stock": (f"{_ROLLOUT}.name=stock",),
    "rollout=vllm": (f"{_ROLLOUT}.name=vllm",),
    "rollout=vllm_invariant": (f"{_ROLLOUT}.name=vllm", f'{WORKER_ENVIRONMENT}.VLLM_BATCH_INVARIANT="1"'),
    "trainer=contract": (
        f"{_MODEL}.use_fused_kernels=true",
        f"{BACKEND_KEY}={CONTRACT_BACKEND}",
        f"{_MODEL}.external_lib={EXTERNAL_LIB}",
        f"{_ACTOR}.strategy=fsdp2",
    ),
    "trainer=stock": (f"{_MODEL}.use_fused_kernels=false",),
    # what else a CPU needs are findings of their own
    "cluster=cpu": ("trainer.device=cpu",),
    "correction=none": (f"{CORRECTION_KEY}.rollout_is=null", f"{CORRECTION_KEY}.rollout_rs=null"),
    "correction=token_tis": (f"{CORRECTION_KEY}.rollout_is=token", f"{_ROLLOUT}.calculate_log_probs=true"),
    "correction=bypass_ppo": (f"{CORRECTION_KEY}.bypass_mode=true",),
    "correction=bypass_reinforce": (f"{CORRECTION_KEY}.bypass_mode=true", f"{CORRECTION_KEY}.loss_type=reinforce"),
    "routing_replay=off": (f"{REPLAY_KEY}=disabled", f"{ROUTES_KEY}=false"),
    "routing_replay=r2": (f"{REPLAY_KEY}=R2",),
    "routing_replay=r3": (f"{REPLAY_KEY}=R3", f"{ROUTES_KEY}=true"),
    "tracker=file": ("trainer.logger=[console]",),
}
"""Option of a group -> the overrides of a plain config of verl's that do what the remedies want of it."""

COMMANDS = {
    "task=chain_sum": "`verl-tim data chain_sum`",
    "model=tiny_qwen3": "the folder that `verl-tim model qwen3` makes",
}

# Not the end of a key: trainer.v1.trainer_mode=sync.
GROUP_WORD = re.compile(
    r"(?<![\w.+])(?P<group>rollout|trainer|cluster|correction|routing_replay|tracker|task|model)=\w+"
)
# What the option would have set, where the key itself is named.
_ASIDE = re.compile(rf" ?\([^()]*{GROUP_WORD.pattern.replace('?P<group>', '?:')}[^()]*\)")
KEY_WORD = re.compile(
    r"""(?<![\w.+'"{=])\+?(?P<key>(?:actor_rollout_ref|algorithm|critic|data|ray_kwargs|reward|tim|trainer)(?:\.\w+)+)"""
    r"""=(?P<value>"[^"]*"|'[^']*'|\[[^\]]*\]|\$\{[^}]*\}|[^\s,;)`]*[^\s,;)`.:])"""
)


def typeable(remedy: str, config: DictConfig) -> str:
    """The remedy, every override in it a word for a shell behind this config."""
    choices = _choices(config)
    if choices is None:
        remedy = GROUP_WORD.sub(_spelt_out, _ASIDE.sub("", remedy))
    else:
        # a group that the recipe's defaults leave out has to be added to them
        remedy = GROUP_WORD.sub(lambda m: m[0] if choices.get(m["group"], "") is not None else f"+{m[0]}", remedy)
    return KEY_WORD.sub(lambda match: _word(match["key"], match["value"], config), remedy)


def has_groups(config: DictConfig) -> bool:
    """Whether a config is composed of this package's groups: its `tim:` group is not one written by hand."""
    return _choices(config) is not None


def _choices(config: DictConfig) -> Mapping[str, Any] | None:
    tim = OmegaConf.select(config, "tim")
    if not isinstance(tim, DictConfig) or not {"run_dir", "cache_dir", "choices"} <= set(tim):
        return None
    return tim.choices if isinstance(tim.choices, DictConfig) else {}


def _spelt_out(match: re.Match[str]) -> str:
    word = match[0]
    # what a remedy quotes of the user's own need not be an option
    return " ".join(OVERRIDES[word]) if word in OVERRIDES else COMMANDS.get(word, word)


def _word(key: str, value: str, config: DictConfig) -> str:
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(config, group, throw_on_missing=False)
    added = "" if isinstance(node, DictConfig) and name in node else "+"
    return shlex.quote(f"{added}{key}={value}")
