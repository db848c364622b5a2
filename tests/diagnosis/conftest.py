"""Settings of these tests."""

import torch

# Tiny tensors: threads only cost here, and much where other work keeps the cores busy.
torch.set_num_threads(1)
