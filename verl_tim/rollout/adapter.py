"""The trainer's side of a server: each rank's `rollout` object in verl's worker (`ServerAdapter`)."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from verl_tim.plugin import ensure_registered
from verl_tim.rollout.options import ranks_of
from verl_tim.rollout.shared_buckets import device_identity, pack_shared
from verl_tim.rollout.weights import Bucket, pack, send
from verl_tim.training.pairing import Card, card_with

logger = logging.getLogger(__name__)


class ServerAdapter(BaseRollout):
    """Client of the server of this rank's replica. All ranks of a replica make the same calls.

    Args:
        config, model_config: of the worker.
        device_mesh: unused; None in standalone workers.
        replica_rank: number of the replica; -1: by this rank's number, since replicas are consecutive ranks.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        ensure_registered()
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ.get("RANK", 0)), ranks_of(config)
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % size
        self.is_leader_rank = self.rollout_rank == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        """The server's actor handle; servers start after the workers, hence late."""
        if self._server is None:
            from verl_tim.rollout.replica import server_name

            self._server = ray.get_actor(server_name(self.config.name, self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Give the server its memory for "weights" or "kv_cache" back."""
        await self.server.wake_up.remote(tags=list(tags))

    async def release(self) -> None:
        """Take weights and KV cache from the server."""
        await self.server.sleep.remote()

    async def _begin(
        self, global_steps: int | None, card: Card | None
    ) -> Callable[[Any, int, torch.dtype], AsyncIterator[Bucket]] | None:
        """How this rank's weights travel: in device memory where the engine's rank runs on this GPU, else through the
        host, from the first rank; None: not at all. The server refuses a trainer whose card does not fit its own."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        identity = device_identity(device)
        shares = await self.server.begin_weights.remote(global_steps, self.rollout_rank, identity, trainer=card)
        if shares:
            return functools.partial(pack_shared, device=device)
        return pack if self.is_leader_rank else None

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Stream the trainer's weights to the server.

        Args:
            weights: generator (or asynchronous generator) of (Hugging Face name, full tensor); pulled to its end in
                any case, because pulling it is a collective of all ranks.
            wire_format: "named_tensors" only.
            global_steps: version of the weights.

        Raises:
            ConfigError: trainer and server no longer keep one contract (`pairing.check_update`).
            Whatever the server's model raises: an unknown, missing, doubled or misshapen tensor, by name.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"rollout {self.config.name} takes full tensors only, not wire_format={wire_format!r}: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend to another engine than delta_sharded"
            )
        if peft_config is not None:
            raise NotImplementedError(
                f"rollout {self.config.name} takes no LoRA adapters: set actor_rollout_ref.model.lora.merge=true or "
                "lora_rank=0"
            )
        began = time.perf_counter()
        server = self.server
        card = await card_with(weights)
        try:
            packing = await self._begin(global_steps, card)
        except Exception as error:
            await server.abandon_weights.remote(f"an update could not begin: {type(error).__name__}: {error}")
            async for _ in ensure_async_iterator(weights):
                pass  # the ranks of other replicas gather with this one
            raise
        try:
            if packing is None:
                sent = 0
                async for _ in ensure_async_iterator(weights):
                    pass
            else:
                sent = await send(
                    weights,
                    bucket_bytes=self.config.checkpoint_engine.update_weights_bucket_megabytes << 20,
                    dtype=getattr(torch, self.config.dtype),
                    packing=packing,
                    deliver=lambda bucket: server.receive_weights.remote(bucket, self.rollout_rank),
                )
        except Exception as error:
            await server.abandon_weights.remote(f"the trainer's stream failed: {type(error).__name__}: {error}")
            raise
        version = await server.finish_weights.remote(self.rollout_rank)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # buffers that the server has let go of
        logger.info(
            "rollout %s, replica %d: version %d, %.1f MiB in %.2f s",
            self.config.name,
            self.replica_rank,
            version,
            sent / 2**20,
            time.perf_counter() - began,
        )
