"""Compile every kernel for a GPU that need not be there: `python -m tests.numerics.gpu.compile_all CAPABILITY`.

A stand-in for Triton's driver names the target, and every launch stops after compiling. Prints one JSON line per
kernel: name, bytes of shared memory and whether they fit that GPU, registers per thread, bytes of stack (spilled
registers), warps, and how many programs fit a multiprocessor at a time, with the share of its warps that they are
(`occupancy`). Run in a process of its own: the tests around it use Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""What one program may take (CUDA C++ programming guide, technical specifications per compute capability)."""


# Of one multiprocessor (the same tables): shared memory, warps, programs. All have 65,536 registers.
_ROOM = {80: (164 << 10, 64, 32), 86: (100 << 10, 48, 16), 89: (100 << 10, 48, 24), 90: (228 << 10, 64, 32),
         120: (100 << 10, 48, 24)}  # fmt: skip


def occupancy(capability: int, registers: int, warps: int, shared: int) -> tuple[int, float]:
    """(programs of a multiprocessor at a time, share of its warps). Registers are given out per warp in units of 256,
    and a program takes one KiB of shared memory more than it asks for."""
    room, most_warps, most_programs = _ROOM[capability]
    of_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    programs = min(of_registers, room // (shared + 1024), most_warps // warps, most_programs)
    return programs, programs * warps / most_warps


def resources(kernel: Any) -> tuple[int, int, int]:
    """(registers per thread, bytes of stack, warps that are launched) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    threads = re.search(r"\.reqntid (\d+)", kernel.asm["ptx"])
    assert found is not None, said
    assert threads is not None, "a kernel that names no number of threads"
    return int(found[1]), int(found[2]), int(threads[1]) // 32


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
    known: dict[Any, tuple[int, int, int]] = {}

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        shared = kernel.metadata.shared
        if kernel not in known:
            registers, stack, warps = known[kernel] = resources(kernel)
        registers, stack, warps = known[kernel]
        programs, share = occupancy(capability, registers, warps, shared)
        sizes = {name: value for name, value in options.items() if name.isupper()}
        print(
            json.dumps(
                {"kernel": f"{self.fn.__module__.rsplit('.', 1)[-1]}.{self.fn.__name__}", "shared": shared,
                 "fits": shared <= SHARED_BYTES[capability], "registers": registers, "stack": stack, "warps": warps,
                 "programs": programs, "occupancy": round(share, 3), "sizes": sizes}
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


def attention_on_hopper() -> None:
    """What `attention` takes where `attention_hopper.supports` holds."""
    from verl_tim.numerics.gpu import attention_backward_hopper, attention_hopper
    from verl_tim.numerics.gpu.attention_plan import PackedPlan

    plan = PackedPlan([200, 100], device="cpu")
    tiles, table = plan.query_tiles(attention_hopper.ROWS), torch.zeros(2, 20, dtype=torch.int32)
    for heads, kv_heads, dim in ((16, 8, 128), (14, 2, 64)):
        q, k = _bf16(300, heads, dim), _bf16(300, kv_heads, dim)
        out, lse = torch.zeros_like(q), torch.zeros(heads, 300)
        attention_hopper.prefill(q, k, k, out, lse, tiles, None)
        for page in (16, 32, 64, 128):
            pages = _bf16(40, page, kv_heads, dim)
            attention_hopper.prefill(q, pages, pages, out, None, tiles, table)
        grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k))
        attention_backward_hopper.backward(out, q, k, k, out, lse, plan, grads)


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
    for part in (*PARTS, attention_on_hopper) if capability == 90 else PARTS:
        part()


if __name__ == "__main__":
    main(int(sys.argv[1]))
