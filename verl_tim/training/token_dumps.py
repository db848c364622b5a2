"""Which sequences of a step go into its token dump, and what is known of their tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_tim.diagnosis.token_dump import DumpedSequence, choose_sequences, write_step
from verl_tim.diagnosis.tokens import turn_numbers
from verl_tim.training.choices import Choices
from verl_tim.training.config import TimConfig
from verl_tim.training.records import SeenByLoss

if TYPE_CHECKING:
    from verl_tim.training.observer import StepBatch

logger = logging.getLogger(__name__)


class TokenDumper:
    """Writes `<run_dir>/tokens/step_*.parquet` within `tim.dump.tokens_per_step`.

    Sequences whose choices were recorded come first, then others by a seeded draw; whole ones only.
    """

    def __init__(
        self, tim: TimConfig, decode: Callable[[Sequence[int]], str], *, correction: Mapping[str, Any], model_path: str
    ) -> None:
        self.run_dir, self.budget = tim.run_dir, tim.dump.tokens_per_step
        self.correction, self.model_path = correction, model_path
        self._text = functools.cache(lambda token: decode([token]))
        self._warned = False

    def write(self, step: int, batch: StepBatch, seen: SeenByLoss, choices: Choices) -> None:
        """Dump a step whose update is done; nothing where dumping is off."""
        if self.run_dir is None or self.budget == 0:
            return
        mask_BT = batch.response_mask_BT.bool()
        lengths = mask_BT.sum(1).tolist()
        recorded = sorted(choices.rollout, key=lambda row: (row not in choices.train, row))
        rows = choose_sequences(lengths, self.budget, seed=step, first=recorded)
        if not rows and any(lengths) and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: no sequence fits into tim.dump.tokens_per_step=%d, the shortest has %d tokens: raise it",
                step, self.budget, min(filter(None, lengths)),
            )  # fmt: skip
        uids = [str(uid) for uid in batch.uids] or list(batch.keys)
        groups = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
        # padding rows have no token, and of an incomplete batch there may be no record: then everything was kept
        kept_ST = mask_BT[rows]
        if seen.kept_BT is not None:
            kept_ST = torch.where(seen.seen_B[rows].unsqueeze(1), seen.kept_BT[rows], kept_ST)
        turns_ST = turn_numbers(mask_BT[rows])
        old_BT = batch.old_log_probs_BT
        if old_BT is None:  # the forward of the first mini-batch ran under the same weights
            old_BT = seen.log_prob_BT.masked_fill(~seen.fresh_B.unsqueeze(1), torch.nan)
        sequences = []
        for place, row in enumerate(rows):
            at = np.flatnonzero(mask_BT[row].numpy())
            token_ids = np.asarray(batch.responses[row])[at]
            rollout, train = choices.rollout.get(row), choices.train.get(row)

            def values(x_BT: torch.Tensor | None, row: int = row, at: np.ndarray = at) -> np.ndarray | None:
                return None if x_BT is None else x_BT[row].detach().float().numpy()[at]

            advantage_N = values(batch.advantages_BT)
            assert advantage_N is not None
            sequences.append(
                DumpedSequence(
                    row=row,
                    uid=uids[row],
                    group=groups[uids[row]],
                    position_N=at,
                    token_id_N=token_ids,
                    text_N=[self._text(token) for token in token_ids.tolist()],
                    advantage_N=advantage_N,
                    kept_N=kept_ST[place].numpy()[at],
                    turn_N=turns_ST[place].numpy()[at],
                    old_log_prob_N=values(old_BT),
                    rollout_log_prob_N=values(batch.rollout_log_probs_BT),
                    log_prob_N=values(seen.log_prob_BT),
                    weight_version_N=_versions(batch, row, at),
                    top1_rollout_N=None if rollout is None else _at(rollout.top1_N, at, fill=-1),
                    top1_train_N=None if train is None else _at(train.top1_R, at, fill=-1),
                    routes_rollout_NJ=None if rollout is None else _routes(rollout.routes_NLK, at),
                    routes_train_NJ=None if train is None else _routes(train.routes_RLK, at),
                )
            )
        routed = [one.routes_NLK for one in choices.rollout.values() if one.routes_NLK is not None]
        routed += [one.routes_RLK for one in choices.train.values() if one.routes_RLK is not None]
        write_step(
            self.run_dir,
            step,
            sequences,
            layers=choices.layers,
            top_k=routed[0].shape[-1] if routed else 0,
            correction=self.correction,
            model_path=self.model_path,
        )


def _versions(batch: StepBatch, row: int, at_N: np.ndarray) -> np.ndarray | None:
    if batch.versions_BT is not None:
        return batch.versions_BT[row].numpy()[at_N]
    return None if batch.versions_B is None else np.full(len(at_N), int(batch.versions_B[row]))


def _at(values_R: np.ndarray, at_N: np.ndarray, *, fill: int) -> np.ndarray:
    """Values of the produced tokens; `fill` where a record ends early (the rollout's, after the first turn)."""
    values_N = np.full(len(at_N), fill, values_R.dtype)
    inside_N = at_N < len(values_R)
    values_N[inside_N] = values_R[at_N[inside_N]]
    return values_N


def _routes(routes_RLK: np.ndarray | None, at_N: np.ndarray) -> np.ndarray | None:
    """(n, layers * k) of the first n produced tokens, those that the record covers."""
    if routes_RLK is None:
        return None
    covered = at_N[at_N < len(routes_RLK)]
    return routes_RLK[covered].reshape(len(covered), -1)
