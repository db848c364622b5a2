"""Facts that a process reports about itself: versions, device, threads, determinism variables as it sees them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Variables that decide the order of a sum, the choice of a kernel, or the seed of a hash somewhere in this stack. Each
# worker reports what it sees: launchers forward only some of them.
DETERMINISM_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_NTHREADS",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VERL_DISABLE_FLASH_ATTN_CE",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
)

PACKAGES = (
    "flash-attn",
    "flashinfer-python",
    "ray",
    "tensordict",
    "torch",
    "transformers",
    "triton",
    "verl",
    "verl-tim",
    "vllm",
)


def package_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions by distribution name, without importing anything; absent packages are left out."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    """The CPU's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA kernel driver, or None where it cannot be read."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        version = Path("/proc/driver/nvidia/version")
        return version.read_text(encoding="utf-8").splitlines()[0] if version.exists() else None
    return answer.stdout.split()[0] if answer.stdout.strip() else None


def process_facts(device: torch.device | str = "cpu", environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What this process knows about itself, under the keys of `manifest.ProcessFacts`.

    Call it in the process it describes (a trainer worker, a rollout server) and merge the backend's own facts into it.

    Args:
        device: where this process computes.
        environ: for tests; the process environment otherwise.
    """
    environ = os.environ if environ is None else environ
    device = torch.device(device)
    facts: dict[str, Any] = {
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "versions": package_versions(),
        "determinism": {name: environ[name] for name in DETERMINISM_VARIABLES if name in environ},
        "torch_flags": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mkldnn": torch.backends.mkldnn.enabled,
        },
        "nccl_algo": environ.get("NCCL_ALGO"),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["driver"] = _nvidia_driver()
        facts["versions"]["cuda"] = str(torch.version.cuda)
        facts["torch_flags"] |= {
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }
        if torch.distributed.is_available() and torch.cuda.nccl.is_available([torch.zeros(1, device=device)]):
            facts["versions"]["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    else:
        facts["device"] = processor()
        facts["torch_flags"]["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts
