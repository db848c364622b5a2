"""The probe's kernels compiled in so many threads, for a Hopper GPU that need not be there:
`python -m tests.numerics.gpu.rehearse_all THREADS`.

Prints one JSON line per kernel: name, what it was specialised for, a digest of its machine code. In a process of its
own, without Triton's interpreter; give it a TRITON_CACHE_DIR of its own, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from verl_tim.numerics.gpu import cublaslt, probe, processor, rehearsal
from verl_tim.numerics.probe import ProbeReport, ProbeShapes

from .compile_all import SHARED_BYTES, _Driver

SHAPES = ProbeShapes(
    linears=(((1024, 128, 128), 256), ((256,), 1024)), hidden_size=256, vocab_size=1000, num_heads=8, num_kv_heads=1,
    head_dim=128, widths=(256, 128), intermediate_size=128, moe=(16, 4, 128),
)  # fmt: skip


def main(threads: int) -> None:
    driver.set_active(_Driver(90))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    processor._multiprocessors = lambda device: 132
    processor._shared_bytes = lambda device: SHARED_BYTES[90]
    cublaslt.library = lambda: object()  # of which a rehearsal asks nothing
    rehearsal.threads = lambda: threads
    functions: dict[JITFunction, None] = {}
    run = JITFunction.run

    def noted(self: JITFunction, *args: Any, **options: Any) -> Any:
        functions[self] = None
        return run(self, *args, **options)

    JITFunction.run = noted
    work = probe.Rehearsal(rehearsal.META, SHAPES, "chunk64", ProbeReport("chunk64", ())).run
    ready = rehearsal.rehearse(torch.device("cuda", 0), work)
    kernels = [
        (f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}", key, kernel)
        for function in functions
        for key, kernel in function.device_caches[0][0].items()
    ]
    assert len(kernels) == ready, f"{ready} kernels ready, {len(kernels)} in the cache"
    for name, key, kernel in kernels:
        code = hashlib.sha256(kernel.asm["cubin"]).hexdigest()
        print(json.dumps({"kernel": name, "key": key, "code": code}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
