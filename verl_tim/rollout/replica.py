"""Replicas `vexact` and `stock`: where verl starts and reaches their server.

A replica is an engine on tensor x pipeline parallel ranks of one node, each on the GPU of one worker: n trainer ranks
give n / ranks replicas, which verl's load balancer serves. The server drives the engine and starts its other ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_tim.models import load_model_config
from verl_tim.plugin import ensure_registered
from verl_tim.rollout.options import DEGREES, RolloutOptions, local_model_folder, ranks_of, refusals, rollout_options
from verl_tim.rollout.server_actor import ServerActor
from verl_tim.training.config import ConfigError

_PREFIX = "actor_rollout_ref.rollout"

# What a server gives up in `sleep`. A hybrid one gets its weights back from the trainer; a colocated one would not.
_SHARED_MEMORY: dict[RolloutMode, tuple[str, ...]] = {
    RolloutMode.HYBRID: ("weights", "kv_cache"),
    RolloutMode.COLOCATED: ("kv_cache",),
    RolloutMode.STANDALONE: (),
}


def server_name(rollout: str, replica_rank: int, *, role: str = "", suffix: str = "") -> str:
    """Name of a server actor within the Ray job; the trainer's side finds it by this."""
    return "_".join(part for part in (rollout, "server", role, f"{replica_rank}{suffix}") if part)


class EngineReplica(RolloutReplica):
    """A rollout replica of verl_tim's engine: hybrid, colocated or standalone.

    Raises:
        ConfigError: a rollout setting that this engine cannot honour, by key.
    """

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        ensure_registered()
        found = refusals(config)
        if found:
            # before verl's own constructor, which would take a world size above 1 for granted
            raise ConfigError("; ".join(f"{key}: {remedy}" for key, remedy in found))
        if ranks_of(config) > gpus_per_node:
            degrees = " x ".join(f"{key}={config.get(key)}" for key in DEGREES)
            raise ConfigError(
                f"{_PREFIX}: {degrees} is {ranks_of(config)} ranks, and a node has {gpus_per_node} devices; a replica "
                f"of rollout {config.get('name')} lives on one node: lower them"
            )
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )

        self._has_peers = int(self.config.n_gpus_per_node) * int(self.config.nnodes) > self.world_size

    async def init_hybrid(self, worker_group: Any) -> None:
        """verl's, which hands on this replica's share of the workers only."""
        self._has_peers = len(worker_group.workers) > self.world_size
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Start the server beside this replica's workers and wait until its engine stands."""
        assert len(self.workers) == self.world_size, f"{len(self.workers)} workers for a world of {self.world_size}"
        role = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        name = server_name(str(self.config.name), self.replica_rank, role=role, suffix=self.name_suffix)
        options = self._options()
        node_id, environment = await self._place(self.workers)
        actor_class: Any = ray.remote(ServerActor)
        server = actor_class.options(
            name=name,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            runtime_env={"env_vars": environment},
            max_concurrency=self.max_concurrency,
            max_restarts=options.max_restarts,
            max_task_retries=-1 if options.max_restarts else 0,
        ).remote(
            options,
            name=str(self.config.name),
            replica_rank=self.replica_rank,
            shared_memory=_SHARED_MEMORY[self.rollout_mode],
            never_again=self._never_again(),
        )
        await server.describe.remote()  # an engine that cannot start says so here
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
        prometheus = self.config.prometheus
        if prometheus.enable:
            # verl writes the addresses into Prometheus' settings (workers/rollout/utils.py:141)
            node_ip = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
            self._server_address = await server.serve_metrics.remote(node_ip, prometheus.served_model_name)

    def _options(self) -> RolloutOptions:
        path = copy_to_local(self.model_config.path, use_shm=bool(self.model_config.get("use_shm", False)))
        folder = local_model_folder(path)
        # only the hybrid trainer sends weights before anything is generated
        needs_checkpoint = self.rollout_mode != RolloutMode.HYBRID or self.is_reward_model or self.is_teacher_model
        options = rollout_options(
            self.config,
            model_path=folder,
            max_position_embeddings=load_model_config(folder).max_position_embeddings,
            device="cpu" if get_platform().device_name == "cpu" else "cuda:0",
            attention=(self.model_config.get("fused_kernel_options") or {}).get("attention") or "auto",
            load_weights=True if needs_checkpoint else None,
        )
        return dataclasses.replace(options, max_restarts=0) if self._never_again() else options

    def _never_again(self) -> str:
        """Why the server is not started again, whatever the config says; empty where the config decides."""
        if self.is_reward_model or self.is_teacher_model:
            return f"a {'reward model' if self.is_reward_model else 'teacher'} is sent no weights again"
        return "" if self._has_peers else "alone nobody answers its requests meanwhile"

    async def _place(self, workers: list[Any]) -> tuple[str, dict[str, str]]:
        """The workers' node, and the environment that shows their accelerators, in the order of their ranks, to a
        server without GPUs of its own.

        Raises:
            ConfigError: the workers are on several nodes.
        """
        platform = get_platform()

        def where(_worker: Any) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

        places = await asyncio.gather(*[worker.__ray_call__.remote(where) for worker in workers])
        nodes = {node for node, _ in places}
        if len(nodes) > 1:
            raise ConfigError(
                f"replica {self.replica_rank} of rollout {self.config.name} has its {len(workers)} workers on "
                f"{len(nodes)} nodes; its ranks must share one: lower {_PREFIX}.tensor_model_parallel_size or "
                "pipeline_model_parallel_size until they divide trainer.n_gpus_per_node"
            )
        (node_id,) = nodes
        accelerators = [index for _, found in places for index in found]
        if platform.device_name == "cpu":
            return node_id, {}
        environment = dict.fromkeys(platform.ray_noset_envvars(), "1")
        environment[platform.visible_devices_envvar()] = ",".join(str(index) for index in accelerators)
        return node_id, environment

    async def sleep(self) -> None:
        """Free weights and KV cache; unfinished requests are recomputed after waking."""
        await asyncio.gather(*[server.sleep.remote() for server in self.servers])

    async def describe(self) -> list[dict[str, Any]]:
        """Facts of each running engine, for a run's manifest."""
        return list(await asyncio.gather(*[server.describe.remote() for server in self.servers]))


class VexactReplica(EngineReplica):
    """Rollout `vexact`: contract numerics."""


class StockReplica(EngineReplica):
    """Rollout `stock`: the same engine on plain PyTorch kernels."""
