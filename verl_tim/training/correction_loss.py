"""The worker's loss: policy, entropy and KL terms of a micro-batch over one mask and one divisor.

It replaces verl's `ppo_loss` (workers/utils/losses.py), which counts its denominators before anything is rejected and
hands a policy loss neither the rollout's log-probs nor anything else the correction needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig
from verl.workers.utils.padding import no_padding_2_padding

from verl_tim.correction import (
    LossCounts,
    MetricSums,
    PolicyTerms,
    RolloutCorrectionConfig,
    external_terms,
    policy_terms,
)
from verl_tim.training.config import ConfigError
from verl_tim.training.correction_config import OWN_LOSS_MODES, SCALE_FACTOR_KEY, SEQUENCE_LOSS_MODES, clip_range
from verl_tim.training.records import RECORD_METRIC, record

# The trainer's log-probs of the extra forward that `old_forward` asks for; the trainer writes it before the update.
OLD_FORWARD_FIELD = "tim_old_forward_log_probs"

_FIELDS = (
    *("response_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_prob"),
    OLD_FORWARD_FIELD,
)


def response_fields(data: TensorDict) -> dict[str, Tensor]:
    """The fields that a loss reads, (B, T) each: nested in V1, padded here to the longest response; dense in legacy."""
    present = [name for name in _FIELDS if name in data.keys()]  # noqa: SIM118 (a TensorDict is no dict)
    padded = data.select(*present).to_padded_tensor()
    return {name: padded[name] for name in present}


class MiniBatchLoss:
    """Called by verl once per micro-batch of one mini-batch, in place of its own loss; remembers what it has seen.

    Args:
        actor: the worker's config.
        correction: the settings.
        provisional: counts that stand below every micro-batch's sum until the final ones are known.
        dp_size: ranks whose gradients FSDP averages.
        weight_mean: what batch normalisation divides by, or None.
        number, fresh: see `verl_tim.training.records.LossRecord`.

    Attributes:
        numerators: name -> fp64 sum so far on this rank, of the policy, entropy and KL terms.
        counts, kept_tokens, sums: of the micro-batches so far on this rank; None before the first.
    """

    def __init__(
        self,
        actor: ActorConfig,
        correction: RolloutCorrectionConfig,
        *,
        provisional: LossCounts,
        dp_size: int,
        weight_mean: Tensor | None,
        number: int,
        fresh: bool,
    ) -> None:
        self.actor, self.correction = actor, correction
        self.provisional, self.dp_size, self.weight_mean = provisional, dp_size, weight_mean
        self.number, self.fresh = number, fresh
        self.loss_mode = str(actor.policy_loss.loss_mode)
        self.divisor_mode = "seq-mean-token-mean" if self.loss_mode in SEQUENCE_LOSS_MODES else actor.loss_agg_mode
        if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
            raise ConfigError(
                f"{SCALE_FACTOR_KEY} is null in the worker, where each micro-batch has a width of its own: the trainer "
                "sets it to data.max_response_length; set it to a number"
            )
        self.numerators: dict[str, Tensor] = {}
        self.counts: LossCounts | None = None
        self.kept_tokens: Tensor | None = None
        self.sums: MetricSums | None = None

    def __call__(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        # verl calls its loss under autocast; everything here is in fp32 or better
        with torch.autocast(log_prob.device.type, enabled=False):
            fields = response_fields(data)
            terms = self._policy_terms(log_prob, fields)
            objective = terms.numerator
            self._add("policy", terms.numerator)
            if model_output.get("entropy") is not None:
                entropy = terms.numerator_of(no_padding_2_padding(model_output["entropy"], data).float())
                self._add("entropy", entropy)
                if self.actor.entropy_coeff != 0:
                    objective = objective - self.actor.entropy_coeff * entropy
            if self.actor.use_kl_loss:
                kl = terms.numerator_of(self._kl(log_prob, fields["ref_log_prob"], terms.correction.mask))
                self._add("kl", kl)
                objective = objective + self.actor.kl_loss_coef * kl
            loss = objective / self.provisional.divisor(self.divisor_mode).to(objective.dtype) * self.dp_size
        self._remember(terms)
        seen = record(log_prob, terms.correction.mask, data, number=self.number, fresh=self.fresh)
        return loss, {RECORD_METRIC: seen}

    def _policy_terms(self, log_prob: Tensor, fields: Mapping[str, Tensor]) -> PolicyTerms:
        actor = self.actor
        inputs: dict[str, Any] = {
            "log_prob": log_prob,
            "advantages": fields["advantages"],
            "response_mask": fields["response_mask"],
            "old_log_probs": None if self.correction.bypass_mode else fields["old_log_probs"],
            "rollout_log_probs": fields.get("rollout_log_probs"),
            "old_forward_log_probs": self._old_forward(fields),
            "weight_mean": self.weight_mean,
            "loss_agg_mode": actor.loss_agg_mode,
            "loss_scale_factor": actor.loss_scale_factor,
        }
        if self.loss_mode in OWN_LOSS_MODES:
            low, high = clip_range(actor)
            return policy_terms(
                self.correction, **inputs, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=actor.clip_ratio_c
            )
        return external_terms(self.correction, self._of_verl, **inputs)

    def _of_verl(
        self, *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """verl's policy loss of this mode as a sum: its aggregation divides by what is written here as 1."""
        self.actor.global_batch_info.update(
            dp_size=1, batch_num_tokens=1, global_batch_size=1, loss_scale_factor=self.actor.loss_scale_factor
        )
        loss, metrics = get_policy_loss_fn(self.loss_mode)(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=self.actor.loss_agg_mode,
            config=self.actor,
            rollout_is_weights=weights,
        )
        if self.loss_mode == "geo_mean":
            loss = loss * mask.shape[0]  # verl takes the mean over the micro-batch's rows
        return loss, metrics

    def _old_forward(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        if not self.correction.old_forward:
            return None
        if OLD_FORWARD_FIELD not in fields:
            raise ConfigError(
                "algorithm.rollout_correction.old_forward=true, and the trainer sent no log-probs of that forward: use "
                "verl's synchronous V1 trainer or its legacy one, which verl_tim extends"
            )
        return fields[OLD_FORWARD_FIELD]

    def _kl(self, log_prob: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        zero = log_prob.new_zeros((), dtype=torch.float32)
        return kl_penalty(
            logprob=torch.where(mask, log_prob.float(), zero),  # type: ignore[arg-type]
            ref_logprob=torch.where(mask, reference.float(), zero),  # type: ignore[arg-type]
            kl_penalty=self.actor.kl_loss_type,
        )

    def _add(self, name: str, numerator: Tensor) -> None:
        value = numerator.detach().double()
        self.numerators[name] = self.numerators[name] + value if name in self.numerators else value

    def _remember(self, terms: PolicyTerms) -> None:
        kept = terms.correction.mask.sum()
        if self.counts is None or self.sums is None or self.kept_tokens is None:
            self.counts, self.kept_tokens, self.sums = terms.counts, kept, terms.correction.sums
        else:
            self.counts = self.counts.merge(terms.counts)
            self.kept_tokens = self.kept_tokens + kept
            self.sums = self.sums + terms.correction.sums
