"""Every kernel compiles, and fits the shared memory, for GPUs that are not here: A100, L40S, H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

EXPECTED = {
    "few_rows._few_rows", "few_rows._few_rows_swiglu", "norm._forward", "rope._forward", "activation._forward",
    "row_lookup._take", "attention_prefill._prefill", "attention_decode._walk_chunks", "attention_plan._plan_decode",
    "attention_backward._key_gradients", "attention_backward._query_gradients", "router._route", "grouped_gemm._stream",
    "combine._combine", "head._from_weights", "head._from_logits", "head._merge", "sampling._cut_and_draw",
    "head_backward._grad_logits", "decode_io._gather", "decode_io._scatter", "embedding._sum_pieces",
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
    assert {kernel["kernel"] for kernel in kernels} >= EXPECTED
    assert [kernel for kernel in kernels if not kernel["fits"]] == []
