"""Where verl's training engine computes. Its parameters do not say: offloaded, they wait in the host's memory."""

from __future__ import annotations

import torch
from verl.utils.device import get_device_id, get_device_name


def compute_device() -> torch.device:
    """This process's device, as verl picks it (`FSDPEngine.to`, fsdp/transformer_impl.py:850, verl 0.9.1)."""
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
