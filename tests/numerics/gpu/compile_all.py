"""Compile every kernel for a GPU that need not be there: `python -m tests.numerics.gpu.compile_all CAPABILITY`.

A stand-in for Triton's driver names the target, and every launch stops after compiling. Prints one JSON line per
kernel: name, bytes of shared memory, and whether they fit that GPU. Run in a process of its own: the tests around it
use Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""What one program may take (CUDA C++ programming guide, technical specifications per compute capability)."""


class _Driver:
    """A GPU of that capability, of which nothing is asked but its target."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.launchers: list[str] = []  # kernels for which one was made

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        self.launchers.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _compile_only(capability: int) -> None:
    from verl_tim.numerics.gpu import processor

    driver.set_active(_Driver(capability))
    processor._shared_bytes = lambda device: SHARED_BYTES[capability]
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        shared = kernel.metadata.shared
        print(
            json.dumps(
                {"kernel": f"{self.fn.__module__.rsplit('.', 1)[-1]}.{self.fn.__name__}", "shared": shared,
                 "fits": shared <= SHARED_BYTES[capability]}
            ),
            flush=True,
        )  # fmt: skip
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]


def _bf16(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.bfloat16)


def linears() -> None:
    from verl_tim.numerics.gpu import few_rows, gemm

    for outputs, inner in ((2048, 6144), (12288, 2048), (60, 2048), (192, 64)):
        weight = _bf16(outputs, inner)
        for rows in (1, 16, 64, 300):
            for schedule in gemm.schedules(rows, outputs, inner, "cpu"):
                schedule.run(_bf16(rows, inner), weight, None, _bf16(rows, outputs))
    few_rows.swiglu(_bf16(16, 2048), _bf16(12288, 2048))


def row_operations() -> None:
    from verl_tim.numerics.gpu import activation, embedding, norm, rope, row_lookup

    x, weight = _bf16(64, 2048), _bf16(2048)
    norm.rms_norm(x, weight, 1e-6)
    norm.rms_norm(x, weight, 1e-6, x)
    norm.rms_norm_backward(x, x, weight, 1e-6, x)
    both = _bf16(64, 12288)
    activation.swiglu(both[:, :6144], both[:, 6144:])
    activation.swiglu_backward(_bf16(64, 6144), both[:, :6144], both[:, 6144:])
    for dim in (32, 64, 80, 128, 256):
        q, k, head = _bf16(64, 16, dim), _bf16(64, 8, dim), _bf16(dim)
        cos, sin = torch.zeros(2, 64, dim // 2)
        pages = torch.zeros(2, 9, 16, 8, dim, dtype=torch.bfloat16)
        rope.qk_norm_rope(q, k, head, head, 1e-6, cos, sin)
        rope.qk_norm_rope_backward(q, k, q, k, head, head, 1e-6, cos, sin)
        write = (pages[0], pages[1], torch.arange(64))
        rope.qk_norm_rope(q, k, head, head, 1e-6, cos, sin, v_THD=k, kv_write=write, keep_k=False)
    row_lookup.take(x, torch.zeros(8, dtype=torch.int64))
    embedding.embedding_backward(x, torch.zeros(64, dtype=torch.int64), 1000)


def attention() -> None:
    from verl_tim.numerics.gpu import attention as op
    from verl_tim.numerics.gpu.attention_decode import decode, scratch_elements
    from verl_tim.numerics.gpu.attention_plan import DecodePlan, PackedPlan

    for heads, kv_heads, dim in (
        (16, 8, 128),
        (32, 4, 128),
        (14, 2, 64),
        (4, 4, 80),
        (8, 1, 96),
        (8, 4, 256),
        (4, 2, 32),
    ):
        q, k = _bf16(300, heads, dim), _bf16(300, kv_heads, dim)
        cu = torch.tensor([0, 200, 300], dtype=torch.int32)
        plan = PackedPlan([200, 100], device="cpu")
        out, lse = op.varlen_forward(q, k, k, cu, plan=plan)
        op.varlen_backward(out, q, k, k, out, lse, cu, plan=plan)
        for page in (16, 64):
            pages = _bf16(40, page, kv_heads, dim)
            table = torch.zeros(2, 20, dtype=torch.int32)
            context = torch.tensor([200, 100], dtype=torch.int32)
            op.paged_forward(q[:3], pages, pages, torch.tensor([0, 2, 3], dtype=torch.int32), context, table, 2, 200)
            for count in (2, 300):
                decoding = DecodePlan(count, kv_heads, "cpu", max_context=4096)
                decoding.refresh(torch.arange(count + 1, dtype=torch.int32), torch.ones(count, dtype=torch.int32))
                scratch = torch.zeros(scratch_elements(decoding.num_slots, heads, dim))
                rows = torch.zeros(count, 20, dtype=torch.int32)
                decode(q[:count], pages, pages, rows, torch.zeros_like(q[:count]), decoding, scratch)


def experts() -> None:
    from verl_tim.numerics.gpu import moe

    for count, top_k, hidden, inner in ((128, 8, 2048, 768), (8, 2, 64, 64)):
        gate_up, down, router = _bf16(count, 2 * inner, hidden), _bf16(count, hidden, inner), _bf16(count, hidden)
        for rows in (1, 64, 300, 700, 2000):
            x = _bf16(rows, hidden)
            expert, weight = moe.router(x, router, top_k, True)
            moe.experts(x, torch.zeros_like(expert), weight, gate_up, down)
        moe.router_backward(weight, x, router, torch.zeros_like(expert), True)


def head() -> None:
    from verl_tim.numerics.gpu import head as op
    from verl_tim.numerics.gpu import sampling
    from verl_tim.numerics.gpu.head_backward import head_backward
    from verl_tim.numerics.gpu.vocabulary_tile import TILE
    from verl_tim.numerics.shards import Shards, VocabularyPart

    weight, ids = _bf16(5000, 2048), torch.zeros(300, dtype=torch.int64)
    hot = torch.ones(300)
    for rows in (1, 16, 64, 300):
        hidden = _bf16(rows, 2048)
        op.sample(hidden, weight, hot[:rows], ids[:rows], ids[:rows])
        op.token_log_probs(hidden, weight, ids[:rows], hot[:rows], with_entropy=True, with_top1=True)
        part = VocabularyPart(Shards(1, 2, lambda x: torch.stack([x, x])), 5000, TILE)
        op.sample(hidden, weight[part.rows], hot[:rows], ids[:rows], ids[:rows], part=part)
    cuts = sampling.Cuts(ids[:4] + 5, hot[:4] * 0.9, hot[:4] * 0)
    sampling.sample_with_cuts(_bf16(4, 2048), weight, hot[:4], cuts, ids[:4], ids[:4])
    head_backward(hidden, weight, ids, hot, hot, hot, hot, hot, hot)


def decode_ends() -> None:
    from verl_tim.numerics.gpu import decode_io

    ids, one, table = torch.zeros(8, dtype=torch.int64), torch.ones(8), torch.zeros(8, 20, dtype=torch.int32)
    out = (ids, ids, ids, ids.int(), ids, one, ids, table)
    decode_io.gather(ids, (ids, ids, one, ids, table), out, 64)
    decode_io.scatter(ids, (ids, one, ids, one), ids, ids, ids, torch.zeros(4, 8, dtype=torch.int32), 7)


PARTS = (linears, row_operations, attention, experts, head, decode_ends)


def main(capability: int) -> None:
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    _compile_only(capability)
    for part in PARTS:
        part()


if __name__ == "__main__":
    main(int(sys.argv[1]))
