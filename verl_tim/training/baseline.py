"""`baseline_scope: kept`: advantages whose group statistics leave out the rows of which nothing was kept.

verl's estimators are run a second time on the rows that count, as they are: group means, leave-one-out means, lengths
and whitening all follow. A row that does not count keeps the advantage it had; it is not in the loss. A group of which
one row is left is to verl a group of one, whose baseline is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.protocol import DataProto

from verl_tim.correction import RolloutCorrectionConfig, baseline_mask, correct
from verl_tim.training.correction_config import WHITENED


def counted_rows(correction: RolloutCorrectionConfig, data: DataProto) -> Tensor:
    """(B,) bool: rows that count in their group's baseline, from the whole batch's old and rollout log-probs."""
    mask_BT = data.batch["response_mask"]
    result = correct(
        correction,
        old_log_probs=data.batch["old_log_probs"],
        rollout_log_probs=data.batch.get("rollout_log_probs", None),
        response_mask=mask_BT,
    )
    return baseline_mask(result, mask_BT, correction.baseline_scope).any(dim=-1)


def whole_sessions(counted_B: Tensor, keys: Sequence[str]) -> Tensor:
    """Rows whose session ("{uid}_{session}_{output}") has a row that counts.

    verl's V1 trainer takes a GRPO session's reward from its last output, so the session counts as one.
    """
    sessions = [key.rsplit("_", 1)[0] for key in keys]
    counted = {session for session, counts in zip(sessions, counted_B.tolist(), strict=True) if counts}
    return torch.tensor([session in counted for session in sessions])


def take_kept_baseline(
    data: DataProto, counted_B: Tensor, estimator: Any, compute: Callable[[DataProto, list[int]], DataProto]
) -> None:
    """Replace `advantages` and `returns` of the rows that count by those computed among them alone.

    Args:
        data: with `advantages` and `returns` over all rows; changed in place.
        estimator: verl's `algorithm.adv_estimator`.
        compute: (rows of data, their numbers) -> the same with advantages and returns, by verl's estimator.
    """
    rows = counted_B.nonzero().squeeze(1).tolist()
    if not rows or len(rows) == len(counted_B):
        return
    advantages, returns = data.batch["advantages"].clone(), data.batch["returns"].clone()
    if _name(estimator) in WHITENED and int(data.batch["response_mask"][rows].sum()) < 2:
        advantages[rows] = 0  # one value shifted to mean 0
    else:
        part = compute(data.select_idxs(rows), rows)
        advantages[rows] = part.batch["advantages"].to(advantages.dtype)
        returns[rows] = part.batch["returns"].to(returns.dtype)
    data.batch["advantages"], data.batch["returns"] = advantages, returns


def _name(estimator: Any) -> str:
    return str(getattr(estimator, "value", estimator))
