"""The contract's linear beside cuBLAS as torch calls it (with split-K), at the linears of the target models.

Weights rotate, so that few rows find them in memory and not in the cache, as a decode step does.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu.device_time import graph_us
from verl_tim.numerics.gpu.gemm import gemm

LINEARS = {
    "1.7B qkv": (4096, 2048),
    "1.7B o": (2048, 2048),
    "1.7B gate_up": (12288, 2048),
    "1.7B down": (2048, 6144),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "30B-A3B qkv": (5120, 2048),
    "30B-A3B o": (2048, 4096),
    "30B-A3B router": (128, 2048),
    "head 2048": (151936, 2048),
    "head 4096": (151936, 4096),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_HEAD_ROWS = (1, 16, 64, 256, 1024)
_COLD_BYTES = 192 << 20  # of weights in turn: more than the cache holds


def _torch(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> None:
    if out_TN.dtype == torch.float32:
        torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32, out=out_TN)
    else:
        torch.mm(x_TK, weight_NK.t(), out=out_TN)


def _time(name: str, outputs: int, inner: int, rows: int) -> BenchRow:
    """Router and heads write float32 on both sides."""
    dtype = torch.float32 if "router" in name or "head" in name else torch.bfloat16
    copies = max(2, min(24, math.ceil(_COLD_BYTES / (2 * outputs * inner)))) if outputs < 32768 else 1
    x = torch.randn(rows, inner, device="cuda").bfloat16()
    weights = [torch.randn(outputs, inner, device="cuda").bfloat16() for _ in range(copies)]
    out = torch.empty(rows, outputs, dtype=dtype, device="cuda")
    calls = max(copies, 4 if rows > 1024 or copies == 1 else 12)
    ours = graph_us([functools.partial(gemm, x, w, out=out) for w in weights], calls=calls)
    peer = graph_us([functools.partial(_torch, x, w, out) for w in weights], calls=calls)
    rate = f"{2 * rows * outputs * inner / ours / 1e6:.0f} TFLOP/s, {2 * outputs * inner / ours / 1e6:.2f} TB/s"
    return BenchRow("gemm", f"{name} M={rows}", ours, "torch.mm", peer, rate)


def run(quick: bool) -> list[BenchRow]:
    """Every linear at every row count (`quick`: those of the 1.7B at four row counts)."""
    table = []
    for name, (outputs, inner) in LINEARS.items():
        if quick and not name.startswith("1.7B"):
            continue
        counts = (1, 16, 256, 4096) if quick else _HEAD_ROWS if "head" in name else ROWS
        table += [_time(name, outputs, inner, rows) for rows in counts]
    return table
