"""Every kernel compiles, and fits the shared memory, for GPUs that are not here: A100, L40S, H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from .compile_all import occupancy

EXPECTED = {
    "few_rows._few_rows", "few_rows._few_rows_swiglu", "norm._forward", "rope._forward", "activation._forward",
    "row_lookup._take", "attention_prefill._prefill", "attention_decode._walk_chunks", "attention_plan._plan_decode",
    "attention_backward._key_gradients", "attention_backward._query_gradients", "router._route", "grouped_gemm._stream",
    "combine._combine", "head._from_weights", "head._from_logits", "head._merge", "sampling._cut_and_draw",
    "head_backward._grad_logits", "decode_io._gather", "decode_io._scatter", "embedding._sum_pieces",
}  # fmt: skip
ON_HOPPER = {
    "attention_hopper._prefill", "attention_backward_hopper._row_statistics",
    "attention_backward_hopper_keys.key_gradients", "attention_backward_hopper_queries.query_gradients",
}  # fmt: skip


@pytest.mark.parametrize(
    "capability",
    [pytest.param(one, marks=pytest.mark.slow if one == 90 else pytest.mark.exhaustive) for one in (80, 89, 90)],
)
def test_all_kernels(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.gpu.compile_all", str(capability)],
        capture_output=True, text=True, env=environment, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} >= EXPECTED | (ON_HOPPER if capability == 90 else set())
    assert [kernel for kernel in kernels if not kernel["fits"]] == []
    assert [kernel for kernel in kernels if not kernel["programs"]] == []


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "programs"),
    [
        (118, 2, 98304, 2),  # shared memory
        (227, 4, 45056, 2),  # registers
        (149, 4, 45056, 3),
        (168, 12, 165288, 1),
        (40, 4, 512, 12),
        (16, 1, 0, 32),  # programs
        (24, 16, 0, 4),  # warps
    ],
)
def test_programs_of_a_multiprocessor(registers, warps, shared, programs):
    """Against what CUDA's occupancy calculator gives for compute capability 9.0."""
    assert occupancy(90, registers, warps, shared) == (programs, programs * warps / 64)
