"""The two ends of a recorded decode step: inputs gathered by slot, draws packed and handed to the next step.

On a GPU each is one launch (`numerics/gpu/decode_io.py`); the torch form here says what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.engine.device_state import DeviceState
from verl_tim.numerics.contract import kernels, on_gpu
from verl_tim.numerics.paging import DecodeBatch
from verl_tim.numerics.sampling import Sampled

RESULTS = 4  # int32 words per drawn token: token, log-prob bits, top-1, kept-mass bits


@dataclass(frozen=True)
class DecodeInputs:
    """Of each row: token_B, next_B (position of the token to be drawn), seed_B int64, temperature_B float32, and the
    layout."""

    token_B: Tensor
    next_B: Tensor
    temperature_B: Tensor
    seed_B: Tensor
    batch: DecodeBatch


def write_results(results_4B: Tensor, sampled: Sampled) -> None:
    """Pack what was drawn into int32 words, so that it travels in one copy."""
    results_4B[0].copy_(sampled.token_B)
    results_4B[1].view(torch.float32).copy_(sampled.log_prob_B)
    results_4B[2].copy_(sampled.top1_B)
    results_4B[3].view(torch.float32).copy_(sampled.kept_mass_B)


class DecodeIO:
    """Buffers for the inputs of up to ``most`` rows, which keep their places."""

    def __init__(self, state: DeviceState, most: int, page_size: int, max_context: int) -> None:
        self._state, self._page_size, self._max_context = state, page_size, max_context
        device, width = state.token_S.device, state.block_table_SM.shape[1]

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(most, dtype=dtype, device=device)

        self._token_B, self._position_B, self._next_B = (column(torch.int64) for _ in range(3))
        self._context_B, self._kv_slot_B = column(torch.int32), column(torch.int64)
        self._temperature_B, self._seed_B = column(torch.float32), column(torch.int64)
        # Zeroed once: what lies behind a sequence's pages is then always the number of some page.
        self._table_BM = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._query_start_B1 = torch.arange(most + 1, dtype=torch.int32, device=device)

    def read(self, slot_B: Tensor) -> DecodeInputs:
        """Inputs of the slots [B], in the first rows of the buffers."""
        state, rows = self._state, slice(0, slot_B.shape[0])
        out = tuple(
            buffer[rows]
            for buffer in (
                self._token_B,
                self._position_B,
                self._next_B,
                self._context_B,
                self._kv_slot_B,
                self._temperature_B,
                self._seed_B,
                self._table_BM,
            )
        )
        token_B, position_B, next_B, context_B, kv_slot_B, temperature_B, seed_B, table_BM = out
        held = (state.token_S, state.position_S, state.temperature_S, state.seed_S, state.block_table_SM)
        if on_gpu(slot_B):
            kernels("decode_io").gather(slot_B, held, out, self._page_size)
        else:
            size = self._page_size
            for target, source in zip((token_B, position_B, temperature_B, seed_B, table_BM), held, strict=True):
                torch.index_select(source, 0, slot_B, out=target)
            torch.add(position_B, 1, out=next_B)
            context_B.copy_(next_B)
            page_B = table_BM.gather(1, (position_B // size)[:, None])[:, 0].to(torch.int64)
            kv_slot_B.copy_(page_B * size + position_B % size)
        batch = DecodeBatch(
            position_T=position_B,
            slot_T=kv_slot_B,
            context_len_T=context_B,
            block_table_TM=table_BM,
            query_start_T1=self._query_start_B1[: len(slot_B) + 1],
            page_size=self._page_size,
            max_context=self._max_context,
        )
        return DecodeInputs(token_B, next_B, temperature_B, seed_B, batch)

    def move(self, slot_B: Tensor) -> None:
        """Leave the next position of the rows last read in their slots; another stage draws the token."""
        state = self._state
        next_B = self._next_B[: len(slot_B)] * (slot_B != state.null)
        state.position_S.index_copy_(0, slot_B, next_B)

    def write(self, slot_B: Tensor, sampled: Sampled, results_4B: Tensor) -> None:
        """Pack the draws of the rows last read, and leave each token and its position in its slot."""
        state, next_B = self._state, self._next_B[: len(slot_B)]
        if on_gpu(slot_B):
            drawn = (sampled.token_B, sampled.log_prob_B, sampled.top1_B, sampled.kept_mass_B)
            kernels("decode_io").scatter(slot_B, drawn, next_B, state.token_S, state.position_S, results_4B, state.null)
            return
        write_results(results_4B, sampled)
        # The null slot is named by every padding row; all write what it holds.
        live_B = slot_B != state.null
        state.token_S.index_copy_(0, slot_B, sampled.token_B * live_B)
        state.position_S.index_copy_(0, slot_B, next_B * live_B)
