"""Whether this host has an accelerator; apart from `platform`, so that asking does not import verl."""

from __future__ import annotations

import os

import torch

# A Ray actor without GPUs sees no CUDA device on a GPU host: the host's device files tell the two cases apart.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/davinci_manager")


def host_has_accelerator() -> bool:
    """True if this process or this host has an NVIDIA, AMD or Ascend accelerator."""
    return torch.cuda.is_available() or any(os.path.exists(path) for path in _DEVICE_FILES)
