"""manifest.json of a run, from what the running trainer workers and rollout servers say of themselves."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from omegaconf import OmegaConf

from verl_tim.diagnosis.config_diff import correction_name
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.diagnosis.run_folder import attempt_number
from verl_tim.training.config import ROLLOUTS, TimConfig, reader
from verl_tim.training.pairing import check_pairing
from verl_tim.training.processes import RunProcesses, server_name, servers_of, trainer_name
from verl_tim.training.replay_config import mode_of_run


def run_manifest(
    tim: TimConfig,
    config: Any,
    worker_group: Any,
    server_managers: Sequence[Any],
    processes: RunProcesses | None = None,
    resumed_from: int | None = None,
    deterministic: Mapping[str, Any] | None = None,
) -> Manifest:
    """Ask every process of the run.

    Args:
        worker_group: verl's RayWorkerGroup of the actor.
        server_managers: verl's LLMServerManagers.
        processes: says where each of them is.
        resumed_from: step of the checkpoint that was loaded.
        deterministic: what the processes said of the mode, if it is on.
    """
    trainer, rollout = describe_trainer(worker_group), describe_rollout(config, server_managers)
    if config.actor_rollout_ref.rollout.name == "vexact" and tim.trainer_numerics == "contract":
        check_pairing(trainer, rollout)
    return Manifest.from_processes(
        run={**_run_facts(tim, config), "resumed_from": resumed_from},
        trainer=trainer,
        rollout=rollout,
        old_log_probs=_old_log_probs(tim, config),
        correction={**_correction(config), "loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode},
        routing_replay=_routing_replay(config),
        deterministic=deterministic,
        places=None if processes is None else processes.places,
    )


def _routing_replay(config: Any) -> str | None:
    mode = mode_of_run(reader(config))
    return None if mode == "off" else mode


def describe_trainer(worker_group: Any) -> dict[str, dict[str, Any]]:
    """Facts of each actor worker, by name, from the worker itself."""
    facts = ray.get([worker.__ray_call__.remote(_describe_worker) for worker in worker_group.workers])
    return {trainer_name(rank): described for rank, described in enumerate(facts)}


def _describe_worker(worker: Any) -> dict[str, Any]:
    """Runs in the worker process, where verl may keep several roles (single_controller/ray/base.py, WorkerDict)."""
    from verl_tim.training.describe import describe_engine

    roles = getattr(worker, "worker_dict", None) or {"": worker}
    for role in roles.values():
        if getattr(role, "actor", None) is not None:
            return describe_engine(role.actor.engine)
    raise RuntimeError(f"no actor among the roles {sorted(roles)} of this worker")


def describe_rollout(config: Any, server_managers: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Facts of each rollout server, by name: ours from the server itself, another's from what it lets one see."""
    name, servers = config.actor_rollout_ref.rollout.name, servers_of(server_managers)
    if name in ROLLOUTS:
        facts = ray.get([server.describe.remote() for server in servers])
    else:
        from verl_tim.training.describe import describe_foreign_server

        facts = ray.get([server.__ray_call__.remote(describe_foreign_server, name) for server in servers])
    return {server_name(number): described for number, described in enumerate(facts)}


def _old_log_probs(tim: TimConfig, config: Any) -> Literal["recompute", "bypass", "reuse"]:
    if _correction(config).get("bypass_mode"):
        return "bypass"
    return "reuse" if tim.reuse_rollout_log_probs.enabled else "recompute"


def _correction(config: Any) -> Mapping[str, Any]:
    group = OmegaConf.select(config, "algorithm.rollout_correction")
    if group is None:
        return {}
    values = OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else dict(group)
    return {str(key): value for key, value in values.items() if key != "_target_"}  # type: ignore[union-attr]


def _run_facts(tim: TimConfig, config: Any) -> dict[str, Any]:
    choices = tim.choices or {}
    task = (tim.task or {}).get("name")
    return {
        "name": Path(tim.run_dir).name if tim.run_dir else str(config.trainer.experiment_name),
        "rollout": choices.get("rollout") or config.actor_rollout_ref.rollout.name,
        "correction": choices.get("correction")
        or correction_name({"algorithm": {"rollout_correction": _correction(config)}})
        or "none",
        "trainer_numerics": tim.trainer_numerics,
        "recipe": choices.get("recipe"),
        "task": task,
        "algorithm": str(config.algorithm.adv_estimator),
        "seed": int(config.actor_rollout_ref.rollout.seed),
        "attempt": attempt_number(tim.run_dir) if tim.run_dir else 1,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
