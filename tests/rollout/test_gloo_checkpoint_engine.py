"""Weights over gloo: a sender and two receivers, each in a thread with a group of its own."""

from __future__ import annotations

import asyncio
import builtins
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_tim.rollout import gloo_checkpoint_engine
from verl_tim.rollout.gloo_checkpoint_engine import GlooCheckpointEngine, decoded, encoded
from verl_tim.rollout.weights import Bucket, Entry, WeightStreamError
from verl_tim.training.pairing import IdentifiedWeights, card_with

RECEIVERS = 2


def tensors(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    made = {f"layer.{n}": torch.randn(37 + n, 11, generator=generator) * scale for n in range(5)}
    return {**made, "large": torch.randn(700, 9, generator=generator) * scale, "ids": torch.arange(5)}


@pytest.fixture
def group(monkeypatch):
    """Engines that have met: the actor's master, an actor that stands outside, the receivers."""
    monkeypatch.setattr(gloo_checkpoint_engine.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    actors = [GlooCheckpointEngine(bucket_size=4096, is_master=rank == 0) for rank in range(2)]
    rollout = [GlooCheckpointEngine(bucket_size=4096) for _ in range(RECEIVERS)]
    everyone = (*actors, *rollout)
    for update in range(2):  # verl makes the group anew for every update
        metadata = [engine.prepare() for engine in everyone]
        sides = GlooCheckpointEngine.build_topology(len(actors), len(rollout), metadata)
        arguments = [
            {name: values[at] for name, values in side.items()}
            for side, engines in zip(sides, (actors, rollout), strict=True)
            for at in range(len(engines))
        ]
        with ThreadPoolExecutor(len(everyone)) as pool:
            meetings = [
                pool.submit(engine.init_process_group, **its) for engine, its in zip(everyone, arguments, strict=True)
            ]
            for meeting in meetings:
                meeting.result(60)
        if update == 0:
            for engine in everyone:
                engine.finalize()
    return actors, rollout


async def received(engine):
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


def transfer(group, stream):
    """What each receiver got, or the error of each."""
    actors, rollout = group
    outside: list[str] = []

    def pulled():
        for name, tensor in stream():
            outside.append(name)
            yield name, tensor

    jobs = [lambda: asyncio.run(actors[0].send_weights(stream()))]
    jobs += [lambda engine=engine: asyncio.run(received(engine)) for engine in rollout]
    jobs += [lambda: asyncio.run(actors[1].send_weights(pulled()))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.exception(60) or future.result() for future in futures], outside


def test_it_is_registered():
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine


def test_every_receiver_gets_every_bit_and_every_actor_pulls_the_stream(group):
    want = tensors()
    (sender, *others), outside = transfer(group, lambda: iter(want.items()))
    assert sender is None
    for got in others[:RECEIVERS]:
        assert list(got) == list(want)
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor), name
    assert outside == list(want), "pulling is a collective of all actor ranks"


CARD = {"process": "actor 0", "contract_id": "chunk64/cpu-e/bfloat16/1", "versions": {"torch": "2.13.0"}}


@pytest.mark.parametrize("card", [CARD, None], ids=["card", "none"])
def test_the_senders_card_comes_before_its_weights(group, card):
    actors, rollout = group
    want = tensors()
    sent = iter(want.items()) if card is None else IdentifiedWeights(want.items(), card)

    async def taken(engine):
        weights = engine.receive_weights()
        said = await card_with(weights)
        return said, [name async for name, _ in weights]

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(lambda: asyncio.run(actors[0].send_weights(sent)))]
        futures += [pool.submit(lambda engine=engine: asyncio.run(taken(engine))) for engine in rollout]
        _, *got = [future.result(60) for future in futures]
    assert got == [(card, list(want))] * RECEIVERS


def test_a_sender_that_fails_tells_the_receivers(group):
    def broken():
        yield from list(tensors().items())[:3]
        raise ValueError("planted: the gather broke")

    (sender, *others), _ = transfer(group, broken)
    assert isinstance(sender, ValueError)
    for error in others[:RECEIVERS]:
        assert isinstance(error, WeightStreamError)
        assert "planted: the gather broke" in str(error)


class Planted:
    """As a pickle, it runs what it was told."""

    def __reduce__(self):
        return exec, ("import builtins; builtins.planted = True",)


def test_a_pickle_from_whoever_reached_the_port_is_not_read():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(WeightStreamError, match="no bucket of weights"):
            decoded(pickle.dumps(Planted(), protocol=protocol), 64)
    assert not hasattr(builtins, "planted")


def test_a_bucket_an_error_and_the_end_come_back_as_they_were():
    entry = Entry("layer.0", (3, 2), torch.bfloat16, 0, 12, 0)
    assert decoded(encoded(Bucket(4, [entry])), 12) == Bucket(4, [entry])
    assert decoded(encoded("ValueError: planted \u00e9"), 0) == "ValueError: planted \u00e9"
    assert decoded(encoded(None), 0) is None
    assert decoded(encoded(CARD), 0) == CARD


@pytest.mark.parametrize(
    "header",
    [
        [],
        5,
        {},
        {"number": 0},
        {"card": {"process": "actor 0"}},
        {"card": 3},
        {"number": "first", "entries": []},
        {"number": 0, "entries": [["w", [3], "float32", 0]]},
        {"number": 0, "entries": [["w", [3], "load", 0, 12, 0]]},
        {"number": 0, "entries": [["w", [4], "float32", 0, 16, 0]]},
        {"number": 0, "entries": [["w", [1], "float32", -4, 4, 0]]},
    ],
    ids=str,
)
def test_a_header_that_names_no_bucket_is_refused(header):
    with pytest.raises(WeightStreamError, match="no bucket of weights"):
        decoded(json.dumps(header).encode(), 12)
