"""Inputs and a float64 reference for the attention tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def reference(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences in float64: (out [T, H, D], natural log-sum-exp [H, T]); differentiable."""
    outs, sums = [], []
    group = q_THD.shape[1] // k_THD.shape[1]
    bounds = [0, *itertools.accumulate(lengths)]
    for start, stop in itertools.pairwise(bounds):
        q, k, v = (x[start:stop].double() for x in (q_THD, k_THD, v_THD))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v))
        sums.append(s.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


class Packed:
    """Random packed sequences with `padding` rows behind them; q, k and v are views of one fused row."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        num_kv_heads: int,
        dim: int,
        *,
        device: str = "cpu",
        padding: int = 3,
        sharpness: float = 1.5,
    ) -> None:
        generator = torch.Generator(device).manual_seed(sum(lengths) * 1000 + heads * 10 + dim)
        self.lengths, self.heads, self.num_kv_heads, self.dim = list(lengths), heads, num_kv_heads, dim
        self.rows = sum(lengths)
        width = heads + 2 * num_kv_heads
        qkv = torch.randn(self.rows + padding, width, dim, generator=generator, device=device) * sharpness
        self.q, self.k, self.v = qkv.to(torch.bfloat16).split([heads, num_kv_heads, num_kv_heads], 1)
        self.starts = [0, *itertools.accumulate(lengths)]
        self.cu_seqlens = torch.tensor(self.starts, dtype=torch.int32, device=device)

    def paged(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k_pages, v_pages, block_table): the same keys in randomly placed pages; slots without a key hold 7."""
        device = self.k.device
        counts = [-(-length // page_size) for length in self.lengths]
        shape = (sum(counts) + 1, page_size, self.num_kv_heads, self.dim)
        k_pages, v_pages = (torch.full(shape, 7.0, dtype=torch.bfloat16, device=device) for _ in range(2))
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(page_size)) + 1).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            pages, order = order[:count], order[count:]
            table[s, :count] = torch.tensor(pages)
            position = torch.arange(self.lengths[s])
            page = table[s, position // page_size].long().to(device)
            slot = (position % page_size).to(device)
            k_pages[page, slot] = self.k[self.starts[s] : self.starts[s + 1]]
            v_pages[page, slot] = self.v[self.starts[s] : self.starts[s + 1]]
        return k_pages, v_pages, table.to(device)

    def last_rows(self, query_lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(row indices of the last rows of every sequence, query_start int32, context_len int32)."""
        device = self.k.device
        rows = [torch.arange(stop - n, stop) for stop, n in zip(self.starts[1:], query_lens, strict=True)]
        start = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device)
        return torch.cat(rows).to(device), start, torch.tensor(self.lengths, dtype=torch.int32, device=device)
