"""A trainer's step: forward, backward and optimizer under FSDP2, contract ops against the stock Hugging Face model.

Both sides get the same random model, the same packed batch and the same loss (mean of -A log p over all tokens), with
gradient checkpointing. The stock side is what verl trains with: SDPA attention (FlashAttention or cuDNN by PyTorch's
choice) and log-probs from logits, in row chunks so that memory is not the logits'. All sequences have one length, so
that the stock side needs no mask and pays for no padding.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu.device_time import event_us
from verl_tim.training.in_process import single_rank_group

LEARNING_RATE = 1e-6
_LOGIT_ROWS = 2048  # rows per chunk of the stock side's logits


@dataclass(frozen=True)
class Workload:
    """A model shape (`tasks.random_model.SHAPES`) and a batch. layers: fewer than the shape's, to fit one GPU."""

    shape: str
    sequences: int
    length: int
    layers: int | None = None

    def __str__(self) -> str:
        depth = f" with {self.layers} layers" if self.layers else ""
        return f"{self.shape}{depth}, {self.sequences} x {self.length}"


WORKLOADS = (
    Workload("qwen3-1.7b", 16, 2048),
    Workload("qwen3-1.7b", 4, 8192),
    Workload("qwen3-30b-a3b", 8, 2048, layers=6),
)


def _shard(model: Any) -> None:
    """FSDP2 as verl applies it: every decoder layer, then the root; bf16 compute, float32 master and reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _stock_log_probs(model: Any, token_BS: Tensor) -> Tensor:
    """log p of the next token, as verl's path without fused kernels computes it, in row chunks that are recomputed."""
    from torch.utils.checkpoint import checkpoint

    hidden = model.model(input_ids=token_BS, use_cache=False).last_hidden_state
    hidden_TD, target_T = hidden.flatten(0, 1), token_BS.roll(-1, 1).flatten()

    def chunk(rows: Tensor, target: Tensor) -> Tensor:
        logits = model.lm_head(rows).float()
        return torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]

    parts = [
        checkpoint(chunk, h, t, use_reentrant=False)
        for h, t in zip(hidden_TD.split(_LOGIT_ROWS), target_T.split(_LOGIT_ROWS), strict=True)
    ]
    return torch.cat(parts)


def _contract_log_probs(model: Any, token_BS: Tensor) -> Tensor:
    sequences, length = token_BS.shape
    position = torch.arange(length, device=token_BS.device).repeat(sequences)[None]
    return model(
        input_ids=token_BS.reshape(1, -1),
        position_ids=position,
        shift_labels=token_BS.roll(-1, 1).reshape(1, -1),
        calculate_entropy=False,
    ).log_probs[0]


def _call(model: Any, token_BS: Tensor) -> Tensor:
    return model(token_BS)


class _Side:
    """One side's sharded model and optimizer over the workload's batch."""

    def __init__(self, workload: Workload, *, contract: bool, attention: str) -> None:
        from verl_tim.models import apply_contract
        from verl_tim.tasks.random_model import random_model

        device = torch.device("cuda")
        self.model: Any = random_model(workload.shape, layers=workload.layers, device=device)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.log_probs: Callable[[Any, Tensor], Tensor] = _contract_log_probs
        if contract:
            apply_contract(self.model, attention=attention)
        else:
            # The stock computation runs as the root's forward, so that FSDP2's hooks surround it.
            self.model.forward = types.MethodType(_stock_log_probs, self.model)
            self.log_probs = _call
        _shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        generator = torch.Generator(device).manual_seed(1)
        shape = (workload.sequences, workload.length)
        vocab = self.model.config.vocab_size
        self.token_BS = torch.randint(0, vocab, shape, generator=generator, device=device)
        self.advantage_T = torch.randn(self.token_BS.numel(), generator=generator, device=device)

    def step(self) -> None:
        loss = -(self.advantage_T * self.log_probs(self.model, self.token_BS)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward(self) -> None:
        self.log_probs(self.model, self.token_BS)


def measure(workload: Workload, *, contract: bool, attention: str = "auto", repeats: int = 5) -> dict[str, float]:
    """Seconds of a whole step, of its forward, and the peak memory in GiB, of one side."""
    with single_rank_group():
        side = _Side(workload, contract=contract, attention=attention)
        torch.cuda.reset_peak_memory_stats()
        seconds = event_us(side.step, repeats=repeats, warm_up=2) * 1e-6
        peak = torch.cuda.max_memory_allocated() / 2**30
        forward = event_us(side.forward, repeats=repeats, warm_up=2) * 1e-6
        result = {"step": seconds, "forward": forward, "peak_gib": peak}
        del side
    gc.collect()
    torch.cuda.empty_cache()
    return result


def run(quick: bool) -> list[BenchRow]:
    """Contract against stock for every workload (`quick`: the first alone)."""
    rows = []
    for workload in WORKLOADS[:1] if quick else WORKLOADS:
        repeats = 3 if quick else 5
        stock = measure(workload, contract=False, repeats=repeats)
        ours = measure(workload, contract=True, repeats=repeats)
        tokens = workload.sequences * workload.length
        memory = f"peak {ours['peak_gib']:.1f} GiB against {stock['peak_gib']:.1f}"
        for part in ("step", "forward"):
            note = f"{tokens / ours[part]:,.0f} tokens/s" + (f"; {memory}" if part == "step" else "")
            rows.append(
                BenchRow(f"trainer {part}", str(workload), ours[part] * 1e6, "stock HF", stock[part] * 1e6, note)
            )
    return rows
