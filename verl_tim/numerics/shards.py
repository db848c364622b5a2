"""Tensor parallelism by output columns: each rank holds some rows of a weight, and ranks put their columns together.

Rule: every linear is split over its outputs only. An output keeps its whole walk over K on one rank, so that no sum
crosses ranks and any number of ranks gives the bits of one; what crosses is copies.
Free: the number of ranks, and how the copies travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError


@dataclass(frozen=True)
class Shards:
    """One rank's place among `size` ranks that share every weight.

    gather: x -> [size, *x.shape], the x of every rank in their order, on x's device without a wait of the host where
    that is a GPU; a collective: all ranks call it in the same order with equal shapes. None where size is 1.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor], Tensor] | None = None

    def part(self, total: int, name: str) -> slice:
        """This rank's share of `total` outputs.

        Raises:
            ContractError: `total` does not divide by the ranks; the message names it.
        """
        if total % self.size:
            raise ContractError(f"{name}={total} does not divide by tensor_parallel_size={self.size}")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all(self, x: Tensor) -> Tensor:
        """[size, *x.shape]."""
        return x[None] if self.gather is None else self.gather(x.contiguous())

    def columns(self, x_TN: Tensor) -> Tensor:
        """[T, N] of each rank -> [T, size N], in rank order; `x_TN` itself on one rank."""
        if self.gather is None:
            return x_TN
        every = self.gather(x_TN.contiguous())
        return every.transpose(0, 1).reshape(x_TN.shape[0], -1)


ONE = Shards()
"""A single rank: nothing is split."""


@dataclass(frozen=True)
class VocabularyPart:
    """The vocabulary columns of one rank's head: whole tiles, so that each tile's partial results are one rank's.

    Ranks take `tiles_per_rank` tiles each, in order; the last ones may get fewer, or none.
    """

    shards: Shards
    vocab_size: int
    tile: int

    @property
    def tiles(self) -> int:
        """Of the whole vocabulary."""
        return -(-self.vocab_size // self.tile)

    @property
    def tiles_per_rank(self) -> int:
        return -(-self.tiles // self.shards.size)

    @property
    def first(self) -> int:
        """First column; the vocabulary's size where there is none."""
        return min(self.shards.rank * self.tiles_per_rank * self.tile, self.vocab_size)

    @property
    def width(self) -> int:
        """Columns."""
        return min(self.tiles_per_rank * self.tile, self.vocab_size - self.first)

    @property
    def rows(self) -> slice:
        """Of the head's weight."""
        return slice(self.first, self.first + self.width)

    def owner(self, token_T: Tensor) -> Tensor:
        """Rank that holds each token's column; ids outside the vocabulary are given to some rank."""
        return (token_T // (self.tiles_per_rank * self.tile)).clamp(0, self.shards.size - 1)

    def gather_tiles(self, parts_TJ: Tensor) -> Tensor:
        """[..., T, J] of this rank's tiles (J may be short by the tiles it lacks) -> [..., T, tiles] of all."""
        missing = self.tiles_per_rank - parts_TJ.shape[-1]
        if missing:
            parts_TJ = torch.nn.functional.pad(parts_TJ, (0, missing))
        every = self.shards.all(parts_TJ).movedim(0, -2)
        return every.flatten(-2)[..., : self.tiles].contiguous()
