"""What the benchmarks of this folder share: the device that was asked for, the machine, and how figures are written."""

from __future__ import annotations

import time
from typing import Any

_MIB = 2**20


def chosen_device(name: str) -> Any:
    """The device of --device; LaunchError for an unknown one, or one that is not here."""
    import torch

    from verl_tim.launch.errors import LaunchError

    if name not in ("cpu", "cuda"):
        raise LaunchError.of("--device", f"{name!r} is not known", "give cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LaunchError.of("--device", "PyTorch sees no CUDA device here", "give --device cpu")
    return torch.device(name)


def machine_of(device: Any) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    import os

    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # above the number of threads: other work ran beside, and times are upper bounds
        "load": round(os.getloadavg()[0], 2),
    }


def duration(seconds: float) -> str:
    """Seconds or milliseconds, three digits."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def mebibytes(count: int | None) -> str:
    """Bytes as MiB; None, where the system does not tell, as "unknown"."""
    return "unknown" if count is None else f"{count / _MIB:,.0f}"
