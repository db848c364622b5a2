"""One micro-batch on its way through the routers, and where each router is.

A micro-batch's routes must reach every router twice where activations are computed again: in its forward, and in its
backward, when other micro-batches may have run in between. A pass is an object that the checkpointed function carries
with it (`replay.RoutingReplay.carrying`), so recomputation has the routes of its own forward whatever the order; the
cursors are there to notice a router that runs twice in a forward, or is computed again before it; one that is passed
over is noticed at the forward's end (`Pass.choices`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.replay.errors import ReplayError
from verl_tim.replay.routers import Router

LIVE = -1
"""In place of an expert: the position has no route, and the router chooses there itself."""


@dataclass
class RouterCursor:
    """Of one router: number of the pass that it last saw forward, and of the one that it last computed again."""

    forward: int = -1
    backward: int = -1


class Pass:
    """One forward of one micro-batch, and the backward that belongs to it.

    Args:
        number: counts up.
        routers: of the model, with their cursors.
        rows: that each router sees.
        given_TLK: int16, on the routers' device: the experts to take, `LIVE` where the router chooses itself; None: it
            chooses everywhere, and its choices are recorded.
    """

    def __init__(
        self, number: int, routers: list[Router], cursors: list[RouterCursor], rows: int, given_TLK: Tensor | None
    ) -> None:
        if given_TLK is not None and tuple(given_TLK.shape) != (rows, len(routers), routers[0].top_k):
            raise ReplayError(
                f"routes {tuple(given_TLK.shape)} for {rows} rows, {len(routers)} routers and k={routers[0].top_k}"
            )
        self.number, self.rows, self.given_TLK = number, rows, given_TLK
        self._routers, self._cursors = routers, cursors
        self._live: list[Tensor | None] = [None] * len(routers)
        self._used: list[Tensor | None] = [None] * len(routers)
        self._cleared = False

    def forward(self, index: int, live_TK: Tensor) -> Tensor | None:
        """The experts for router `index`, which has just chosen `live_TK`; None: its own."""
        cursor = self._cursors[index]
        if cursor.forward >= self.number:
            raise ReplayError(f"{self._name(index)} ran twice in the forward of micro-batch {self.number}")
        self._check_rows(index, live_TK)
        cursor.forward = self.number
        self._live[index] = live_TK.detach().to(torch.int16)
        return self._experts(index, live_TK)

    def used(self, index: int, expert_TK: Tensor) -> None:
        """What router `index` handed on to its experts in the forward."""
        self._used[index] = expert_TK.detach().to(torch.int16)

    def again(self, index: int, live_TK: Tensor) -> Tensor | None:
        """As `forward`, where activations are computed again for the backward."""
        if self._cleared:
            raise ReplayError(
                f"{self._name(index)} is computed again for micro-batch {self.number}, whose routes were cleared"
            )
        cursor = self._cursors[index]
        if cursor.forward < self.number:
            raise ReplayError(f"{self._name(index)} is computed again before it ran forward")
        self._check_rows(index, live_TK)
        cursor.backward = self.number
        if self.given_TLK is None:
            # a pass that records runs without gradients; were it computed again, it would have to repeat itself
            used = self._used[index]
            return None if used is None else used.to(live_TK.dtype)
        return self._experts(index, live_TK)

    def choices(self) -> tuple[Tensor, Tensor]:
        """(live, used), int16 [rows, routers, k], once the forward is done.

        Raises:
            ReplayError: a router was passed over.
        """
        missing = [self._name(index) for index, live in enumerate(self._live) if live is None]
        if missing:
            raise ReplayError(
                f"{', '.join(missing)} did not run in the forward of micro-batch {self.number}: a router without its "
                "routes would choose live in silence"
            )
        live_TLK = torch.stack([live for live in self._live if live is not None], 1)
        used_TLK = torch.stack([used for used in self._used if used is not None], 1)
        assert live_TLK.shape == used_TLK.shape
        self._live = [None] * len(self._live)
        if self.given_TLK is not None:
            self._used = [None] * len(self._used)
        return live_TLK, used_TLK

    def clear(self) -> None:
        """Give the routes up; computing again from here on is an error."""
        self.given_TLK, self._cleared = None, True
        self._live, self._used = [None] * len(self._live), [None] * len(self._used)

    def _experts(self, index: int, live_TK: Tensor) -> Tensor | None:
        if self.given_TLK is None:
            return None
        given_TK = self.given_TLK[:, index].to(live_TK.dtype)
        return torch.where(given_TK < 0, live_TK, given_TK)

    def _check_rows(self, index: int, live_TK: Tensor) -> None:
        if live_TK.shape[0] != self.rows:
            raise ReplayError(
                f"{self._name(index)} sees {live_TK.shape[0]} rows, and micro-batch {self.number} has routes for "
                f"{self.rows}: packing and routes disagree"
            )

    def _name(self, index: int) -> str:
        return f"layer {self._routers[index].layer}: {self._routers[index].name}"
