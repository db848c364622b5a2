"""Attention, contract ``chunk64``: prefill, gradients and decode against cuDNN, FlashAttention-2 and vLLM's FA3.

Prefill and gradients are bound by arithmetic: the note holds TFLOP/s (causal: half of the products; gradients 2.5
times the forward, whatever a schedule recomputes). Decode is bound by memory: the note holds bytes of keys and values
over the time, and its share of 4.3 TB/s, what a copy moves on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu import attention
from verl_tim.numerics.gpu.attention_decode import scratch_elements
from verl_tim.numerics.gpu.attention_plan import STATE_SLOTS, PackedPlan, PagedPlan
from verl_tim.numerics.gpu.device_time import graph_us

_COPY_TB_PER_S = 4.3
_COLD_BYTES = 256 << 20  # keys and values read in turn, so that none are found in the cache

TRAINER = [
    (lengths, heads, kv, dim)
    for heads, kv, dim in ((16, 8, 128), (14, 2, 64))
    for lengths in ([8192] * 4, [2048] * 16, [512] * 64, [20_480])
]
DECODE = [
    (batch, context, heads, kv, dim)
    for heads, kv, dim in ((16, 8, 128), (32, 4, 128), (14, 2, 64))
    for batch, context in ((1, 512), (1, 16_384), (4, 4096), (16, 512), (16, 2560), (64, 2560), (256, 384), (256, 2048))
]


def _randn(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], backend: SDPBackend) -> Callable[[], Any]:
    """The backend on the same rows as a dense batch; keys and values are repeated outside the timing."""
    batch, heads, group = len(lengths), q.shape[1], q.shape[1] // k.shape[1]
    dense_q = q.view(batch, -1, heads, q.shape[2]).transpose(1, 2)
    dense_k, dense_v = (
        x.view(batch, -1, x.shape[1], x.shape[2]).transpose(1, 2).repeat_interleave(group, 1) for x in (k, v)
    )

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=True)

    return call


def _trainer_rows(lengths: list[int], heads: int, num_kv_heads: int, dim: int) -> Iterator[BenchRow]:
    rows, longest = sum(lengths), max(lengths)
    q, k, v = (_randn(rows, n, dim) for n in (heads, num_kv_heads, num_kv_heads))
    plan = PackedPlan(lengths, device="cuda")
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)
    flop = sum(2.0 * heads * dim * n * (n + 1) for n in lengths)
    shape = f"{len(lengths)}x{longest}, {heads}/{num_kv_heads} heads of {dim}"

    ours = graph_us(lambda: attention.varlen_forward(q, k, v, cu_seqlens, plan=plan), calls=3)
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
        theirs = graph_us(_sdpa(q, k, v, lengths, backend), calls=3)
        note = f"{flop / ours / 1e6:.0f} TFLOP/s, peer {flop / theirs / 1e6:.0f}"
        yield BenchRow("attention prefill", shape, ours, name, theirs, note)

    out, lse = attention.varlen_forward(q, k, v, cu_seqlens, plan=plan)
    grad = _randn(rows, heads, dim)
    ours = graph_us(lambda: attention.varlen_backward(grad, q, k, v, out, lse, cu_seqlens, plan=plan), calls=3)
    seed, unused = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.zeros((), dtype=torch.uint64, device="cuda")
    for name, deterministic in (("FA2 deterministic", True), ("FA2", False)):
        before = torch.are_deterministic_algorithms_enabled()
        settings: Any = torch.utils.deterministic
        filled = settings.fill_uninitialized_memory
        torch.use_deterministic_algorithms(deterministic)
        settings.fill_uninitialized_memory = False
        try:
            theirs = graph_us(
                lambda: torch.ops.aten._flash_attention_backward(
                    grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, seed, unused
                ),
                calls=3,
            )
        finally:
            torch.use_deterministic_algorithms(before)
            settings.fill_uninitialized_memory = filled
        note = f"{2.5 * flop / ours / 1e6:.0f} TFLOP/s, peer {2.5 * flop / theirs / 1e6:.0f}"
        yield BenchRow("attention gradients", shape, ours, name, theirs, note)


def _vllm_fa3() -> Callable[..., Any] | None:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _decode_rows(
    batch: int, context: int, heads: int, num_kv_heads: int, dim: int, page_size: int
) -> Iterator[BenchRow]:
    moved = 4 * batch * context * num_kv_heads * dim
    layers = max(1, min(28, _COLD_BYTES // moved))
    pages = -(-context // page_size)
    k_pages, v_pages = (_randn(layers, batch * pages + 1, page_size, num_kv_heads, dim) for _ in range(2))
    table = (torch.randperm(batch * pages, device="cuda") + 1).view(batch, pages).to(torch.int32)
    q, out = _randn(batch, heads, dim), _randn(batch, heads, dim)
    start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    length = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    scratch = torch.empty(scratch_elements(STATE_SLOTS, heads, dim), device="cuda")
    plan = PagedPlan(start, length, num_kv_heads=num_kv_heads, num_rows=batch, max_query_len=1, max_context_len=context)

    def ours() -> None:
        for k, v in zip(k_pages, v_pages, strict=True):
            attention.paged_forward(q, k, v, start, length, table, 1, context, out, scratch, plan=plan)

    ours_us = graph_us(ours, calls=1) / layers
    rate = moved / ours_us / 1e6
    shape = f"{batch}x{context}, {heads}/{num_kv_heads} heads of {dim}, pages of {page_size}"
    note = f"{rate:.2f} TB/s, {rate / _COPY_TB_PER_S:.0%} of a copy"
    fa3 = _vllm_fa3()
    if fa3 is None:
        yield BenchRow("attention decode", shape, ours_us, note=note)
        return
    for name, num_splits in (("vLLM FA3", 0), ("vLLM FA3 unsplit", 1)):

        def theirs(num_splits: int = num_splits) -> None:
            for k, v in zip(k_pages, v_pages, strict=True):
                fa3(
                    q,
                    k,
                    v,
                    max_seqlen_q=1,
                    cu_seqlens_q=start,
                    max_seqlen_k=context,
                    seqused_k=length,
                    block_table=table,
                    causal=True,
                    fa_version=3,
                    num_splits=num_splits,
                )

        yield BenchRow("attention decode", shape, ours_us, name, graph_us(theirs, calls=1) / layers, note)


def run(quick: bool) -> list[BenchRow]:
    """All rows; `quick` keeps a few sizes. Needs an NVIDIA GPU with 8 GiB free."""
    table: list[BenchRow] = []
    for lengths, heads, num_kv_heads, dim in TRAINER[:2] if quick else TRAINER:
        table += _trainer_rows(lengths, heads, num_kv_heads, dim)
    for batch, context, heads, num_kv_heads, dim in DECODE[:8:2] if quick else DECODE:
        for page_size in (64,) if quick else (16, 64, 128):  # 64: the engine's default
            table += _decode_rows(batch, context, heads, num_kv_heads, dim, page_size)
    return table
