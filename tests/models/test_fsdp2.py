"""The contract survives real FSDP2: sharding, mixed precision, cast_forward_inputs, autocast, checkpointing."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils._pytree import tree_flatten

from verl_tim.models import apply_contract

from .fsdp_worker import CASES, LENGTHS, main
from .tiny import tiny_model


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


PER_CASE = 3 * sum(n - 1 for n in LENGTHS)


class _Results(list):
    put = list.append


def test_one_rank():
    results = _Results()
    main(0, 1, _free_port(), CASES, results)
    assert results == [(0, len(CASES) * PER_CASE)]


def test_two_ranks():
    context = mp.get_context("spawn")
    results = context.Queue()
    mp.spawn(main, args=(2, _free_port(), CASES[:3], results), nprocs=2, join=True)
    assert sorted(results.get() for _ in range(2)) == [(0, 3 * PER_CASE), (1, 3 * PER_CASE)]


@pytest.mark.parametrize("padded", [False, True])
def test_fsdp_finds_the_output_and_no_view_of_it(padded):
    """FSDP2 gathers the root's parameters for the backward by hooks on outputs: lost on views and unknown classes."""
    model = tiny_model("qwen3")
    apply_contract(model)
    tokens = torch.arange(1, 9)[None]
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens) if padded else None)
    leaves = tree_flatten(output)[0]
    assert [leaf.shape for leaf in leaves] == [tokens.shape] * 2
    assert not any(leaf._is_view() for leaf in leaves)
