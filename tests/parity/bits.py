"""Exact means exact: comparison of fp32 bit patterns, and the trainer's side of the parity chain."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.tiny import Sequence

_PAD = 7  # any token: padding must not matter


def assert_same_bits(got: Tensor, want: Tensor, what: str) -> int:
    """Compare bit patterns of finite tensors; returns how many values were compared."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.isfinite(want).all(), f"{what}: not finite"
    integer = {4: torch.int32, 2: torch.int16}[got.element_size()]
    differ = int((got.contiguous().view(integer) != want.contiguous().view(integer)).sum())
    assert differ == 0, f"{what}: {differ} of {got.numel()} values differ"
    return got.numel()


def recorded(sequences: list[Sequence]) -> Tensor:
    return torch.tensor([value for s in sequences for value in s.log_probs], dtype=torch.float32)


def assert_peaked(sequences: list[Sequence]) -> None:
    """The demands on a parity model: mean top probability above 0.5, log-prob standard deviation above 1 nat."""
    top = torch.tensor([p for s in sequences for p in s.top_probs])
    assert top.mean() > 0.5, f"mean top probability {top.mean():.2f}"
    assert recorded(sequences).std() > 1.0, f"log-prob std {recorded(sequences).std():.2f}"


def score(model, sequences: list[Sequence], layout: str, temperature: float) -> Tensor:
    """The trainer's log-probs of the drawn tokens, in order, from one call. layout: packed, left or right (padding)."""
    tokens = [torch.tensor(s.tokens) for s in sequences]
    if layout == "packed":
        out = model(
            input_ids=torch.cat(tokens)[None],
            position_ids=torch.cat([torch.arange(len(t)) for t in tokens])[None],
            temperature=temperature,
        )
        rows = out.log_probs[0].split([len(t) for t in tokens])
    else:
        width = max(map(len, tokens))
        ids = torch.full((len(tokens), width), _PAD)
        mask = torch.zeros_like(ids)
        spans = []
        for row, t in enumerate(tokens):
            spans.append(slice(width - len(t), width) if layout == "left" else slice(0, len(t)))
            ids[row, spans[-1]], mask[row, spans[-1]] = t, 1
        out = model(input_ids=ids, attention_mask=mask, temperature=temperature)
        rows = [out.log_probs[row, span] for row, span in enumerate(spans)]
    return torch.cat([row[s.prompt_len - 1 : -1] for row, s in zip(rows, sequences, strict=True)])
