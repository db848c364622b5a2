"""The experts chosen at every position that has KV, page by page, beside the KV pool.

Where a sequence records its routes they follow its KV: a page that another sequence shares brings them along, a page
that is given away loses them. So a response's routes cover prompt and response, whatever was taken from the prefix
cache, cut into chunks, or preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNKNOWN = -1


class PageRoutes:
    """Routes of the pages of one pool; takes no memory before the first are written.

    Args:
        num_pages: pages that can be owned; the null page comes on top.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._recording_P = np.zeros(num_pages + 1, bool)  # pages whose owner records all that it computes
        self._routes_PSLK: np.ndarray | None = None
        self._absent = False

    def never(self) -> None:
        """No routes will ever come: a dense model, or a runner that gives out none."""
        self._absent = True

    def give(self, pages: np.ndarray, recording: bool | np.ndarray) -> None:
        """`pages` have a new owner, which records its routes, or does not (one value, or one per page)."""
        self._recording_P[pages] = recording
        if self._routes_PSLK is not None:
            self._routes_PSLK[pages] = UNKNOWN

    def num_recorded(self, pages: list[int]) -> int:
        """How many of `pages`, from the first on, have routes, or get them in this step; all where nobody has any."""
        if self._absent:
            return len(pages)
        recorded = self._recording_P[pages]
        return len(pages) if recorded.all() else int(recorded.argmin())

    def write(self, slot_T: np.ndarray, routes_TLK: np.ndarray) -> None:
        """Routes (int16) of the rows of a step; `slot_T`: page * page_size + place in the page."""
        if self._routes_PSLK is None:
            shape = (len(self._recording_P), self._page_size, *routes_TLK.shape[1:])
            self._routes_PSLK = np.full(shape, UNKNOWN, np.int16)
        self._routes_PSLK[slot_T // self._page_size, slot_T % self._page_size] = routes_TLK

    def read(self, pages: np.ndarray, count: int) -> np.ndarray | None:
        """int16 (at most `count`, layers, k): what is known of the first positions in `pages`, `UNKNOWN` elsewhere.

        None where no routes were ever written.
        """
        if self._routes_PSLK is None:
            return None
        return self._routes_PSLK[pages].reshape(-1, *self._routes_PSLK.shape[2:])[:count]


def merged(first_TLK: np.ndarray | None, later_TLK: np.ndarray | None) -> np.ndarray | None:
    """Two readings of one sequence: what was known first stays, since that is what its tokens were drawn with."""
    if first_TLK is None or later_TLK is None:
        return later_TLK if first_TLK is None else first_TLK
    if len(later_TLK) < len(first_TLK):
        later_TLK = np.concatenate([later_TLK, first_TLK[len(later_TLK) :]])
    whole_TLK = later_TLK.copy()
    known_T = (first_TLK != UNKNOWN).all((1, 2))
    whole_TLK[: len(first_TLK)][known_T] = first_TLK[known_T]
    return whole_TLK


def as_routes(chosen: Sequence[Tensor]) -> Tensor:
    """int16 [T, layers, K] of the experts [T, K] that each sparse layer chose."""
    return torch.stack(tuple(chosen), 1).to(torch.int16)
