"""What the device knows of the running sequences, one entry per slot, and the host's account of it.

The tensors stay in place for the engine's life, since CUDA graphs read them there. A step sends only what differs from
the account: everything of a slot that another sequence took, pages that were added, a position that did not follow from
the step before. Drawn tokens never leave the device to come back: a step leaves the token it drew, and its position,
where the next step finds them.

Slot ``null`` (the last) belongs to nobody: token 0 at position 0 in the null page. Padding rows stand for it.
"""

from __future__ import annotations

import numpy as np
import torch

from verl_tim.engine.device import Device
from verl_tim.engine.rows import RowTable
from verl_tim.engine.staging import Staging

_NOWHERE = -1


class DeviceState:
    """Tensors by slot, S slots and the null slot.

    Attributes:
        token_S, position_S: int64; the token to feed next, and its position.
        temperature_S: float32. seed_S: int64.
        block_table_SM: int32 pages; entries behind a sequence's pages are stale but valid page numbers.
    """

    def __init__(self, device: Device, rows: RowTable) -> None:
        self._device, self._rows = device, rows
        slots, pages = rows.page_SM.shape
        self.null = slots
        where = device.device
        self.token_S = torch.zeros(slots + 1, dtype=torch.int64, device=where)
        self.position_S = torch.zeros(slots + 1, dtype=torch.int64, device=where)
        self.temperature_S = torch.zeros(slots + 1, dtype=torch.float32, device=where)
        self.seed_S = torch.zeros(slots + 1, dtype=torch.int64, device=where)
        self.block_table_SM = torch.zeros(slots + 1, pages, dtype=torch.int32, device=where)
        self._table = self.block_table_SM.view(-1)
        self._width = pages
        # What the tensors hold once all submitted work has run.
        self._tenancy_S = np.full(slots, _NOWHERE, np.int64)
        self._position_S = np.full(slots, _NOWHERE, np.int64)
        self._num_pages_S = np.zeros(slots, np.int64)

    def forget(self) -> None:
        """Trust nothing that was sent: the next step of a slot sends it anew."""
        self._tenancy_S[:] = _NOWHERE

    def packet_bytes(self, slots_B: np.ndarray) -> int:
        """Bound on what :meth:`stage` puts for these sequences."""
        kept_B = self._tenancy_S[slots_B] == self._rows.tenancy_S[slots_B]
        pages_B = self._rows.num_pages_S[slots_B] - np.where(kept_B, self._num_pages_S[slots_B], 0)
        return int(12 * pages_B.sum() + 64 * len(slots_B))

    def stage(self, staging: Staging, slots_B: np.ndarray, start_B: np.ndarray, *, feed: bool) -> list[_Change]:
        """Put what the device lacks to run these sequences from positions ``start_B``, for :func:`apply` after it.

        Args:
            feed: their tokens at ``start_B`` are read here too; each is either on the device or known on the host.
        """
        rows = self._rows
        changes = []
        new_B = self._tenancy_S[slots_B] != rows.tenancy_S[slots_B]
        if new_B.any():
            slots = slots_B[new_B]
            self._tenancy_S[slots] = rows.tenancy_S[slots]
            self._num_pages_S[slots] = 0
            self._position_S[slots] = _NOWHERE
            index = staging.put(slots)
            changes.append((self.temperature_S, index, staging.put(rows.temperature_S[slots])))
            changes.append((self.seed_S, index, staging.put(rows.seed_S[slots])))
        count_B = rows.num_pages_S[slots_B] - self._num_pages_S[slots_B]
        total = int(count_B.sum())
        if total:
            grown = count_B > 0
            slots, count = slots_B[grown], count_B[grown]
            first = np.cumsum(count) - count
            column = np.arange(total) - np.repeat(first - self._num_pages_S[slots], count)
            slot = np.repeat(slots, count)
            pages = rows.page_SM[slot, column].astype(np.int32)
            changes.append((self._table, staging.put(slot * self._width + column), staging.put(pages)))
            self._num_pages_S[slots] += count
        if feed:
            moved_B = self._position_S[slots_B] != start_B
            if moved_B.any():
                slots, start = slots_B[moved_B], start_B[moved_B]
                known = rows.num_tokens_S[slots] - rows.num_pending_S[slots]
                assert (start < known).all(), "a token that neither the host nor the device has"
                index = staging.put(slots)
                tokens = rows.token_SL[slots, start].astype(np.int64)
                changes.append((self.token_S, index, staging.put(tokens)))
                changes.append((self.position_S, index, staging.put(start)))
        return changes

    def unknown(self, slots_B: np.ndarray, start_B: np.ndarray) -> np.ndarray:
        """Which of the tokens at ``start_B`` only the device has, bool [B]."""
        rows = self._rows
        unknown_B = start_B >= rows.num_tokens_S[slots_B] - rows.num_pending_S[slots_B]
        assert (self._position_S[slots_B[unknown_B]] == start_B[unknown_B]).all(), "a drawn token is nowhere"
        return unknown_B

    def moved(self, slots_B: np.ndarray, position_B: np.ndarray, draws_B: np.ndarray) -> None:
        """Account for a submitted step: what drew is fed at ``position_B`` next, the rest at no known place."""
        self._position_S[slots_B] = np.where(draws_B, position_B, _NOWHERE)


_Change = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def apply(changes: list[_Change]) -> None:
    """On the device: write the staged values to their places."""
    for target, index, values in changes:
        target.index_copy_(0, index, values)
