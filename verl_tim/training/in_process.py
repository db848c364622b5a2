"""verl's FSDP2 training engine in the calling process, on one rank: what `verify` and tests hold a rollout against.

The engine is the one a run's worker makes (`EngineRegistry.new`, workers/engine_workers.py:113), with the same data
layout (nested tensors, micro-batches), so that what agrees here is verl's trainer and not a copy of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_tim.plugin import ensure_registered
from verl_tim.training.config import CONTRACT_BACKEND
from verl_tim.training.dtypes import SHORT_NAMES


@dataclass(frozen=True)
class ScoredSequence:
    """A prompt and a response, as token ids (int64 arrays)."""

    prompt_P: np.ndarray
    response_R: np.ndarray


@contextmanager
def single_rank_group() -> Iterator[None]:
    """A process group of this process alone (NCCL for a GPU's tensors); an existing one is used and left as it is."""
    if torch.distributed.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class InProcessTrainer:
    """verl's FSDP2 engine on one rank.

    Args:
        model_path: folder of a Hugging Face model.
        dtype: compute dtype, "bfloat16" or "float32"; the master weights are fp32 as in a run.
        numerics: "contract", or "stock" for verl's own path.
        attention: the contract's attention (`numerics.attention.resolve_attention`).
        gradient_checkpointing, activation_offload: verl's `model.enable_*` of the same names; the second needs a GPU.
        lr: AdamW's learning rate.

    Needs a process group (`single_rank_group`).
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "bfloat16",
        numerics: str = "contract",
        attention: str = "auto",
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        lr: float = 1e-3,
    ) -> None:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine import EngineRegistry

        ensure_registered()
        contract = numerics == "contract"
        self.numerics = numerics
        self.fused = contract
        model_config = HFModelConfig(
            path=model_path,
            external_lib="verl_tim.training.external",
            use_remove_padding=True,
            use_fused_kernels=contract,
            fused_kernel_options={"impl_backend": CONTRACT_BACKEND, "attention": attention}
            if contract
            else {"impl_backend": "torch"},
            enable_gradient_checkpointing=gradient_checkpointing,
            enable_activation_offload=activation_offload,
            override_config={"attn_implementation": "sdpa"},
        )
        engine_config = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_remove_padding=True,
            use_fused_kernels=contract,
            mixed_precision={"param_dtype": SHORT_NAMES[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        )
        self.engine: Any = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self.pad_token_id = model_config.tokenizer.pad_token_id or 0

    def log_probs(
        self,
        sequences: Sequence[ScoredSequence],
        *,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        packed: bool = True,
    ) -> list[Tensor]:
        """Log-probs of each response's tokens under the current weights.

        Args:
            temperature: what the logits are divided by.
            micro_batch_size: sequences per forward; None takes all at once. A remainder is a batch of its own.
            packed: rows one after another (verl's use_remove_padding), or padded to the longest.

        Returns:
            One float32 CPU tensor (response tokens,) per sequence.
        """
        size = micro_batch_size or len(sequences)
        whole = len(sequences) - len(sequences) % size
        scored: list[Tensor] = []
        for part, part_size in ((sequences[:whole], size), (sequences[whole:], len(sequences) - whole)):
            if not part:
                continue
            with self.engine.eval_mode():
                output = self.engine.infer_batch(self._batch(part, temperature, part_size, packed))
            rows = output["model_output"]["log_probs"].unbind()
            for sequence, row in zip(part, rows, strict=True):
                prompt = len(sequence.prompt_P)
                scored.append(row[prompt - 1 : prompt - 1 + len(sequence.response_R)].detach().float().cpu())
        return scored

    def update(
        self, sequences: Sequence[ScoredSequence], advantages: Sequence[float], *, temperature: float = 1.0
    ) -> float:
        """One REINFORCE step (-A log p, mean over tokens); the gradient norm before clipping."""
        loss = self._reinforce(sequences, advantages)
        with self.engine.train_mode():
            output = self.engine.train_batch(self._batch(sequences, temperature, len(sequences), packed=True), loss)
        return float(output["metrics"]["grad_norm"])

    def gradient(
        self, sequences: Sequence[ScoredSequence], advantages: Sequence[float], *, temperature: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of `update` and what one backward makes of it; no weight changes.

        Returns:
            float32 CPU tensors: the loss (1,), and every parameter's gradient by its name in the module.
        """
        losses: list[Tensor] = []
        objective = self._reinforce(sequences, advantages)

        def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            value, metrics = objective(model_output, data, dp_group)
            losses.append(value.detach().float().cpu().reshape(1))
            return value, metrics

        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(
                self._batch(sequences, temperature, len(sequences), packed=True), loss, forward_only=False
            )
            gradients = {
                name: _full(parameter.grad).detach().float().cpu().clone()
                for name, parameter in self.engine.module.named_parameters()
                if parameter.grad is not None
            }
            self.engine.optimizer_zero_grad()
        return torch.cat(losses).sum(0, keepdim=True), gradients

    @contextmanager
    def gradient_checkpointing(self, on: bool) -> Iterator[None]:
        """Switch gradient checkpointing as verl does (fsdp/transformer_impl.py:336) inside the block."""
        module = self.engine.module
        before = bool(module.is_gradient_checkpointing)
        _switch_checkpointing(module, on)
        try:
            yield
        finally:
            _switch_checkpointing(module, before)

    def snapshot(self) -> Any:
        """The weights of now, as verl's `separate_async` keeps them (utils/fsdp_utils.py:1146); for `at`."""
        from verl.utils.fsdp_utils import fsdp2_sharded_save_to_cpu

        return fsdp2_sharded_save_to_cpu(self.engine.module)

    @contextmanager
    def at(self, snapshot: Any) -> Iterator[None]:
        """The weights of a snapshot inside the block, and those of before after it."""
        from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu

        before = self.snapshot()
        fsdp2_sharded_load_from_cpu(self.engine.module, *snapshot)
        try:
            yield
        finally:
            fsdp2_sharded_load_from_cpu(self.engine.module, *before)

    def head_weight(self) -> Tensor:
        """The output head (vocabulary, hidden) in the compute dtype, on the trainer's device."""
        weight = _full(self.engine.module.lm_head.weight).detach()
        return weight.to(getattr(self.engine, "compute_dtype", torch.float32))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as verl streams them to a rollout: (Hugging Face name, full tensor)."""
        stream, _ = self.engine.get_per_tensor_param()
        yield from stream

    @staticmethod
    def _reinforce(sequences: Sequence[ScoredSequence], advantages: Sequence[float]) -> Callable[..., Any]:
        """verl's form of a loss: -A log p, mean over the response tokens of all sequences."""
        total = sum(len(sequence.response_R) for sequence in sequences)

        def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            terms = [
                -advantage * row[len(s.prompt_P) - 1 : len(s.prompt_P) - 1 + len(s.response_R)].sum() / total
                for s, row, advantage in zip(sequences, model_output["log_probs"].unbind(), advantages, strict=True)
            ]
            return torch.stack(terms).sum(), {}

        return loss

    def _batch(
        self, sequences: Sequence[ScoredSequence], temperature: float, micro_batch_size: int, packed: bool
    ) -> TensorDict:
        from verl.utils import tensordict_utils as tu

        tokens = [torch.from_numpy(np.concatenate([s.prompt_P, s.response_R]).astype(np.int64)) for s in sequences]
        masks = [
            torch.cat(
                [torch.zeros(len(s.prompt_P), dtype=torch.int64), torch.ones(len(s.response_R), dtype=torch.int64)]
            )
            for s in sequences
        ]

        def nested(parts: list[Tensor]) -> Tensor:
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        return tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(len(row)) for row in tokens]),
                "loss_mask": nested(masks),
            },
            {
                "temperature": temperature,
                "use_remove_padding": packed,
                "use_fused_kernels": self.fused,
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": micro_batch_size,
                "pad_token_id": self.pad_token_id,
                "calculate_entropy": False,
            },
        )


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _switch_checkpointing(module: Any, on: bool) -> None:
    if on:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        module.gradient_checkpointing_disable()
