"""What thresholds are chosen from: the dumped sequences of a run in two halves, and how many there must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.metrics import mismatch_metrics

SEED = 0
# What a share of `max_share` needs at least, in each half: so many sequences and tokens expected beyond it.
EXPECTED_SEQUENCES, EXPECTED_TOKENS = 1, 10
BLOCKS = 10  # of sequences, for the standard error


class CalibrationError(DiagnosisError):
    """Thresholds cannot be chosen from these runs; the message says why and what to do."""


@dataclass(frozen=True)
class Half:
    """Sequences of a run as tensors (R, T)."""

    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def sequences(self) -> int:
        return self.mask.shape[0]

    def skew(self, kept: Tensor) -> float | None:
        """Contribution skew of the kept tokens with log p = log p_old, so that d alone makes it; None without a value
        (a sign of the advantage is missing)."""
        return mismatch_metrics(
            old_log_probs=self.old, rollout_log_probs=self.rollout, response_mask=kept, advantages=self.advantages
        ).get("tim/contribution_skew")

    def skew_error(self) -> float | None:
        """Standard error of the skew without rejection, from that of `BLOCKS` blocks of sequences; None where a block
        lacks a sign."""
        parts = zip(
            *(x.tensor_split(BLOCKS) for x in (self.old, self.rollout, self.advantages, self.mask)), strict=True
        )
        skews = [block.skew(block.mask) for block in (Half(*part) for part in parts)]
        found = [skew for skew in skews if skew is not None]
        return float(np.std(found, ddof=1)) / math.sqrt(BLOCKS) if len(found) == BLOCKS else None


def halves(run: Dumped) -> tuple[Half, Half]:
    """The sequences of a seeded half of the prompts, and of the other half."""
    first = run.tokens.drop_duplicates("sequence")
    # by the prompt's number: verl's uid is drawn at random, and with it as the key the halves of two equal runs differ
    prompts, prompt_R = np.unique(first[["step", "group"]].to_numpy(), axis=0, return_inverse=True)
    prompt_R = prompt_R.reshape(-1)  # NumPy 2.0 gives it another shape
    chosen = np.zeros(len(prompts), bool)
    chosen[np.random.default_rng(SEED).permutation(len(prompts))[: len(prompts) // 2]] = True
    return part_of(run, chosen[prompt_R]), part_of(run, ~chosen[prompt_R])


def part_of(run: Dumped, wanted_R: np.ndarray) -> Half:
    """The sequences where `wanted_R` (R,) bool is true, and of their tokens those with both log-probs; a sequence
    without any is left out.

    Raises:
        CalibrationError: a column that the run did not record at all.
    """
    for column, remedy in (
        ("rollout_log_prob", "set actor_rollout_ref.rollout.calculate_log_probs=true"),
        ("old_log_prob", "under bypass set algorithm.rollout_correction.old_forward=true"),
        ("advantage", "dump a training step, not a validation"),
    ):
        if run.tokens[column].isna().all():
            raise CalibrationError(f"{run.path}: no token has its {column}", f"{remedy} and run again")
    known = run.mask() & run.tensor("rollout_log_prob").isfinite() & run.tensor("old_log_prob").isfinite()
    rows = torch.from_numpy(wanted_R) & known.any(1)

    def part(column: str) -> Tensor:
        return run.tensor(column).nan_to_num(nan=0.0)[rows]

    return Half(part("old_log_prob"), part("rollout_log_prob"), part("advantage"), known[rows])


def enough(fit: Half, check: Half, exact: Half, max_share: float, mismatch_run: Path, exact_run: Path) -> None:
    """Refuse too little data.

    Raises:
        CalibrationError: fewer than 2 * EXPECTED_SEQUENCES / max_share sequences or 2 * EXPECTED_TOKENS / max_share
            tokens in either run, or advantages of one sign.
    """
    sequences, tokens = (math.ceil(2 * n / max_share) for n in (EXPECTED_SEQUENCES, EXPECTED_TOKENS))
    has = {mismatch_run: (fit.sequences + check.sequences, fit.tokens + check.tokens)}
    has |= {exact_run: (exact.sequences, exact.tokens)}
    for run, (held_sequences, held_tokens) in has.items():
        if held_sequences < sequences or held_tokens < tokens:
            raise CalibrationError(
                f"{run} has {held_sequences} dumped sequences with {held_tokens} tokens, and a share of "
                f"{100 * max_share:g} % needs at least {sequences} sequences and {tokens} tokens in each run",
                "train more steps, raise tim.dump.tokens_per_step, or allow a larger --max-share",
            )
    for half in (fit, check):
        signs = half.advantages[half.mask]
        if not (bool((signs > 0).any()) and bool((signs < 0).any())):
            raise CalibrationError(
                f"{mismatch_run}: a half of its sequences has advantages of one sign only, so there is no skew",
                "train more steps, on problems that are neither all solved nor all failed",
            )
