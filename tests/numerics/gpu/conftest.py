"""Without a GPU the kernels run in Triton's interpreter: their logic is checked, not their bits."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # read when a kernel is decorated, that is, when its module is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from .interpreter import repair

    repair()
