"""Token embedding: a row look-up, exact by nature. Kept as an op so that the trainer's table is complete."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embedding(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of `weight_VD` [V, D] for int64 token ids [T]; differentiable in the weight (deterministic on CPU)."""
    return F.embedding(token_T, weight_VD)


def embedding_reference(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Slow: one token at a time."""
    return weight_VD.new_tensor([weight_VD[token].tolist() for token in token_T.tolist()])
