"""verl's engine on one or two ranks with a batch that has everything in it, and the same mini-batch computed whole.

The batch: eight sequences of different lengths, one with a hole in its mask and one without any valid token; small and
large mismatches, a token the rollout recorded nothing for, old log-probs that the policy has drifted from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding, response_from_nested

from verl_tim.correction import RolloutCorrectionConfig, correct, policy_loss
from verl_tim.training.correction_config import of_mapping
from verl_tim.training.correction_loss import OLD_FORWARD_FIELD
from verl_tim.training.correction_report import REPORT_METRIC, LossReport, step_metrics
from verl_tim.training.in_process import InProcessTrainer
from verl_tim.training.records import ROW_FIELD, take

ROWS = 8
PROMPTS = (2, 5, 3, 4, 2, 3, 5, 2)
RESPONSES = (9, 3, 7, 5, 4, 8, 6, 3)
SCALE_FACTOR = 11
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}


@dataclass(frozen=True)
class Case:
    """One configuration of the worker's loss."""

    correction: Mapping[str, Any]
    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0

    @property
    def config(self) -> RolloutCorrectionConfig:
        return of_mapping(self.correction, self.loss_mode)

    def actor(self, micro_batch: int) -> FSDPActorConfig:
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=micro_batch,
            policy_loss=PolicyLossConfig(loss_mode=self.loss_mode, rollout_correction=dict(self.correction)),
            loss_agg_mode=self.loss_agg_mode,
            loss_scale_factor=SCALE_FACTOR if self.loss_agg_mode == "seq-mean-token-sum-norm" else None,
            entropy_coeff=self.entropy_coeff,
            use_kl_loss=self.kl_loss_coef != 0,
            kl_loss_coef=self.kl_loss_coef,
            **CLIP,
        )


@dataclass
class Outcome:
    """What one mini-batch came to."""

    gradient: Tensor
    loss: float
    metrics: dict[str, float]
    terms: dict[str, float] = field(default_factory=dict)


class Bench:
    """One rank.

    Args:
        folder: of the model.
        rank, ranks: in the default process group, which must be there.
        layout: "nested" as the V1 trainer sends its batch, "dense" as the legacy one does.
    """

    def __init__(self, folder: str, *, rank: int = 0, ranks: int = 1, layout: str = "nested", lr: float = 1e-3) -> None:
        self.trainer = InProcessTrainer(folder, dtype="float32", numerics="contract", lr=lr)
        self.engine = self.trainer.engine
        self.layout = layout
        self.ranks = ranks
        self.local = list(range(rank * ROWS // ranks, (rank + 1) * ROWS // ranks))
        self.fields = self._make_fields()

    # ----------------------------------------------------------------------------------------------------- the batch

    def _make_fields(self) -> dict[str, list[Tensor]]:
        """name -> one tensor per row."""
        draw = torch.Generator().manual_seed(3)

        def noise(size: float) -> list[Tensor]:
            return [size * torch.randn(length, generator=draw) for length in RESPONSES]

        fields: dict[str, list[Tensor]] = {
            "prompts": [torch.randint(3, 99, (length,), generator=draw) for length in PROMPTS],
            "responses": [torch.randint(3, 99, (length,), generator=draw) for length in RESPONSES],
            "response_mask": [torch.ones(length, dtype=torch.int64) for length in RESPONSES],
        }
        fields["response_mask"][2][2:4] = 0
        fields["response_mask"][7][:] = 0
        self.fields = fields
        current = self.current_log_probs()
        old = [value + drift for value, drift in zip(current, noise(0.15), strict=True)]
        rollout = [value + gap for value, gap in zip(old, noise(0.25), strict=True)]
        for row in (1, 4):  # rows whose mean mismatch is within 0.001, on either ratio
            old[row] = current[row] + 2e-4 * torch.randn(RESPONSES[row], generator=draw)
            rollout[row] = old[row] + 2e-4 * torch.randn(RESPONSES[row], generator=draw)
        rollout[0][3] = old[0][3] - 2.2  # exp(d) = 9: truncated, banded, rejected
        rollout[5][1] = old[5][1] + 1.4  # exp(d) = 0.25
        rollout[4][2] = float("nan")
        fields |= {
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            OLD_FORWARD_FIELD: [value + 0.01 * drift for value, drift in zip(current, noise(1.0), strict=True)],
            "ref_log_prob": [value + gap for value, gap in zip(current, noise(0.3), strict=True)],
            "advantages": noise(1.0),
        }
        fields["advantages"][6] -= 1.5  # a sequence for opsm
        return fields

    def current_log_probs(self) -> list[Tensor]:
        data = self.data(list(range(ROWS)), ROWS)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)
        return [row.clone() for row in response_from_nested(output["model_output"]["log_probs"], self._mask()).unbind()]

    def _mask(self) -> Tensor:
        return torch.nested.as_nested_tensor(self.fields["response_mask"], layout=torch.jagged)

    def padded(self, name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(self.fields[name], batch_first=True)

    def data(self, rows: list[int], micro_batch: int, **replaced: list[Tensor]) -> Any:
        meta = {
            "temperature": 1.0,
            "use_remove_padding": True,
            "use_fused_kernels": True,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": micro_batch,
            "pad_token_id": 0,
            "global_batch_size": ROWS,
            "calculate_entropy": True,
        }
        fields = {name: [values[row] for row in rows] for name, values in {**self.fields, **replaced}.items()}
        numbers = torch.tensor(rows).unsqueeze(1)
        if self.layout == "dense":
            return self._dense(fields, numbers, meta)

        def nested(values: list[Tensor]) -> Tensor:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)

        tokens = [torch.cat(pair) for pair in zip(fields["prompts"], fields["responses"], strict=True)]
        tensors = {name: nested(values) for name, values in fields.items()}
        tensors |= {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(row)) for row in tokens]),
            "loss_mask": nested(fields["response_mask"]),
            ROW_FIELD: numbers,
        }
        return tu.get_tensordict(tensors, meta)

    @staticmethod
    def _dense(fields: dict[str, list[Tensor]], numbers: Tensor, meta: dict[str, Any]) -> Any:
        def right(values: list[Tensor], width: int) -> Tensor:
            return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in values])

        def left(values: list[Tensor], width: int) -> Tensor:
            return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in values])

        widest, longest = max(PROMPTS), max(RESPONSES)
        tensors = {name: right(values, longest) for name, values in fields.items() if name != "prompts"}
        tensors["prompts"] = left(fields["prompts"], widest)
        ones = [[torch.ones_like(row) for row in fields[name]] for name in ("prompts", "responses")]
        attention = torch.cat([left(ones[0], widest), right(ones[1], longest)], dim=1)
        tensors |= {
            "input_ids": torch.cat([tensors["prompts"], tensors["responses"]], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            ROW_FIELD: numbers,
        }
        return left_right_2_no_padding(tu.get_tensordict(tensors, meta))

    # ---------------------------------------------------------------------------------------------------- two answers

    def worker(self, case: Case, micro_batch: int, **replaced: list[Tensor]) -> Outcome:
        """The gradient as verl's worker accumulates it from this rank's rows, before clipping."""
        data = self.data(self.local, micro_batch, **replaced)
        output = self._backward(data, partial(ppo_loss, config=case.actor(micro_batch)))
        metrics = output["metrics"]
        reports: list[LossReport] = take(metrics, REPORT_METRIC)
        everywhere: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(everywhere, (reports, output["loss"]))
        loss = sum(sum(losses) for _, losses in everywhere) / self.ranks
        named = {
            name: metrics[name].aggregate()
            for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss")
            if name in metrics
        }
        merged = step_metrics([report for reports, _ in everywhere for report in reports], case.config)
        return Outcome(self.gradient(), loss, merged, named)

    def whole(self, case: Case, **replaced: list[Tensor]) -> Outcome:
        """The same from one forward of all rows, with `policy_loss` and sums written out."""
        terms: dict[str, float] = {}
        metrics: dict[str, float] = {}

        def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
            config = case.config
            padded = data.select(
                *(name for name in data.keys() if name in self.fields and name not in ("prompts", "responses"))  # noqa: SIM118
            ).to_padded_tensor()
            log_prob = no_padding_2_padding(model_output["log_probs"], data)
            inputs = {
                "log_prob": log_prob,
                "old_log_probs": None if config.bypass_mode else padded["old_log_probs"],
                "rollout_log_probs": padded["rollout_log_probs"],
                "advantages": padded["advantages"],
                "response_mask": padded["response_mask"],
                "old_forward_log_probs": padded[OLD_FORWARD_FIELD] if config.old_forward else None,
            }
            value, found = policy_loss(
                config, **inputs, **CLIP, loss_agg_mode=case.loss_agg_mode, loss_scale_factor=SCALE_FACTOR
            )
            metrics.update(found)
            terms["actor/pg_loss"] = value.item()
            result = correct(config, **inputs)
            counted = result.mask if config.denominator == "kept" else result.usable
            entropy = aggregate(no_padding_2_padding(model_output["entropy"], data), result.mask, counted, case)
            terms["actor/entropy_loss"] = entropy.item()
            value = value - case.entropy_coeff * entropy
            if case.kl_loss_coef:
                gap = padded["ref_log_prob"] - log_prob
                kl = aggregate((gap.exp() - gap - 1).clamp(-10, 10), result.mask, counted, case)
                terms["kl_loss"] = kl.item()
                value = value + case.kl_loss_coef * kl
            return value, {}

        output = self._backward(self.data(list(range(ROWS)), ROWS, **replaced), loss)
        return Outcome(self.gradient(), output["loss"][0], metrics, terms)

    def _backward(self, data: Any, loss: Callable) -> dict[str, Any]:
        self.engine.get_per_tensor_param()  # as if the rollout were given these weights: log p is p_old
        self.engine.optimizer_zero_grad()
        with self.engine.train_mode(zero_grad_on_exit=False):
            return self.engine.forward_backward_batch(data, loss)

    def gradient(self) -> Tensor:
        """All gradients in one vector, fp64."""
        parts = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        return torch.cat([getattr(part, "full_tensor", lambda part=part: part)().flatten().double() for part in parts])

    def parameters(self) -> Tensor:
        parts = [parameter.detach() for parameter in self.engine.module.parameters()]
        return torch.cat([getattr(part, "full_tensor", lambda part=part: part)().flatten() for part in parts]).clone()


def aggregate(values: Tensor, mask: Tensor, counted: Tensor, case: Case) -> Tensor:
    """docs/correction.md, "Loss and denominators", once more."""
    kept = torch.where(mask, values, 0.0)
    sequences = counted.any(dim=1).sum().clamp(min=1)
    if case.loss_agg_mode == "token-mean":
        return kept.sum() / counted.sum().clamp(min=1)
    if case.loss_agg_mode == "seq-mean-token-mean":
        return (kept.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).sum() / sequences
    if case.loss_agg_mode == "seq-mean-token-sum":
        return kept.sum() / sequences
    return kept.sum() / SCALE_FACTOR / sequences
