"""The batch's tokens, checked, up-cast and sorted into valid, usable and known."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from .config import RolloutCorrectionConfig
from .ratios import bounded_exp, compute_dtype, finite, log_ratio

NO_ROLLOUT_LOG_PROBS = (
    "rollout_log_probs is absent, and the correction needs it: set "
    "actor_rollout_ref.rollout.calculate_log_probs=true so that the rollout engine records it"
)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What every later step reads; all tensors (B, T), log-probs in fp32 or fp64 and 0 where they may not be read.

    Attributes:
        valid: the response mask as bool.
        usable: valid, with every trainer log-prob finite; the others leave loss and denominators.
        known: usable, with a finite rollout log-prob; statistics cover these. The rest of ``usable`` is *missing*.
        observed: ``known``, or ``usable`` when there are no rollout log-probs at all: for statistics without q.
        trainer: log p_old, without gradient; under bypass that of the forward given.
        rollout: log q.
        delta: d = log p_old - log q, 0 where not known.
        current: log p with gradient, or None.
        previous: what PPO's ratio is taken over: log p_old under recomputation, log q under bypass, where a missing
            token takes the detached log p itself, so that its ratio is 1 and has a gradient. None without ``current``.
        advantages: 0 where not usable, or None.
        missing: valid tokens without a finite rollout log-prob.
    """

    valid: Tensor
    usable: Tensor
    known: Tensor
    observed: Tensor
    missing: Tensor
    trainer: Tensor
    rollout: Tensor
    delta: Tensor
    current: Tensor | None
    previous: Tensor | None
    advantages: Tensor | None

    @functools.cached_property
    def valid_in_row(self) -> Tensor:
        """(B,) int64 count of valid tokens."""
        return self.valid.sum(dim=-1)

    @functools.cached_property
    def known_in_row(self) -> Tensor:
        """(B,) int64 count of known tokens."""
        return self.known.sum(dim=-1)

    @functools.cached_property
    def known_factor(self) -> Tensor:
        """``known`` as 0 and 1 in the precision of ``delta``: multiplying by it needs no conversion."""
        return self.known.to(self.delta.dtype)

    @functools.cached_property
    def ratio(self) -> Tensor:
        """exp(d), clamped: what the token weights and chi-square are made of; 1 where not known."""
        return bounded_exp(self.delta)

    @functools.cached_property
    def ppo_log_ratio(self) -> Tensor | None:
        """Detached log of the ratio in the loss, 0 where not observed."""
        if self.current is None or self.previous is None:
            return None
        where = self.known_factor if self.observed is self.known else self.observed
        return log_ratio(self.current.detach(), self.previous, where)


def prepare_tokens(
    config: RolloutCorrectionConfig,
    *,
    response_mask: Tensor,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    log_prob: Tensor | None,
    advantages: Tensor | None,
    old_forward_log_probs: Tensor | None,
) -> Tokens:
    """Check the inputs and build :class:`Tokens`. Nothing is changed in place and nothing waits for the device.

    Raises:
        ValueError: a tensor that this configuration needs is absent, or a shape differs from the mask's.
    """
    _require(config, old_log_probs, rollout_log_probs, log_prob, advantages, old_forward_log_probs)
    _check_shapes(
        response_mask,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        log_prob=log_prob,
        advantages=advantages,
        old_forward_log_probs=old_forward_log_probs,
    )
    dtype = compute_dtype(old_log_probs, rollout_log_probs, log_prob, old_forward_log_probs)
    with torch.no_grad():
        valid = response_mask if response_mask.dtype == torch.bool else response_mask != 0
        current = log_prob.detach() if log_prob is not None else None
        if not config.bypass_mode:
            trainer = old_log_probs
        else:
            trainer = current if old_forward_log_probs is None else old_forward_log_probs
        assert trainer is not None  # _require saw to it
        usable = valid & finite(trainer)
        if current is not None and current is not trainer:
            usable = usable & finite(current)
        zero = torch.zeros((), dtype=dtype, device=response_mask.device)
        trainer = torch.where(usable, trainer.detach().to(dtype), zero)
        if rollout_log_probs is None:
            known, missing, rollout = torch.zeros_like(valid), torch.zeros_like(valid), zero.expand_as(valid)
        else:
            recorded = finite(rollout_log_probs)
            known, missing = usable & recorded, valid & ~recorded
            rollout = torch.where(known, rollout_log_probs.detach().to(dtype), zero)
        delta = log_ratio(trainer, rollout, known)
    safe_current = torch.where(usable, log_prob.to(dtype), zero) if log_prob is not None else None
    previous = None
    if safe_current is not None:
        previous = torch.where(known, rollout, safe_current.detach()) if config.bypass_mode else trainer
    return Tokens(
        valid=valid,
        usable=usable,
        known=known,
        observed=usable if rollout_log_probs is None else known,
        missing=missing,
        trainer=trainer,
        rollout=rollout,
        delta=delta,
        current=safe_current,
        previous=previous,
        advantages=None if advantages is None else torch.where(usable, advantages.detach().to(dtype), zero),
    )


def _require(
    config: RolloutCorrectionConfig,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    log_prob: Tensor | None,
    advantages: Tensor | None,
    old_forward_log_probs: Tensor | None,
) -> None:
    if config.enabled and rollout_log_probs is None:
        raise ValueError(NO_ROLLOUT_LOG_PROBS)
    if not config.bypass_mode and old_log_probs is None:
        raise ValueError("old_log_probs is absent: under recomputation it holds the trainer's log-probs of the batch")
    if not config.bypass_mode and old_forward_log_probs is not None:
        raise ValueError("old_forward_log_probs belongs to bypass mode; under recomputation pass old_log_probs")
    if config.bypass_mode and log_prob is None and old_forward_log_probs is None:
        raise ValueError("log_prob is absent: under bypass_mode the mismatch is taken from it")
    for rule in config.rules:
        opsm = rule.estimator == "opsm"
        if log_prob is None and (opsm or config.rollout_rs_signal == "r_ppo"):
            reads = "the rule opsm" if opsm else "rollout_rs_signal=r_ppo"
            raise ValueError(f"log_prob is absent: {reads} looks at the current policy's log-probs")
        if advantages is None and opsm:
            raise ValueError("advantages is absent: the rule opsm looks at each sequence's mean advantage")


def _check_shapes(response_mask: Tensor, **tensors: Tensor | None) -> None:
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask must be (batch, tokens), not {tuple(response_mask.shape)}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != response_mask.shape:
            shapes = f"{name} has shape {tuple(tensor.shape)}, response_mask {tuple(response_mask.shape)}"
            raise ValueError(f"{shapes}; they must be equal")
