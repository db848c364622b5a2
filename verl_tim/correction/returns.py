"""Discounted returns over trainable tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G at each valid token: its reward plus gamma times G of the row's next *valid* token; 0 where the mask is 0.

    One factor gamma per trainable token: masked spans (tool output, padding) neither discount nor contribute, so no
    reward or KL penalty that stands at a masked position can change any return. Time is linear in the tokens: rows are
    compacted, then solved block by block.

    Args:
        rewards: (B, T) per-token rewards, any dtype; anything may stand at masked positions.
        mask: (B, T) non-zero at trainable tokens.
        gamma: in [0, 1].

    Returns:
        (B, T) in fp32 or better.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma!r} must lie in [0, 1]")
    valid = mask != 0
    r = torch.where(valid, rewards, rewards.new_zeros(())).to(torch.promote_types(rewards.dtype, torch.float32))
    rows, width = r.shape
    if r.numel() == 0:
        return r
    # A token's rank among its row's valid tokens; masked ones go to a spare slot behind all of them, with reward 0.
    order = torch.where(valid, valid.cumsum(dim=-1) - 1, width)
    padded = -(-(width + 1) // _BLOCK) * _BLOCK
    compact = r.new_zeros(rows, padded).scatter_add_(1, order, r)

    step = torch.arange(_BLOCK, device=r.device)
    distance = step.unsqueeze(0) - step.unsqueeze(1)  # [from, to]
    powers = torch.pow(torch.full((), gamma, dtype=torch.float64, device=r.device), distance.clamp(min=0).double())
    decay = torch.where(distance >= 0, powers, 0.0).to(r.dtype)
    blocks = compact.view(rows, -1, _BLOCK)
    inside = torch.matmul(blocks, decay.T)  # each token's return from its own block's rewards
    to_next = torch.pow(torch.full_like(step, gamma, dtype=torch.float64), (_BLOCK - step).double()).to(r.dtype)
    carry = r.new_zeros(rows, 1)
    solved = []
    for i in range(blocks.shape[1] - 1, -1, -1):
        block = inside[:, i] + carry * to_next
        solved.append(block)
        carry = block[:, :1]
    compact_returns = torch.cat(solved[::-1], dim=-1)
    return torch.where(valid, compact_returns.gather(1, order), r.new_zeros(()))
