"""GPUs that a plan can be made for: memory, bandwidth and arithmetic, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import closest

GIB = float(1 << 30)


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as `--gpu` takes it.
        memory: bytes that PyTorch can see of it (`total_memory`), which is less than its name says; rounded down.
        bandwidth: bytes per second of its memory, specified.
        bf16: FLOP/s of dense bf16 products with float32 accumulation, specified.
        link: bytes per second to other GPUs of its node, one direction, specified.
        source: of the figures.
    """

    name: str
    memory: int
    bandwidth: float
    bf16: float
    link: float
    source: str


def _gpu(name: str, gib: float, terabytes: float, teraflops: float, link: float, source: str) -> Gpu:
    return Gpu(name, int(gib * GIB), terabytes * 1e12, teraflops * 1e12, link * 1e9, source)


# Memory: what torch.cuda.get_device_properties reports on such machines (its out-of-memory errors quote it).
# bf16: without sparsity; verl's own table has the same (0.9.1, utils/flops_counter.py:23).
_TABLE = (
    _gpu("H200 141GB", 139.7, 4.8, 989, 450, "NVIDIA H200 data sheet, SXM"),
    _gpu("H100 80GB", 79.1, 3.35, 989, 450, "NVIDIA H100 data sheet, SXM"),
    _gpu("A100 80GB", 79.1, 2.039, 312, 300, "NVIDIA A100 data sheet, SXM 80 GB"),
    _gpu("A100 40GB", 39.3, 1.555, 312, 300, "NVIDIA A100 data sheet, SXM 40 GB"),
    _gpu("L40S 48GB", 44.4, 0.864, 362, 32, "NVIDIA L40S data sheet; no NVLink, PCIe 4 x16"),
    _gpu("B200 180GB", 178.3, 8.0, 2250, 900, "NVIDIA B200 data sheet, HGX"),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}
DEFAULT_GPU = "H200 141GB"


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`: its name in the table, or the first word of it where that names one alone (H100, L40S).

    Raises:
        LaunchError: unknown, or one of several memory sizes.
    """
    wanted = name.strip().upper().replace("-", " ").removeprefix("NVIDIA ")
    exact = [gpu for gpu in _TABLE if gpu.name.upper() == wanted]
    found = exact or [gpu for gpu in _TABLE if gpu.name.upper().split()[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise LaunchError.of(
            "--gpu", f"{name!r} is several", "say which: " + ", ".join(repr(gpu.name) for gpu in found)
        )
    raise LaunchError.of("--gpu", f"{name!r} is unknown", closest(name, list(GPUS)) + "known: " + ", ".join(GPUS))
