"""Old log-probs from the rollout: where both sides agree bit for bit, the trainer need not score the batch again.

`tim.reuse_rollout_log_probs: {enabled: true, audit_every: k}`. The objective is that of recomputation; what is left out
is a pass whose result is known. That it is known rests on the gate: the first step and every k-th one are *audits*,
in which the trainer scores the whole batch as ever, and every step compares what its own first mini-batch sees. verl's
`bypass_mode` is another thing: another objective, for rollouts that mismatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_tim.training.config import ReuseConfig

ENABLED_KEY = "tim.reuse_rollout_log_probs.enabled"


class ReuseError(RuntimeError):
    """The rollout's log-probs cannot stand in for the trainer's. Names step, sample and position."""


class LogProbReuse:
    """Which steps are audits, and what has been compared so far in this process.

    Args:
        every: a step whose number is a multiple of this is an audit; so is every step until one has compared something.

    Attributes:
        audited_steps: steps whose whole batch was compared.
        reused_steps: steps that took the rollout's log-probs.
        last_audit: number of the last audited step; None before the first.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.audited_steps = 0
        self.reused_steps = 0
        self.last_audit: int | None = None
        self._last_step: int | None = None
        self._pass_seconds: float | None = None  # of the audit under way
        self._seconds_per_token: float | None = None

    @classmethod
    def of(cls, config: ReuseConfig) -> LogProbReuse | None:
        """None where reuse is off."""
        return cls(config.audit_every) if config.enabled else None

    def audits(self, step: int) -> bool:
        """Whether the trainer scores the batch of a step; the same answer throughout the step."""
        return self.last_audit is None or step == self.last_audit or step % self.every == 0

    def timed(self, seconds: float) -> None:
        """How long the pass of the audit under way took."""
        self._pass_seconds = seconds

    def audited(self, step: int, tokens: int) -> None:
        """A step's whole batch was compared; `tokens`: what the pass ran over, prompts included."""
        self.audited_steps += 1
        self.last_audit = self._last_step = step
        if self._pass_seconds is not None and tokens:
            self._seconds_per_token = self._pass_seconds / tokens
        self._pass_seconds = None

    def reused(self, step: int) -> None:
        """A step took the rollout's log-probs."""
        self.reused_steps += 1
        self._last_step = step

    def metrics(self, step: int, tokens: int) -> dict[str, float]:
        """`tim/audited` and the counts since the start of this process.

        On a step without the pass also what it would have taken, at the speed of the last audit.
        """
        audited = step == self.last_audit
        found = {
            "tim/audited": float(audited),
            "tim/audited_steps": float(self.audited_steps),
            "tim/reused_steps": float(self.reused_steps),
        }
        if not audited and self._seconds_per_token is not None:
            found["tim/reuse_saved_seconds"] = self._seconds_per_token * tokens
        return found

    def since_last_audit(self, step: int) -> str:
        """In words, the steps that trained on log-probs of which only a part had been compared."""
        if self.last_audit is None or self._last_step is None or self._last_step == self.last_audit:
            return ""
        first, last = self.last_audit + 1, min(self._last_step, step)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return (
            f"; {steps} took old log-probs from the rollout, compared in the first mini-batch only "
            f"(the last audit was step {self.last_audit})"
        )


def check_usable(step: int, keys: Sequence[str], rollout_log_probs_BT: Tensor | None, response_mask_BT: Tensor) -> None:
    """Refuse rollout log-probs that cannot be old log-probs.

    Args:
        keys: name of each row.
        rollout_log_probs_BT: float32.
        response_mask_BT: bool, int or float.

    Raises:
        ReuseError: there are none, or one at a response token is missing (not finite).
    """
    if rollout_log_probs_BT is None:
        raise ReuseError(
            f"step {step}: {ENABLED_KEY} takes old log-probs from the rollout, and the batch has none: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    missing_BT = response_mask_BT.bool() & ~torch.isfinite(rollout_log_probs_BT)
    if bool(missing_BT.any()):
        row, token = missing_BT.nonzero()[0].tolist()
        raise ReuseError(
            f"step {step}: {int(missing_BT.sum())} response tokens have no log-prob of the rollout, the first in row "
            f"{row} ({keys[row]}) at token {token}: {float(rollout_log_probs_BT[row, token])}; an agent that adds "
            f"tokens of its own must mask them (response_mask), or set {ENABLED_KEY}=false"
        )
