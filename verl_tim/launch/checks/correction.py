"""`algorithm.rollout_correction`: keys, values, and combinations that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.errors import Finding
from verl_tim.launch.recipes import closest

KEY = "algorithm.rollout_correction"


def check(config: DictConfig) -> Iterator[Finding]:
    """Unknown keys, each with the nearest known one; then the first value that the correction refuses."""
    from verl_tim.correction import ConfigError, RolloutCorrectionConfig
    from verl_tim.training.correction_config import of_run

    known = [*RolloutCorrectionConfig.setting_names(), "preset"]
    unknown = [str(key) for key in _node(config) if key not in known and key != "_target_"]
    for key in unknown:
        yield Finding(
            f"{KEY}.{key}", "is not a key of the correction", closest(key, known) + f"known: {', '.join(known)}"
        )
    if unknown:
        return
    try:
        of_run(config)
    except ConfigError as error:
        yield Finding(f"{KEY}.{error.key}", f"is {error.value!r}: {error.problem}", error.remedy)


def _node(config: DictConfig) -> Mapping[str, Any]:
    node = OmegaConf.select(config, KEY)
    if node is None:
        return {}
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return plain
