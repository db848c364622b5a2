"""The sampled sequences of a step as both sides recorded them, side by side: top-1 tokens and routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.metrics import choice_metrics
from verl_tim.diagnosis.routes import UNRECORDED, RouteError
from verl_tim.rollout.recorded import Recorded
from verl_tim.training.forward_records import ForwardRecord


def marked_rows(recorded: Sequence[Recorded | None]) -> Tensor:
    """int64 (rows, 1): 1 for the rows that the rollout recorded; what a trainer writes as `SAMPLED_FIELD`."""
    return torch.tensor([int(one is not None) for one in recorded]).unsqueeze(1)


@dataclass(frozen=True)
class Choices:
    """row -> what the rollout, and what the trainer recorded of it."""

    rollout: dict[int, Recorded] = field(default_factory=dict)
    train: dict[int, ForwardRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, recorded: Sequence[Recorded | None] | None, forwards: Sequence[ForwardRecord]) -> Choices:
        rollout = {row: one for row, one in enumerate(recorded or ()) if one is not None}
        return cls(rollout, {record.row: record for record in forwards})

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layer numbers of the recorded routes; empty where none are.

        Raises:
            RouteError: the two sides, or two rows, recorded other layers.
        """
        found = {one.layers for one in self.rollout.values()} | {one.layers for one in self.train.values()}
        found.discard(())
        if len(found) > 1:
            raise RouteError(f"routes were recorded for other layers: {', '.join(map(str, sorted(found)))}")
        return found.pop() if found else ()

    def metrics(self, valid_BT: Tensor) -> dict[str, float]:
        """`tim/top1_*` and `tim/router_*` over the tokens that both sides recorded.

        Args:
            valid_BT: bool, the tokens with log-probs on both sides.
        """
        rows = sorted(self.rollout.keys() & self.train.keys())
        if not rows:
            return {}
        # of a conversation the rollout's record covers the first turn, the trainer's the whole response
        lengths = [min(valid_BT.shape[1], len(self.rollout[row].top1_N), len(self.train[row].top1_R)) for row in rows]
        width = max(*lengths, 1)
        valid_ST = valid_BT[rows, :width]  # a copy
        top1 = [torch.full((len(rows), width), -1, dtype=torch.int64) for _ in range(2)]
        routed = [one.routes_RLK for one in self.train.values() if one.routes_RLK is not None]
        routes = None
        if routed and any(one.layers for one in self.rollout.values()):
            shape = (len(rows), width, max(self.layers) + 1, routed[0].shape[-1])
            routes = [torch.full(shape, UNRECORDED, dtype=torch.int16) for _ in range(2)]
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            rollout, train = self.rollout[row], self.train[row]
            valid_ST[place, length:] = False
            for ids_ST, recorded in zip(top1, (rollout.top1_N, train.top1_R), strict=True):
                ids_ST[place, :length] = torch.from_numpy(recorded[:length].astype(np.int64))
            if routes is not None:
                for ids_STLK, ids_RLK in zip(routes, (rollout.routes_NLK, train.routes_RLK), strict=True):
                    if ids_RLK is not None:
                        # copied: what Ray delivers is read-only
                        ids_STLK[place, :length, list(self.layers)] = torch.tensor(ids_RLK[:length])
        return choice_metrics(
            valid_ST,
            rollout_top1=top1[0],
            train_top1=top1[1],
            rollout_routes=None if routes is None else routes[0],
            train_routes=None if routes is None else routes[1],
        )
