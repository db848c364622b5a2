"""The settings of a Prometheus that verl writes a rollout's addresses into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_tim import broken_yaml
from verl_tim.launch.errors import Finding

KEY = "actor_rollout_ref.rollout.prometheus.file"
# What verl 0.9.1 writes (workers/rollout/utils.py:156); Ray's own file has the first of them.
_JOBS = {"ray", "rollout"}
_SECTIONS = {"global", "scrape_configs"}


def check(config: DictConfig) -> Iterator[Finding]:
    """verl replaces the file by settings of its own: what somebody else has in it would be lost.

    It is read on this machine; verl writes it on every node.
    """
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout.prometheus")
    if rollout is None or not rollout.enable or not rollout.file:
        return
    path = Path(rollout.file)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem, remedy = broken_yaml.explain(error, path)
        yield Finding(KEY, f"{path} cannot be read as Prometheus' settings: {problem}", f"{remedy}; or {_REMEDY}")
        return
    except (OSError, ValueError) as error:
        yield Finding(KEY, f"{path} cannot be read as Prometheus' settings: {error}", _REMEDY)
        return
    theirs = _of_somebody_else(found)
    if theirs:
        yield Finding(KEY, f"verl would replace {path}, which has {', '.join(theirs)}", _REMEDY)


_REMEDY = (
    "name a file of the run's own, such as runs/NAME/prometheus.yml, and let Prometheus read it "
    "(scrape_config_files, or --config.file)"
)


def _of_somebody_else(found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, dict):
        return ["other content"]
    jobs = [str(job.get("job_name")) for job in found.get("scrape_configs") or [] if isinstance(job, dict)]
    return [*sorted(set(map(str, found)) - _SECTIONS), *(f"the job {job}" for job in jobs if job not in _JOBS)]
