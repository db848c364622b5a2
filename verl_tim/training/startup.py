"""What a trainer does once at its start: check the running cluster, make the observer, write down what runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict

from verl_tim.training.baseline_gate import BaselineGate, check_setup
from verl_tim.training.config import ROLLOUTS, TimConfig
from verl_tim.training.correction_config import clip_range, of_run
from verl_tim.training.observer import StepObserver
from verl_tim.training.preflight import Cluster, check
from verl_tim.training.reuse import LogProbReuse


def check_cluster(config: Any) -> None:
    """Run the start-up checks against the Ray cluster that is there, before verl waits for resources it does not have.

    Raises:
        ConfigError: names every key that cannot work and the remedy.
    """
    BaselineGate.of(TimConfig.of(config).gate)  # a missing file is found before the workers start
    resources = ray.cluster_resources()
    check(config, cluster=Cluster(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0)))


def make_observer(tim: TimConfig, config: Any, tokenizer: Any, reuse: LogProbReuse | None = None) -> StepObserver:
    """The step observer of a run. The gate acts only where exactness is promised: rollout vexact, trainer contract."""
    actor, correction = config.actor_rollout_ref.actor, of_run(config)
    low, high = clip_range(actor)
    gated = tim.gate.exact and config.actor_rollout_ref.rollout.name == "vexact" and tim.trainer_numerics == "contract"
    return StepObserver(
        tim,
        gated=gated,
        bypass=correction.bypass_mode,
        clip_ratio_low=low,
        clip_ratio_high=high,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        reuse=reuse,
        correction=dataclasses.asdict(correction),
        model_path=str(config.actor_rollout_ref.model.path),
    )


class RolloutWatch:
    """Asks our servers after each step what happened; other rollouts are left alone.

    verl's V1 trainer marks a prompt whose response failed as a failure and trains on without it (agent_loop_tq.py,
    replay_buffer.py). A failed request of this engine is a fault of the configuration or of the engine, so the run
    stops with its cause instead.
    """

    def __init__(self, config: Any, server_managers: Sequence[Any]) -> None:
        ours = config.actor_rollout_ref.rollout.name in ROLLOUTS
        replicas = [replica for manager in server_managers if ours for replica in manager.get_replicas()]
        self._servers = [server for replica in replicas for server in replica.servers]

    def check(self) -> dict[str, float]:
        """Counters since the last call as metrics, summed over the servers.

        Raises:
            RolloutError: a request failed; names how many and the first cause. Ray's errors if a server is dead.
        """
        reports = ray.get([server.report.remote() for server in self._servers])
        failures = [failure for report in reports for failure in report["failures"]]
        if failures:
            raise RolloutError(f"{len(failures)} requests to the rollout failed; the first: {failures[0]}")
        names = reports[0]["counters"] if reports else ()
        return {f"tim/rollout_{name}": float(sum(report["counters"][name] for report in reports)) for name in names}


class RolloutError(RuntimeError):
    """Requests to the rollout failed, and training on without them would hide it."""


def record_run(tim: TimConfig, config: Any, worker_group: Any, server_managers: Sequence[Any]) -> None:
    """Read the manifest from the running processes; write it into the run folder, if any, and show it to trackers.

    verl hands every tracker the whole config at the start of training, so it goes in there, as `tim.manifest`.
    """
    from verl_tim.training.manifest import run_manifest

    manifest = run_manifest(tim, config, worker_group, server_managers)
    check_setup(tim.gate, manifest)
    if tim.run_dir is not None:
        folder = Path(tim.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write(folder)
    with open_dict(config):
        OmegaConf.update(config, "tim.manifest", manifest.to_dict(), force_add=True)
