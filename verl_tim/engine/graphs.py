"""Decode steps recorded once per size and replayed: inputs by slot, forward, head, draw, and the feedback of the draw.

A graph serves a bucket of B rows; a step with fewer sequences fills up with the null slot, whose rows attend to one key
of the null page, draw a token that nobody reads, and leave the null slot as it was. No row's bits depend on the others
(that is the contract), so neither on the bucket.

Graphs hold the addresses of weights, KV pages and the device state. A weight update writes in place and leaves them
valid. Releasing weights or KV pages drops them, with their memory; after waking each is recorded again when it is first
needed, which costs about one eager step of host time. (Keeping the addresses instead would need an allocator that
unmaps memory under them; recording again needs nothing, and a rollout that never uses a bucket never pays for it.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from verl_tim.engine.decode_io import RESULTS, DecodeIO
from verl_tim.engine.device import Device, Work
from verl_tim.engine.device_state import DeviceState
from verl_tim.engine.page_routes import as_routes
from verl_tim.numerics.contract import overlapped_launches
from verl_tim.numerics.paging import DecodeBatch
from verl_tim.numerics.sampling import Sampled, SamplingTensors

_OVERLAPPED_ROWS = 16
"""Up to here kernels are so short that overlapping their launches pays: 2 % of a step at 16 rows, -1 % at 64 (H200)."""


def bucket_sizes(max_num_seqs: int, row_floor: int) -> list[int]:
    """Rows of the graphs, ascending: 1, 2, 4, 8, then every 8 up to 256, every 16 up to 512, every 32 beyond.

    All are multiples of ``row_floor``; the last holds ``max_num_seqs``.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += 8 if size < 256 else 16 if size < 512 else 32
    sizes.append(max_num_seqs)
    return sorted({-(-size // row_floor) * row_floor for size in sizes if size <= max_num_seqs})


class Uncut:
    """Sampling parameters that no graph varies: no cuts. One set of constants, sliced."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.top_k_B = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.top_p_B = torch.ones(rows, device=device)
        self.min_p_B = torch.zeros(rows, device=device)
        self.none_R = torch.empty(0, dtype=torch.int64, device=device)

    def parameters(self, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor) -> SamplingTensors:
        rows = len(seed_B)
        return SamplingTensors(
            temperature_B, self.top_k_B[:rows], self.top_p_B[:rows], self.min_p_B[:rows], seed_B, position_B
        )


class DecodeGraphs:
    """The recorded decode steps of one engine.

    Args:
        forward: (token ids [B], layout, list that gets the experts [B, K] of each sparse layer, or None) -> hidden
            states [B, D], over the engine's KV pages.
        draw: (hidden states, sampling parameters, rows that cut) -> Sampled; None where another stage draws.
        max_model_len: bound on every context.
        gives_routes: a replay also leaves the chosen experts behind.

    Attributes:
        slot_B: int64, the slots of the step, filled up with ``state.null``; written before a replay.
    """

    def __init__(
        self,
        device: Device,
        state: DeviceState,
        sizes: list[int],
        *,
        page_size: int,
        max_model_len: int,
        forward: Callable[[Tensor, DecodeBatch, list[Tensor] | None], Tensor],
        draw: Callable[[Tensor, SamplingTensors, Tensor], Sampled] | None,
        gives_routes: bool,
    ) -> None:
        self._device = device
        self.sizes = sizes
        self._forward, self._draw, self._gives_routes = forward, draw, gives_routes
        most = sizes[-1]
        self.uncut = Uncut(most, device.device)
        self._io = DecodeIO(state, most, page_size, max_model_len)
        self.slot_B = torch.full((most,), state.null, dtype=torch.int64, device=device.device)
        self._results = torch.zeros(RESULTS * most, dtype=torch.int32, device=device.device)
        # By bucket; kept, so that no later recording takes its place. An earlier one's replay may overwrite it.
        self._hidden: dict[int, Tensor] = {}
        self._routes: dict[int, Tensor] = {}  # likewise
        self._replay: dict[int, Work] = {}

    def bucket(self, rows: int) -> int:
        """The smallest recorded size that holds ``rows``."""
        return next(size for size in self.sizes if size >= rows)

    def results(self, size: int) -> Tensor:
        """Where a replay leaves what it drew: int32 [4, size], contiguous."""
        return self._results[: RESULTS * size].view(RESULTS, size)

    def hidden(self, size: int) -> Tensor:
        """What the forward gave in the last replay of that size; read it before another replay."""
        return self._hidden[size]

    def routes(self, size: int) -> Tensor:
        """int16 [size, layers, K]: the experts of the last replay of that size; read it before another replay."""
        return self._routes[size]

    def run(self, size: int) -> None:
        """The step itself, as it is recorded."""
        chosen: list[Tensor] | None = [] if self._gives_routes else None
        slot_B = self.slot_B[:size]
        overlap = size <= _OVERLAPPED_ROWS
        with overlapped_launches(self._device.device) if overlap else contextlib.nullcontext():
            inputs = self._io.read(slot_B)
            hidden_BD = self._forward(inputs.token_B, inputs.batch, chosen)
            if chosen is not None:
                self._routes[size] = as_routes(chosen)
            if self._draw is None:
                self._io.move(slot_B)
            else:
                sampling = self.uncut.parameters(inputs.temperature_B, inputs.seed_B, inputs.next_B)
                sampled = self._draw(hidden_BD, sampling, self.uncut.none_R)
                self._io.write(slot_B, sampled, self.results(size))
        self._hidden[size] = hidden_BD

    def replay(self, size: int) -> None:
        """Submit the step of that size, recording it first if need be."""
        if size not in self._replay:
            self._replay[size] = self._device.capture(lambda: self.run(size))
        self._device.submit(self._replay[size])

    def record(self, sizes: Iterable[int]) -> None:
        """Record sizes ahead, each after a run that compiles what it launches. Slots must all be null."""
        for size in sizes:
            self._device.submit(lambda size=size: self.run(size))  # type: ignore[misc]
            self._device.mark().wait()
            self._replay[size] = self._device.capture(lambda size=size: self.run(size))  # type: ignore[misc]

    @property
    def recorded(self) -> list[int]:
        return sorted(self._replay)

    def forget(self) -> None:
        """Drop all recordings and give their memory back."""
        self._replay.clear()
        self._hidden.clear()
        self._routes.clear()
        self._device.forget_captures()
