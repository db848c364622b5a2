"""The group `tim.launch`."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_tim.launch import cluster, environment
from verl_tim.launch.errors import Finding


def check(config: DictConfig) -> Iterator[Finding]:
    """What the launchers read: values that a scheduler cannot take, secrets in the clear, two values of a variable."""
    wrong = cluster.findings(config)
    yield from wrong or environment.conflicts(config)
