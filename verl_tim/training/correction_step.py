"""One mini-batch's update in the worker: counts before the loop, the exact denominator after it.

verl runs the backward pass of each micro-batch at once (fsdp/transformer_impl.py:767), and what is kept may be known
only after the forward. So every micro-batch is divided by counts known beforehand, and the accumulated gradient is
multiplied once, before it is clipped, by what turns those counts into the final ones of all micro-batches and ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from verl_tim.correction import LossCounts, MetricSums, RolloutCorrectionConfig, correct, gradient_scale
from verl_tim.training.config import ConfigError
from verl_tim.training.correction_config import CORRECTION_KEY, is_plain, of_worker
from verl_tim.training.correction_loss import OLD_FORWARD_FIELD, MiniBatchLoss, response_fields
from verl_tim.training.correction_report import REPORT_METRIC, LossReport
from verl_tim.training.records import ROW_FIELD


def correction_of(loss_function: Callable, data: TensorDict) -> tuple[ActorConfig, RolloutCorrectionConfig] | None:
    """The config behind a loss that verl gave the engine; None where that loss is to be left alone.

    Left alone are losses other than verl's `ppo_loss` and workers whose trainer told them nothing.

    Raises:
        ConfigError: something is to be corrected and the trainer or the loss is not one that can do it.
    """
    if not isinstance(loss_function, functools.partial) or "config" not in loss_function.keywords:
        return None
    actor = loss_function.keywords["config"]
    if not isinstance(actor, ActorConfig):
        return None
    correction = of_worker(actor)
    if correction is None:
        return None
    if loss_function.func is ppo_loss and ROW_FIELD in data.keys():  # noqa: SIM118 (a TensorDict is no dict)
        return actor, correction
    if not is_plain(correction, actor.policy_loss.loss_mode):
        raise ConfigError(
            f"{CORRECTION_KEY} corrects something, and this trainer's loss ({loss_function.func.__name__}) does not go "
            "through verl_tim: use verl's synchronous V1 trainer or its legacy one, without distillation"
        )
    return None


class CorrectedUpdate:
    """The loss of one mini-batch, and what is to be done once all its micro-batches have run.

    Args:
        engine: verl's FSDP engine.
        data: this rank's mini-batch.
        forward: (data) -> verl's output of a forward without gradient; called only where the mean weight of the
            kept tokens cannot be known otherwise.
        number, fresh: see `LossReport`.
    """

    def __init__(
        self,
        engine: Any,
        data: TensorDict,
        actor: ActorConfig,
        correction: RolloutCorrectionConfig,
        *,
        forward: Callable[[TensorDict], Any],
        number: int,
        fresh: bool,
    ) -> None:
        self.engine, self.actor, self.correction, self.number, self.fresh = engine, actor, correction, number, fresh
        self.group = engine.get_data_parallel_group()
        self.device = get_device_id()  # where the micro-batches go; offloaded parameters are elsewhere
        self.kept_tokens: int | None = None
        fields = {name: field.to(self.device) for name, field in response_fields(data).items()}
        tokens, sequences = self._over_ranks(torch.stack(LossCounts.of(fields["response_mask"] != 0)))
        self.loss = MiniBatchLoss(
            actor,
            correction,
            provisional=LossCounts(tokens, sequences),
            dp_size=engine.get_data_parallel_size(),
            weight_mean=self._weight_mean(fields, data, forward),
            number=number,
            fresh=fresh,
        )

    def finish(self, output: dict[str, Any]) -> None:
        """Bring gradient and reported losses to the final counts, and put the mini-batch's report into the metrics.

        Args:
            output: what verl's `forward_backward_batch` returned; changed in place.
        """
        loss = self.loss
        assert loss.counts is not None
        assert loss.kept_tokens is not None
        assert loss.sums is not None
        tokens, sequences, kept = self._over_ranks(torch.stack([*loss.counts, loss.kept_tokens]))
        final = LossCounts(tokens, sequences)
        scale = float(gradient_scale(loss.provisional, final, loss.divisor_mode))
        self.kept_tokens = int(kept)
        if scale != 1.0:
            with torch.no_grad():
                for parameter in self.engine.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
        output["loss"] = [value * scale for value in output["loss"]]
        means = {
            name: numerator / final.divisor(loss.divisor_mode if name == "policy" else self.actor.loss_agg_mode)
            for name, numerator in loss.numerators.items()
        }
        overall = dict(zip(means, self._over_ranks(torch.stack(list(means.values()))).tolist(), strict=True))
        metrics = output["metrics"]
        for name, metric in (("policy", "actor/pg_loss"), ("entropy", "actor/entropy_loss"), ("kl", "kl_loss")):
            if name in overall:
                metrics[metric] = Metric(AggregationType.MEAN, overall[name])
        if "kl" in overall:
            metrics["kl_coef"] = [self.actor.kl_loss_coef]
        report = LossReport(self.number, self.fresh, self.kept_tokens, overall["policy"], _on_cpu(loss.sums))
        metrics[REPORT_METRIC] = [report]

    def _weight_mean(
        self, fields: dict[str, Tensor], data: TensorDict, forward: Callable[[TensorDict], Any]
    ) -> Tensor | None:
        """Mean truncated weight of the mini-batch's kept tokens (sequences) over all ranks, for batch normalisation.

        A token that only a later forward drops, because log p is not finite there, still counts in it.
        """
        correction = self.correction
        if not (correction.rollout_is_batch_normalize and correction.rollout_is is not None):
            return None
        log_prob = None
        if correction.mask_needs_forward or correction.mismatch_needs_forward:
            output = forward(data)
            log_prob = no_padding_2_padding(output["model_output"]["log_probs"].to(self.device), data)
        result = correct(
            correction,
            old_log_probs=None if correction.bypass_mode else fields["old_log_probs"],
            rollout_log_probs=fields.get("rollout_log_probs"),
            response_mask=fields["response_mask"],
            log_prob=log_prob,
            advantages=fields["advantages"],
            old_forward_log_probs=fields.get(OLD_FORWARD_FIELD) if correction.old_forward else None,
        )
        assert result.weight_sum is not None
        assert result.weight_count is not None
        total, count = self._over_ranks(torch.stack([result.weight_sum, result.weight_count]))
        return total / count.clamp(min=1)

    def _over_ranks(self, values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values, group=self.group)
        return values


def _on_cpu(sums: MetricSums) -> MetricSums:
    totals, maxima = sums.flatten()
    return sums.unflatten(totals.cpu(), maxima.cpu())
