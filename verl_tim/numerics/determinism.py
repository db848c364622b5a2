"""Results of one process that repeat from run to run: what is switched on, and what really holds.

`turn_on` sets what torch has to offer. `observe` says what is in effect by asking torch and the interpreter, and by
computing: an environment variable or a flag that was set is no proof, since a library may have read it before, or set
it back. What torch cannot be asked for (the algorithms of cuBLAS and NCCL) is probed: the same operands give the same
bits each time, and the digest of those bits must be the same in every process of the same kind.

This is reproducibility, and nothing else: the same process with the same input gives the same bits. Whether a row's
bits depend on its batch, or on the side that computes it, is `probe.probe`'s matter.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

HASHED = "verl_tim"
"""A text whose hash tells which hash seed this interpreter really has."""
REPEATS = 3
DROPOUT_SUFFIXES = ("dropout", "dropout_p", "dropout_prob", "dropout_rate", "_pdrop")
"""Of settings and attributes of transformers' models that hold the probability of a dropout."""


def turn_on() -> None:
    """Deterministic kernels in this process, or an error where torch has none.

    Not `warn_only`, which verl's own switch sets: with it torch's attention keeps its fast backward, which adds in any
    order. And without torch's fill of new tensors with NaN, one more kernel per allocation that repeats nothing.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Inductor times candidates and keeps the fastest; in this mode not where they round differently
    from torch._inductor import config as inductor

    inductor.deterministic = True


def seed_all(seed: int) -> None:
    """Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def flags() -> dict[str, Any]:
    """What torch says is in effect."""
    inductor = sys.modules.get("torch._inductor.config")
    return {
        "deterministic_algorithms": torch.get_deterministic_debug_mode() == 2,
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "inductor_deterministic": None if inductor is None else inductor.deterministic,
    }


FLAGS_WHEN_ON: Mapping[str, Any] = {
    "deterministic_algorithms": True,
    "warn_only": False,
    "fill_uninitialized_memory": False,
    "cudnn_deterministic": True,
    "cudnn_benchmark": False,
    "inductor_deterministic": True,
}
"""`flags()` of a process in which `turn_on` is in effect."""


def observe(
    device: torch.device | str, *, variables: Iterable[str] = (), backward: bool = True, workspace: bool = False
) -> dict[str, Any]:
    """What holds in this process; plain values.

    Args:
        device: where it computes.
        variables: environment variables to report as this process sees them.
        backward: also probe gradients; a process that only generates has none, and its kernels need not repeat them.
        workspace: also measure cuBLAS's workspace, for which it is taken away from cuBLAS first. Not where CUDA graphs
            are recorded: they hold its address.
    """
    device = torch.device(device)
    digests, unstable = repeated(device, backward=backward)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {_instructions()}",
        "threads": torch.get_num_threads(),
        "flags": flags(),
        "hash": hash(HASHED),
        "hash_randomization": bool(sys.flags.hash_randomization),
        "variables": {name: os.environ[name] for name in variables if name in os.environ},
        "digests": digests,
        "unstable": unstable,
        "blas_workspace": blas_workspace(device) if workspace and device.type == "cuda" else None,
    }


def _instructions() -> str:
    return torch.backends.cpu.get_cpu_capability()


def repeated(device: torch.device, *, backward: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Digest of each probe's bits, and what is wrong with those that did not repeat or could not run."""
    digests: dict[str, str] = {}
    unstable: dict[str, str] = {}
    for name, probe in _probes(device, backward):
        try:
            found = [digest(probe()) for _ in range(REPEATS)]
        except RuntimeError as error:  # torch has no deterministic kernel for it, and says so
            unstable[name] = f"raised {error}".splitlines()[0]
            continue
        digests[name] = found[0]
        if len(set(found)) > 1:
            unstable[name] = f"{len(set(found))} results in {REPEATS} runs"
    return digests, unstable


def digest(x: Tensor) -> str:
    """Of a tensor's bits, 16 hexadecimal digits."""
    data = x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _probes(device: torch.device, backward: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Operations whose order of addition is often left to chance, at shapes at which it is."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # few rows and a long inner dimension: cuBLAS splits it
    x_MK, w_KN = draw(8, 16384), draw(16384, 64)
    q, k, v = (draw(1, 2, 192, 32) for _ in range(3))
    yield "gemm", lambda: x_MK @ w_KN
    yield "attention", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if not backward:
        return
    # many rows into few places: atomics add them in any order
    rows_ND = draw(4096, 32)
    place_N = torch.randint(16, (4096,), generator=generator).to(device)

    def index_add() -> Tensor:
        return torch.zeros(16, 32, device=device, dtype=dtype).index_add(0, place_N, rows_ND)

    def embedding_gradient() -> Tensor:
        table_VD = torch.zeros(16, 32, device=device, dtype=dtype, requires_grad=True)
        F.embedding(place_N, table_VD).backward(rows_ND)
        assert table_VD.grad is not None
        return table_VD.grad

    def attention_gradient() -> Tensor:
        dq, dk, dv = (x.clone().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(dq, dk, dv, is_causal=True)
        return torch.cat(torch.autograd.grad(out, (dq, dk, dv), v))

    yield "gemm_gradient", lambda: rows_ND.T @ rows_ND
    yield "index_add", index_add
    yield "embedding_gradient", embedding_gradient
    yield "attention_gradient", attention_gradient


def blas_workspace(device: torch.device) -> int:
    """Bytes of workspace that cuBLAS really got in this process: what a product of matrices allocates after its
    workspace was taken away. `CUBLAS_WORKSPACE_CONFIG=:4096:8` is 32 MiB, `:16:8` is 128 KiB.
    """
    a = torch.ones(64, 64, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.mm(a, a, out=out)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def collective(device: torch.device | str) -> dict[str, Any]:
    """All-reduce and reduce-scatter of the default group, repeated: every rank calls it.

    Returns:
        `backend`; `digest` of the sum's bits, which every rank must share; `unstable`: what did not repeat. Nothing
        without a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    device, ranks, rank = torch.device(device), dist.get_world_size(), dist.get_rank()
    # different exponents on each rank, so that another order is another sum
    generator = torch.Generator().manual_seed(rank)
    x_N = torch.randn(ranks * 4096, generator=generator) * 2.0 ** (torch.arange(ranks * 4096) % 12)
    x_N = x_N.to(device)

    def all_reduce() -> Tensor:
        total_N = x_N.clone()
        dist.all_reduce(total_N)
        return total_N

    def reduce_scatter() -> Tensor:
        part_n = torch.empty(4096, device=device)
        dist.reduce_scatter_tensor(part_n, x_N)
        return part_n

    sums = [digest(all_reduce()) for _ in range(REPEATS)]
    parts = [digest(reduce_scatter()) for _ in range(REPEATS)]
    unstable = [name for name, found in (("all_reduce", sums), ("reduce_scatter", parts)) if len(set(found)) > 1]
    return {"backend": dist.get_backend(), "ranks": ranks, "digest": sums[0], "unstable": unstable}


def dropouts(module: torch.nn.Module) -> dict[str, float]:
    """Submodule or attribute -> probability, of every dropout of a model that is not 0."""
    found = {}
    for name, child in module.named_modules():
        probability = getattr(child, "p", None)
        if isinstance(child, torch.nn.modules.dropout._DropoutNd) and probability:
            found[name or "(root)"] = float(probability)
        for key, value in vars(child).items():
            # attention of transformers keeps a number and drops in a function
            if key.endswith(DROPOUT_SUFFIXES) and isinstance(value, float) and value:
                found[f"{name}.{key}".lstrip(".")] = value
    return found
