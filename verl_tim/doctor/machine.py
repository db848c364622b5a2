"""The machine as the rules see it: a plain record, read once, so that rules can be tried on other machines too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import NamedTuple

from verl_tim.preflight.facts import free_disk


class Gpu(NamedTuple):
    """One GPU: its name, memory in bytes, and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


# Distributions whose versions some rule looks at.
PACKAGES = ("verl", "torch", "vllm", "transformers", "tensordict", "numpy", "ray", "flash-attn")


@dataclass(frozen=True)
class Machine:
    """What is installed and set on one machine.

    Attributes:
        gpus: visible NVIDIA GPUs.
        environment: environment variables of this process, which Ray's workers on this machine inherit.
        versions: distribution -> version; absent where it is not installed.
        modules: top-level modules that can be imported, of those that rules ask for.
        byte_code: whether Python finds what it imports compiled, by the example of verl's trainer.
        disk: free bytes wherever one looks; None looks.
    """

    gpus: tuple[Gpu, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    byte_code: bool = True
    disk: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """The machine this process runs on."""
        import torch

        gpus = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(properties.name, properties.total_memory, (properties.major, properties.minor)))
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        modules = frozenset(name for name in ("flash_attn", "vllm") if find_spec(name) is not None)
        return cls(tuple(gpus), dict(os.environ), versions, modules, _has_byte_code("verl"))

    def free_disk(self, folder: Path) -> int | str:
        """Bytes that are free where `folder` is, or would be made; text where that cannot be."""
        return free_disk(folder) if self.disk is None else self.disk


def _has_byte_code(package: str) -> bool:
    """Of a package whose source is there; one without source is nothing but byte code."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return True
    return Path(cache_from_source(spec.origin)).exists()
