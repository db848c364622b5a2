"""Mixture of experts at the shape of Qwen3-30B-A3B, decode and training sizes.

Peers: the pipeline that Hugging Face's grouped_mm integration runs (sort, gather, two grouped_mm, weights, sum), and
vLLM's fused_experts where it can be imported. Decode is bound by the weights of the experts that a batch touches: the
note holds those bytes over the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu import moe
from verl_tim.numerics.gpu.device_time import event_us, graph_us
from verl_tim.numerics.gpu.dispatch import dispatch
from verl_tim.numerics.gpu.grouped_gemm import choose

HIDDEN, EXPERTS, TOP_K, INNER = 2048, 128, 8, 768


def _hf_grouped(x: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As transformers' `grouped_mm_experts_forward` computes it."""
    tokens, top_k = expert_TK.shape
    expert = expert_TK.reshape(-1)
    order = torch.argsort(expert)
    inverse = torch.argsort(order)
    rows = x[torch.arange(tokens, device=x.device).repeat_interleave(top_k)[order]]
    ends = torch.cumsum(torch.histc(expert[order].float(), bins=EXPERTS, min=0, max=EXPERTS - 1), 0, dtype=torch.int32)
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = out * weight_TK.reshape(-1)[order][:, None]
    return out[inverse].view(tokens, top_k, -1).sum(1).to(x.dtype)


def _vllm_experts() -> Callable[..., Tensor] | None:
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        return None
    return fused_experts


def run(quick: bool) -> list[BenchRow]:
    """All rows; `quick` keeps three sizes. Needs an NVIDIA GPU with 6 GiB free."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device="cuda", generator=generator) * scale).to(torch.bfloat16)

    gate_up, down = randn(EXPERTS, 2 * INNER, HIDDEN, scale=0.02), randn(EXPERTS, HIDDEN, INNER, scale=0.02)
    router = randn(EXPERTS, HIDDEN, scale=0.05)
    vllm_experts = _vllm_experts()
    table = []
    for tokens in (8, 256, 8192) if quick else (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16_384):
        x = randn(tokens, HIDDEN)
        expert_TK, weight_TK = moe.router(x, router, TOP_K, True)
        touched = int(expert_TK.unique().numel())
        moved = touched * 3 * INNER * HIDDEN * 2
        flop = 6 * tokens * TOP_K * INNER * HIDDEN
        calls = 10 if tokens <= 1024 else 3
        schedule = choose(expert_TK.numel(), EXPERTS)
        ours = graph_us(lambda: moe.experts(x, expert_TK, weight_TK, gate_up, down), calls=calls)  # noqa: B023
        rate = f"{moved / ours / 1e6:.2f} TB/s" if tokens <= 1024 else f"{flop / ours / 1e6:.0f} TFLOP/s"
        note = f"{schedule}, {touched} experts, {rate}"
        peers: dict[str, Callable[..., Tensor]] = {"HF grouped_mm": _hf_grouped}
        if vllm_experts is not None:
            peers["vLLM fused_experts"] = lambda x, e, w, gate_up, down: vllm_experts(x, gate_up, down, w, e)
        for name, peer in peers.items():
            theirs = graph_us(lambda: peer(x, expert_TK, weight_TK, gate_up, down), calls=calls)  # noqa: B023
            table.append(BenchRow("experts", f"{tokens} tokens", ours, name, theirs, note))
        ours = graph_us(lambda: moe.router(x, router, TOP_K, True), calls=calls)  # noqa: B023
        theirs = graph_us(lambda: _hf_router(x, router), calls=calls)  # noqa: B023
        table.append(BenchRow("router", f"{tokens} tokens", ours, "HF", theirs))
        ours = graph_us(lambda: dispatch(expert_TK, EXPERTS, 16), calls=calls)  # noqa: B023
        table.append(BenchRow("dispatch", f"{tokens} tokens", ours))
        if tokens >= 2048:
            table.append(_backward_row(x, expert_TK, weight_TK, gate_up, down, randn(tokens, HIDDEN)))
    return table


def _hf_router(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(F.linear(x, router), dim=-1, dtype=torch.float32)
    weight, expert = torch.topk(probabilities, TOP_K, dim=-1)
    return expert, (weight / weight.sum(-1, keepdim=True)).to(x.dtype)


def _backward_row(
    x: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, grad: Tensor
) -> BenchRow:
    ours = graph_us(lambda: moe.experts_backward(grad, x, expert_TK, weight_TK, gate_up, down), calls=3)
    leaves = [t.detach().requires_grad_() for t in (x, weight_TK, gate_up, down)]
    out = _hf_grouped(leaves[0], expert_TK, *leaves[1:])
    # by events: autograd runs on the stream of the forward, which no graph captures
    theirs = event_us(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    return BenchRow(
        "experts backward", f"{x.shape[0]} tokens", ours, "HF grouped_mm", theirs, "ours computes gate and up again"
    )
