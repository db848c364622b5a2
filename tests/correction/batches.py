"""Hypothesis strategies for settings and batches, and small helpers the tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from verl_tim.correction import RolloutCorrectionConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

_bands = st.sampled_from([[0.5, 2.0], [0.9, None], [None, 1.3], [0.97, 1.02], [1.05, 3.0]])  # the last excludes 1
_uppers = st.sampled_from([0.0007, 0.013, 0.11, 0.9, 4.3])
_k1_rules = ("token_k1", "seq_sum_k1", "seq_mean_k1")
_other_rules = (
    *(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")),
    "opsm",
    "token_kpop",
)
_rules = st.one_of(st.tuples(st.sampled_from(_k1_rules), _bands), st.tuples(st.sampled_from(_other_rules), _uppers))


@st.composite
def settings_maps(draw: st.DrawFn) -> dict[str, Any]:
    """A mapping that builds; every key is drawn, combinations that the config refuses are avoided by construction."""
    level = draw(st.sampled_from([None, "token", "sequence", "sequence_mean"]))
    rules = draw(st.lists(_rules, max_size=3, unique_by=lambda pair: pair[0]))
    out: dict[str, Any] = {
        "rollout_is": level,
        "rollout_is_threshold": draw(st.sampled_from([0.8, 1.05, 2.0, [0.5, 5.0], [0.95, 1.04], [0.8, None]])),
        "rollout_is_batch_normalize": draw(st.booleans()),
        "rollout_rs": [name for name, _ in rules] or None,
        "rollout_rs_threshold": [bound for _, bound in rules] or None,
        "rollout_rs_signal": draw(st.sampled_from(["r_corr", "r_ppo"])),
        "bypass_mode": draw(st.booleans()),
        "loss_type": draw(st.sampled_from(["ppo_clip", "reinforce"])),
        "denominator": draw(st.sampled_from(["kept", "all"])),
    }
    if out["rollout_rs_threshold"] is not None and len(rules) == 1:
        out["rollout_rs_threshold"] = [rules[0][1]]
    inside = level == "token" and not isinstance(out["rollout_is_threshold"], list)
    if inside and not out["bypass_mode"] and out["loss_type"] == "ppo_clip" and draw(st.booleans()):
        out |= {"rollout_is_in": "ratio", "rollout_is_batch_normalize": False}
    if out["bypass_mode"]:
        out["old_forward"] = draw(st.booleans())
    return out


@dataclasses.dataclass
class Batch:
    """float64 tensors (B, T); ``old_forward`` is used where the settings ask for it."""

    old: Tensor
    rollout: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    old_forward: Tensor

    def tensors(self, config: RolloutCorrectionConfig, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Keyword arguments for policy_loss, with a fresh leaf ``log_prob``."""
        out = {
            "log_prob": self.log_prob.detach().to(dtype).requires_grad_(True),
            "rollout_log_probs": self.rollout.to(dtype),
            "advantages": self.advantages.to(dtype),
            "response_mask": self.mask,
        }
        if not config.bypass_mode:
            out["old_log_probs"] = self.old.to(dtype)
        elif config.old_forward:
            out["old_forward_log_probs"] = self.old_forward.to(dtype)
        return out

    def map(self, function: Any) -> Batch:
        return Batch(**{f.name: function(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def lists(self, config: RolloutCorrectionConfig) -> dict[str, Any]:
        """Keyword arguments for the reference."""
        return {
            "old": self.old.tolist(),
            "rollout": self.rollout.tolist(),
            "mask": self.mask.int().tolist(),
            "log_prob": self.log_prob.tolist(),
            "advantages": self.advantages.tolist(),
            "old_forward": self.old_forward.tolist() if config.bypass_mode and config.old_forward else None,
        }


@st.composite
def batches(
    draw: st.DrawFn, *, max_rows: int = 5, max_width: int = 7, scale: float | None = None, holes: bool = True
) -> Batch:
    """Log-probs with mismatch and drift of a drawn size.

    With ``holes``: missing rollout values, non-finite trainer values, and garbage at masked positions.
    """
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = scale if scale is not None else draw(st.sampled_from([1e-3, 0.05, 0.5, 6.0, 40.0]))

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    rollout = -normal().abs() - 0.01
    old = rollout + size * normal()
    log_prob = old + draw(st.sampled_from([0.0, 0.01, 0.3])) * normal()
    old_forward = old + 0.01 * normal()
    advantages = normal() * draw(st.sampled_from([1.0, -1.0])) + draw(st.sampled_from([0.0, -1.0]))
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    batch = Batch(old, rollout, log_prob, advantages, mask, old_forward)
    if holes and draw(st.booleans()):
        garbage = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30], dtype=torch.float64)
        for name in ("old", "rollout", "log_prob", "advantages", "old_forward"):
            filling = garbage[torch.randint(4, (rows, width), generator=generator)]
            setattr(batch, name, torch.where(mask, getattr(batch, name), filling))
        for name, share in (("rollout", 0.2), ("old", 0.05), ("log_prob", 0.05)):
            hole = (torch.rand(rows, width, generator=generator) < share) & mask
            filling = garbage[torch.randint(3, (rows, width), generator=generator)]
            setattr(batch, name, torch.where(hole, filling, getattr(batch, name)))
    return batch


def tensor(*rows: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of numbers as a (B, T) tensor."""
    return torch.tensor(rows, dtype=dtype)
