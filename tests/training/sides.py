"""Both sides of a run in one process: verl's FSDP2 engine with our class, and a rollout server without Ray."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    EngineRouterReplayConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from verl_tim.rollout.options import rollout_options
from verl_tim.rollout.recorded import RECORDED_FIELD, Recorded
from verl_tim.rollout.server import EngineServer
from verl_tim.rollout.weights import send
from verl_tim.training.choices import marked_rows
from verl_tim.training.forward_records import SAMPLED_FIELD
from verl_tim.training.pairing import card_with
from verl_tim.training.records import ROW_FIELD

PROMPT_LENGTH, RESPONSE_LENGTH = 32, 24


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 99) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@dataclass
class Row:
    """One sequence: what was asked, what was drawn, and the log-probs recorded when it was drawn."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    version: int
    recorded: Any = None
    routes: Any = None  # int16 [positions, layers, k], as the server returned them


class TrainerSide:
    """verl's engine for an actor, as its worker makes it (engine_workers.py), without the worker."""

    def __init__(
        self,
        folder: str,
        *,
        param_dtype: str = "bf16",
        packed: bool = True,
        micro_batch: int = 4,
        temperature: float = 1.0,
        contract: bool = True,
        checkpointing: bool = False,
        forward_only: bool = False,
        lr: float = 3e-3,
        replay: str = "disabled",
        dynamic: int | None = None,
    ) -> None:
        self.dynamic = dynamic  # tokens of a micro-batch; None: micro_batch rows
        self.packed, self.micro_batch, self.temperature = packed, micro_batch, temperature
        self.model_config = HFModelConfig(
            path=folder,
            external_lib="verl_tim.training.external",
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=packed,
            enable_gradient_checkpointing=checkpointing,
            use_fused_kernels=contract,
            fused_kernel_options={"impl_backend": "contract" if contract else "torch"},
        )
        engine_config = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            forward_only=forward_only,
            router_replay=EngineRouterReplayConfig(mode=replay),
            mixed_precision={"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        )
        engine_class = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        self.engine = engine_class(
            model_config=self.model_config,
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()

    def _data(self, rows: list[Row], **fields: Any) -> Any:
        def nested(sequences: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
            return torch.nested.as_nested_tensor([torch.tensor(s, dtype=dtype) for s in sequences], layout=torch.jagged)

        tensors: dict[str, Any] = {
            "input_ids": nested([row.prompt + row.response for row in rows], torch.int64),
            "position_ids": nested([list(range(len(row.prompt + row.response))) for row in rows], torch.int64),
            "prompts": nested([row.prompt for row in rows], torch.int64),
            "responses": nested([row.response for row in rows], torch.int64),
            "response_mask": nested([[1] * len(row.response) for row in rows], torch.int64),
            "loss_mask": nested([[1] * len(row.response) for row in rows], torch.int64),
            "rollout_log_probs": nested([row.log_probs for row in rows], torch.float32),
            ROW_FIELD: torch.arange(len(rows)).unsqueeze(1),
        }
        if any(row.recorded is not None for row in rows):
            tensors[SAMPLED_FIELD] = marked_rows([row.recorded for row in rows])
        if rows[0].routes is not None:
            routes = [torch.as_tensor(row.routes) for row in rows]
            tensors["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
        for name, values in fields.items():
            tensors[name] = nested(values, torch.float32)
        sizes: dict[str, Any] = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": self.micro_batch}
        if self.dynamic is not None:
            sizes = {"use_dynamic_bsz": True, "max_token_len_per_gpu": self.dynamic}
        return tu.get_tensordict(
            tensors,
            {
                **sizes,
                "temperature": self.temperature,
                "use_remove_padding": self.packed,
                "use_fused_kernels": self.model_config.use_fused_kernels,
                "global_batch_size": len(rows),
                "calculate_entropy": True,
            },
        )

    def log_probs(self, rows: list[Row]) -> list[list[float]]:
        """Old log-probs of the responses, as `compute_log_prob` returns them."""
        data = self._data(rows)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)
        per_row = response_from_nested(output["model_output"]["log_probs"], data["response_mask"])
        return [row.tolist() for row in per_row.unbind()]

    def train(
        self, rows: list[Row], old_log_probs: list[list[float]], advantages: list[float], **actor: Any
    ) -> dict[str, Any]:
        """One optimiser step with verl's own PPO loss; the metrics of the worker, unreduced."""
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=self.micro_batch, **actor)
        data = self._data(
            rows,
            old_log_probs=old_log_probs,
            advantages=[[advantage] * len(row.response) for row, advantage in zip(rows, advantages, strict=True)],
        )
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=partial(ppo_loss, config=config))
        return output["metrics"]


class RolloutSide:
    """A server, and the weight transfer of `ServerAdapter`, without Ray."""

    def __init__(
        self, folder: str, *, name: str = "vexact", dtype: str = "bfloat16", routes: bool = False, **engine_kwargs: Any
    ) -> None:
        self.dtype = dtype
        config = {
            "name": name,
            "dtype": dtype,
            "prompt_length": PROMPT_LENGTH,
            "response_length": RESPONSE_LENGTH,
            "max_model_len": None,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "seed": 0,
            "load_format": "dummy",
            "enable_rollout_routing_replay": routes,
            "engine_kwargs": {name: engine_kwargs},
        }
        options = rollout_options(config, model_path=folder, max_position_embeddings=128, device="cpu")
        self.server = EngineServer(options, name=name, replica_rank=0, shared_memory=("weights", "kv_cache"))

    def close(self) -> None:
        self.server.engine.shutdown()

    def take_weights(self, trainer: TrainerSide, version: int, bucket_bytes: int = 1 << 14) -> None:
        """What verl's worker does between two steps: `update_weights` in engine_workers.py."""

        async def transfer() -> None:
            await self.server.sleep()
            await self.server.wake_up(tags=["weights"])
            weights, _ = trainer.engine.get_per_tensor_param()
            await self.server.begin_weights(version, trainer=await card_with(weights))
            await send(
                weights,
                bucket_bytes=bucket_bytes,
                dtype=getattr(torch, self.dtype),
                deliver=self.server.receive_weights,
            )
            await self.server.finish_weights()
            await self.server.wake_up(tags=["kv_cache"])

        run(transfer())

    def draw(self, prompts: list[list[int]], *, seed: int = 0, **sampling: Any) -> list[Row]:
        """All prompts at once, so that the engine batches, chunks and, with a small pool, preempts."""

        async def everything() -> list[Any]:
            return await asyncio.gather(
                *[
                    self.server.generate(
                        prompt, {"logprobs": True, "seed": seed + number, **sampling}, f"request-{seed}-{number}"
                    )
                    for number, prompt in enumerate(prompts)
                ]
            )

        return [
            Row(
                prompt,
                output.token_ids,
                output.log_probs,
                output.extra_fields["global_steps"],
                Recorded.of_wire(output.extra_fields[RECORDED_FIELD]),
                output.routed_experts,
            )
            for prompt, output in zip(prompts, run(everything()), strict=True)
        ]
