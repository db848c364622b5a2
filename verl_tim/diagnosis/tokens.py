"""The valid response tokens of a batch, flattened: the one place where masks, missing values and precision are decided.

Every metric family reads a `ValidTokens`; whatever later merges over ranks (sums, maxima, quantile sketches) is built
from it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl_tim.correction.ratios import finite
from verl_tim.diagnosis.stats import places

FIELDS_2D = "(batch, response tokens)"
_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103


def as_mask(mask_BT: Tensor, name: str = "response_mask") -> Tensor:
    """(B, T) bool from a bool, int or float mask.

    Raises:
        ValueError: an entry other than 0 and 1 (a weight is not a mask).
    """
    if mask_BT.dtype == torch.bool:
        return mask_BT
    mask_bool_BT = mask_BT != 0
    if not bool(((mask_BT == 1) == mask_bool_BT).all()):
        raise ValueError(f"{name} must hold only 0 and 1, but has other values: pass the mask itself, not weights")
    return mask_bool_BT


def check_field(name: str, x: Tensor, shape: torch.Size, *, floating: bool) -> None:
    """Raise ValueError (TypeError for a non-tensor) unless `x` is dense, of `shape` and of the right kind of dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor: pad it to {FIELDS_2D} first and give a response_mask")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)} like old_log_probs {FIELDS_2D}")
    if floating and not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")
    if not floating and (x.dtype.is_floating_point or x.dtype.is_complex):
        raise ValueError(f"{name} must be an integer tensor, got {x.dtype}")


def finite_fp32(x: Tensor) -> Tensor:
    """Elementwise: finite when taken as fp32 (the width in which log-probs are recorded)."""
    if x.dtype == torch.float64:  # what rounds to fp32's infinity begins half a step behind fp32's largest
        return x.abs() < _ROUNDS_TO_INFINITY
    return finite(x)


def turn_numbers(mask_BT: Tensor) -> Tensor:
    """int64 (B, T), 1-based: the run of consecutive mask-1 tokens that holds the token, or the last one before it."""
    starts_BT = mask_BT.clone()
    starts_BT[:, 1:] &= ~mask_BT[:, :-1]
    return starts_BT.to(torch.int64).cumsum(1)


@dataclass(frozen=True)
class ValidTokens:
    """Tokens with mask 1 and both log-probs finite, in row-major order. N of them.

    Attributes:
        shape: (B, T) of the batch.
        mask_BT: (B, T) bool, the tokens with mask 1.
        valid_BT: (B, T) bool, the tokens below.
        index_N: int64, place of each of them in the flattened batch; None where they are all of it.
        missing: tokens with mask 1 that are not valid.
        old_N, rollout_N: float64 log-probs in nats; bf16, fp16 and fp32 inputs are up-cast, so their difference is
            exact or rounded once.
        delta_N: float64, d = log p_old - log q.
        exact_N: bool, fp32 bit patterns agree.
        length_B: int64, number of tokens with mask 1 of each row.
        count_B: int64, number of valid tokens of each row.
        row_N: int64 row of each token.
        rank_N: int64, 0-based place of the token among its row's tokens with mask 1.
        turns: how many turns the row with the most has, at least 1; those without a valid token count.
        turn_N: int64, 1-based: the run of consecutive mask-1 tokens that holds the token. Tool output and user turns
            inside a response are masked out, so each run is one turn of the model.
    """

    shape: torch.Size
    mask_BT: Tensor
    valid_BT: Tensor
    index_N: Tensor | None
    missing: int
    old_N: Tensor
    rollout_N: Tensor
    delta_N: Tensor
    exact_N: Tensor
    length_B: Tensor
    count_B: Tensor

    @classmethod
    def select(cls, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> ValidTokens:
        """Flatten a batch. Values at masked positions are never read into any statistic.

        Raises:
            ValueError: shapes, dtypes or mask values that do not fit; the message names the argument.
        """
        if not isinstance(old_log_probs, Tensor):
            raise TypeError(f"old_log_probs must be a torch.Tensor, got {type(old_log_probs).__name__}")
        if old_log_probs.is_nested or old_log_probs.dim() != 2:
            raise ValueError(f"old_log_probs must be a dense {FIELDS_2D} tensor, got {old_log_probs.dim()} dimensions")
        shape = old_log_probs.shape
        check_field("old_log_probs", old_log_probs, shape, floating=True)
        check_field("rollout_log_probs", rollout_log_probs, shape, floating=True)
        if not isinstance(response_mask, Tensor):
            raise TypeError(f"response_mask must be a torch.Tensor, got {type(response_mask).__name__}")
        if response_mask.shape != shape:
            raise ValueError(f"response_mask has shape {tuple(response_mask.shape)}, expected {tuple(shape)}")
        device = old_log_probs.device
        old_log_probs = old_log_probs.detach()
        rollout_log_probs = rollout_log_probs.detach().to(device)
        mask_BT = as_mask(response_mask.to(device))

        old_fp32_BT = old_log_probs.to(torch.float32)
        rollout_fp32_BT = rollout_log_probs.to(torch.float32)
        valid_BT = mask_BT & finite_fp32(old_fp32_BT) & finite_fp32(rollout_fp32_BT)
        length_B, count_B = mask_BT.sum(1), valid_BT.sum(1)
        tokens, count = int(length_B.sum()), int(count_B.sum())
        index_N = None if count == valid_BT.numel() else places(valid_BT.reshape(-1))

        def pick(x_BT: Tensor) -> Tensor:
            return _pick(x_BT, index_N)

        old_N = pick(old_log_probs).to(torch.float64)
        rollout_N = pick(rollout_log_probs).to(torch.float64)
        same_bits_BT = old_fp32_BT.view(torch.int32) == rollout_fp32_BT.view(torch.int32)
        return cls(
            shape=shape,
            mask_BT=mask_BT,
            valid_BT=valid_BT,
            index_N=index_N,
            missing=tokens - count,
            old_N=old_N,
            rollout_N=rollout_N,
            delta_N=old_N - rollout_N,
            exact_N=pick(same_bits_BT),
            length_B=length_B,
            count_B=count_B,
        )

    @cached_property
    def row_N(self) -> Tensor:
        rows_B = torch.arange(self.shape[0], device=self.valid_BT.device)
        return rows_B.repeat_interleave(self.count_B, output_size=self.count)

    @cached_property
    def rank_N(self) -> Tensor:
        return _pick(self.mask_BT.to(torch.int64).cumsum(1) - 1, self.index_N)

    @cached_property
    def turns(self) -> int:
        starts_B = (self.mask_BT[:, 1:] & ~self.mask_BT[:, :-1]).sum(1) + self.mask_BT[:, 0]
        return max(int(starts_B.max()), 1)

    @cached_property
    def turn_N(self) -> Tensor:
        return _pick(turn_numbers(self.mask_BT), self.index_N)

    @property
    def count(self) -> int:
        """N, the number of valid tokens."""
        return self.delta_N.numel()

    def gather(self, name: str, x_BT: Tensor, *, floating: bool) -> Tensor:
        """The valid tokens' entries of another (B, T) field, checked, on the batch's device: (N,)."""
        check_field(name, x_BT, self.shape, floating=floating)
        return _pick(x_BT.detach().to(self.valid_BT.device), self.index_N)


def _pick(x_BT: Tensor, index_N: Tensor | None) -> Tensor:
    return x_BT.reshape(-1) if index_N is None else x_BT.reshape(-1).index_select(0, index_N)
