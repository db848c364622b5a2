"""The two ends of a recorded decode step: the kernels copy what the torch form copies."""

from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.gpu import decode_io

from .devices import DEVICE

PAGE = 16


def state(slots: int, pages: int):
    generator = torch.Generator().manual_seed(slots)

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator)

    token, position = integers(1000, slots), integers(PAGE * pages, slots)
    temperature, seed = torch.rand(slots, generator=generator), integers(2**62, slots)
    table = integers(5000, slots, pages).to(torch.int32)
    token[-1] = position[-1] = 0
    table[-1] = 0
    return tuple(x.to(DEVICE) for x in (token, position, temperature, seed, table))


@pytest.mark.parametrize(("slots", "rows", "pages"), [(4, 1, 3), (9, 8, 40), (40, 33, 700)])
def test_inputs_are_gathered_by_slot(slots, rows, pages):
    held = state(slots, pages)
    token, position, temperature, seed, table = held
    slot = torch.randperm(slots)[:rows].to(DEVICE)
    like = (token, position, position, position.int(), position, temperature, seed, table)
    out = tuple(torch.full_like(x[:1], 7).expand(rows, *x.shape[1:]).contiguous() for x in like)
    decode_io.gather(slot, held, out, PAGE)
    got_token, got_position, got_next, context, kv_slot, got_temperature, got_seed, got_table = out
    for got, source in zip(
        (got_token, got_position, got_temperature, got_seed), (token, position, temperature, seed), strict=True
    ):
        assert torch.equal(got, source[slot])
    assert torch.equal(got_next, position[slot] + 1)
    assert torch.equal(context.long(), position[slot] + 1)
    page = table[slot].long().gather(1, (position[slot] // PAGE)[:, None])[:, 0]
    assert torch.equal(kv_slot, page * PAGE + position[slot] % PAGE)
    used = torch.arange(pages, device=DEVICE) <= (position[slot] // PAGE)[:, None]
    assert torch.equal(got_table[used], table[slot][used])
    assert (got_table[~used] == 7).all(), "pages behind the sequence's were touched"


@pytest.mark.parametrize("rows", [1, 8, 130])
def test_draws_go_out_and_back(rows):
    slots, null = rows + 3, rows + 2
    token, position, *_ = state(slots, 9)
    live = max(1, rows - 2)
    slot = torch.full((rows,), null, device=DEVICE)
    slot[:live] = torch.randperm(rows)[:live].to(DEVICE)
    drawn = torch.randint(0, 2**31 - 1, (rows,)).to(DEVICE)
    log_prob, mass = -torch.rand(rows, device=DEVICE), torch.rand(rows, device=DEVICE)
    log_prob[0] = torch.nan
    top1, following = drawn.flip(0).contiguous(), torch.arange(rows, device=DEVICE) + 50
    words = torch.zeros(4, rows, dtype=torch.int32, device=DEVICE)
    want_token, want_position = token.clone(), position.clone()
    want_token[slot[:live]], want_position[slot[:live]] = drawn[:live], following[:live]
    decode_io.scatter(slot, (drawn, log_prob, top1, mass), following, token, position, words, null)
    assert torch.equal(token, want_token)
    assert torch.equal(position, want_position)
    assert torch.equal(words[0].long(), drawn)
    assert torch.equal(words[1], log_prob.view(torch.int32))
    assert torch.equal(words[2].long(), top1)
    assert torch.equal(words[3], mass.view(torch.int32))
