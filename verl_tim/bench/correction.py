"""The correction and the policy loss with it, against verl's own (verl 0.9.1, trainer/ppo/rollout_corr_helper.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_tim.bench.measure import Measured, measure
from verl_tim.correction import Band, RolloutCorrectionConfig, correct, policy_loss

PRESETS = ("none", "token_tis", "sequence_tis", "icepop", "seq_reject_corr_k3", "paper_tis_seq_k1", "bypass_reinforce")

# What is timed: the weights, mask and metrics alone, or these and the loss with its backward pass and metrics.
CORRECTION, LOSS = "correction", "loss"


@dataclass(frozen=True)
class Batch:
    """Tensors (B, T) as a step of training has them; log-probs float32, mask int64, advantages float32."""

    old_log_probs: Tensor
    rollout_log_probs: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor


@dataclass(frozen=True)
class Row:
    """One preset and one of CORRECTION, LOSS; `verl` is None where verl has no such correction."""

    preset: str
    part: str
    ours: Measured
    verl: Measured | None


def make_batch(rows: int, tokens: int, device: torch.device, *, seed: int = 0) -> Batch:
    """A batch with long-tailed lengths (median a quarter of the width, some cut at it) and a bf16 rollout's mismatch:
    normal with 0.01 nats, one token in a thousand at fifty times that."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = (tokens / 4 * (0.9 * normal(rows, 1)).exp()).clamp(1, tokens).long()
    mask = (torch.arange(tokens) < lengths).long()
    old = -normal(rows, tokens).abs()
    outlier = torch.rand(rows, tokens, generator=generator) < 1e-3
    mismatch = 0.01 * normal(rows, tokens) * torch.where(outlier, 50.0, 1.0)
    current = old + 0.01 * normal(rows, tokens)
    advantages = normal(rows, 1).expand(rows, tokens) * mask
    tensors = (old * mask, (old - mismatch) * mask, current * mask, advantages, mask)
    return Batch(*(tensor.to(device) for tensor in tensors))


def benchmark(
    presets: Iterable[str],
    batch: Batch,
    *,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Measure ours and verl's in turn, preset by preset.

    Raises:
        verl_tim.correction.ConfigError: an unknown preset, or one whose threshold has no default.
    """
    device = batch.response_mask.device
    for preset in presets:
        config = RolloutCorrectionConfig.from_mapping({"preset": preset})
        verl = _verl(config, batch)
        for part, ours in _ours(config, batch).items():
            functions = {"ours": ours} | ({"verl": verl[part]} if part in verl else {})
            measured = measure(functions, device, repeats=repeats, done=done)
            yield Row(preset, part, measured["ours"], measured.get("verl"))


def calls(presets: Iterable[str], *, repeats: int) -> int:
    """How often `benchmark` will call `done`."""
    configs = [RolloutCorrectionConfig.from_mapping({"preset": preset}) for preset in presets]
    return sum(2 * (1 if verl_arguments(config) is None else 2) * (repeats + 1) for config in configs)


def verl_arguments(config: RolloutCorrectionConfig) -> dict[str, Any] | None:
    """The same correction in verl's own keys; None where verl has none."""
    ours_only = (
        config.rollout_is_in != "loss",
        config.rollout_rs_signal != "r_corr",
        config.rollout_is == "sequence_mean",
        config.loss_type == "reinforce" and not config.bypass_mode,
        any(rule.estimator in ("opsm", "kpop") for rule in config.rules),
    )
    bounds = [_verl_bound(rule.bound) for rule in config.rules]
    threshold = _verl_bound(config.rollout_is_threshold)
    if any(ours_only) or None in (*bounds, threshold):
        return None
    return {
        "rollout_is": config.rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": config.rollout_is_batch_normalize,
        "rollout_rs": ",".join(rule.name for rule in config.rules) or None,
        "rollout_rs_threshold": ",".join(str(bound) for bound in bounds) or None,
    }


def _verl_bound(bound: float | Band | None) -> float | str | None:
    if not isinstance(bound, Band):
        return bound
    return None if None in bound else f"{bound.lower}_{bound.upper}"


def _ours(config: RolloutCorrectionConfig, batch: Batch) -> dict[str, Callable[[], object]]:
    old = None if config.bypass_mode else batch.old_log_probs
    inputs: dict[str, Any] = {
        "old_log_probs": old,
        "rollout_log_probs": batch.rollout_log_probs,
        "response_mask": batch.response_mask,
    }
    needs_forward = config.mask_needs_forward or config.mismatch_needs_forward
    forward = {"log_prob": batch.log_prob, "advantages": batch.advantages} if needs_forward else {}

    def correction() -> object:
        result = correct(config, **inputs, **forward)
        return result.weights, result.mask, result.metrics

    def loss() -> object:
        value, metrics = policy_loss(config, log_prob=_leaf(batch), advantages=batch.advantages, **inputs)
        value.backward()
        return value, metrics

    return {CORRECTION: correction, LOSS: loss}


def _verl(config: RolloutCorrectionConfig, batch: Batch) -> dict[str, Callable[[], object]]:
    arguments = verl_arguments(config)
    if arguments is None:
        return {}
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    bypass_loss: Any = get_policy_loss_fn("bypass_mode")
    vanilla_loss: Any = get_policy_loss_fn("vanilla")
    correction_keys: Any = {**arguments, "loss_type": config.loss_type, "bypass_mode": config.bypass_mode}
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(rollout_correction=correction_keys),
    )

    def corrected(old: Tensor) -> tuple[Any, Tensor, dict[str, float]]:
        with torch.no_grad():
            return compute_rollout_correction_and_rejection_mask(
                old_log_prob=old,
                rollout_log_prob=batch.rollout_log_probs,
                response_mask=batch.response_mask,
                **arguments,
            )

    def correction() -> object:
        return corrected(batch.log_prob if config.bypass_mode else batch.old_log_probs)

    def loss() -> object:
        given: dict[str, Any] = {"advantages": batch.advantages, "loss_agg_mode": "token-mean", "config": actor}
        log_prob = _leaf(batch)
        if config.bypass_mode:
            value, metrics = bypass_loss(
                old_log_prob=batch.rollout_log_probs, log_prob=log_prob, response_mask=batch.response_mask, **given
            )
        else:
            found, mask, metrics = corrected(batch.old_log_probs)
            value, of_loss = vanilla_loss(
                old_log_prob=batch.old_log_probs,
                log_prob=log_prob,
                response_mask=mask,
                rollout_is_weights=None if found is None else found.batch["rollout_is_weights"],
                **given,
            )
            metrics = {**metrics, **of_loss}
        value.backward()
        return value, metrics

    return {CORRECTION: correction, LOSS: loss}


def _leaf(batch: Batch) -> Tensor:
    return batch.log_prob.detach().requires_grad_(True)
