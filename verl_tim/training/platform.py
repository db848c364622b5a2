"""The CPU as a verl platform, so that verl's trainer runs where there is no accelerator.

verl 0.9.1 knows cuda, npu and rocm and falls back to cuda when none is there. `CpuPlatform` is registered under
verl's official `PlatformRegistry`; it makes itself available only on a host without any accelerator, so a GPU run
never meets it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

from verl_tim.plugin import loaded
from verl_tim.training.accelerator import host_has_accelerator


def _cpu_device_module() -> types.ModuleType:
    """`torch.cpu` plus the memory calls that verl makes on `get_torch_device()` (engine_workers.py:219, 769, 814)."""
    module = types.ModuleType("verl_tim_cpu_device", "torch.cpu with the calls that verl expects of torch.cuda")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def no_bytes(*_args: Any, **_kwargs: Any) -> int:
        return 0

    def host_memory(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def device_name(*_args: Any, **_kwargs: Any) -> str:
        return "CPU"  # a key of verl's table of device FLOPS (utils/flops_counter.py)

    for name in (
        "empty_cache",
        "ipc_collect",
        "set_device",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    ):
        setattr(module, name, nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, no_bytes)
    module.__dict__.update(
        mem_get_info=host_memory,
        get_device_name=device_name,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        device_count=lambda: 1,
    )
    return module


class CpuPlatform(PlatformBase):
    """verl's device interface on a CPU: one device, gloo, no memory to release."""

    _device_module: types.ModuleType | None = None

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        if CpuPlatform._device_module is None:
            CpuPlatform._device_module = _cpu_device_module()
        return CpuPlatform._device_module

    def is_available(self) -> bool:
        return not host_has_accelerator()

    def current_device(self) -> Any:
        # verl passes this value to `Tensor.to` (fsdp/transformer_impl.py:730, 1028, 1552), where an index means CUDA.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # verl counts "GPU" (single_controller/ray/base.py:226); a CPU run declares them with ray_init.num_gpus.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


loaded(__name__)
