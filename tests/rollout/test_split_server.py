"""A server whose engine runs on several ranks: all trainer ranks of the replica send one update together."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout.shared_files import open_file, share_file
from tests.rollout.test_server import SAMPLED, make
from verl_tim.engine import EngineStateError
from verl_tim.rollout import server as server_module
from verl_tim.rollout.senders import Gathering, SendersError
from verl_tim.rollout.shared_buckets import BucketReader, pack_shared
from verl_tim.rollout.weights import pack, send

pytestmark = pytest.mark.asyncio

RANKS = 2


@pytest.fixture(scope="module")
def weights(folder):
    return load_file(f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.training.tiny import model_folder

    return str(model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.fixture(scope="module")
def whole(folder):
    """The same server on one rank."""
    made = make(folder)
    yield made
    made.engine.shutdown()


@pytest.fixture(scope="module")
def server(folder):
    made = make(folder, tensor_model_parallel_size=RANKS)
    yield made
    made.engine.shutdown()


async def sender(server, rank: int, weights, version: int, identity: str = "", packing=None) -> int:
    """What the adapter of one trainer rank does."""
    try:
        shares = await server.begin_weights(version, rank, identity)
        if shares or rank == 0:
            await send(
                iter(weights.items()), bucket_bytes=1 << 13, dtype=torch.bfloat16, packing=packing or pack,
                deliver=lambda bucket: server.receive_weights(bucket, rank),
            )  # fmt: skip
    except Exception as error:
        await server.abandon_weights(str(error))
        raise
    return await server.finish_weights(rank)


async def update(server, weights, version, *, of_rank=None):
    """All ranks; `of_rank`: what that rank sends, where not the same."""
    of_rank = of_rank or {}
    senders = [sender(server, rank, of_rank.get(rank, weights), version) for rank in range(RANKS)]
    return await asyncio.wait_for(asyncio.gather(*senders, return_exceptions=True), timeout=60)


async def tokens(server, request_id="a"):
    output = await server.generate([5, 6], {**SAMPLED, "seed": 3}, request_id)
    return output.token_ids, output.log_probs


async def test_rank_0_sends_for_all_through_the_host(server, whole, weights):
    assert await update(server, weights, 4) == [4, 4]
    await sender(whole, 0, weights, 4)
    assert await server.weight_checksum() == await whole.weight_checksum()
    assert await tokens(server) == await tokens(whole)
    facts = await server.describe()
    # every rank answers, from a process of its own
    reports = await server.observe(("PATH",))
    assert len(reports) == facts["tensor_parallel"] * facts["pipeline_parallel"]
    assert all(report["digests"] == reports[0]["digests"] and report["variables"] for report in reports)
    assert (facts["tensor_parallel"], facts["pipeline_parallel"]) == (2, 1)


async def test_each_rank_reads_the_buckets_of_its_own_sender(server, whole, weights, monkeypatch, tmp_path):
    """In device memory on a GPU; files that are mapped stand for it here."""
    monkeypatch.setattr(server_module, "device_identity", lambda device: "this GPU")
    monkeypatch.setattr(server_module, "BucketReader", lambda: BucketReader(open_file))
    moved = {name: tensor * 1.5 for name, tensor in weights.items()}

    def packing(rank):
        share = functools.partial(share_file, tmp_path / f"rank{rank}")
        return lambda stream, nbytes, dtype: pack_shared(stream, nbytes, dtype, torch.device("cpu"), share=share)

    senders = [sender(server, rank, moved, 5, "this GPU", packing(rank)) for rank in range(RANKS)]
    assert await asyncio.wait_for(asyncio.gather(*senders), 60) == [5, 5]
    await sender(whole, 0, moved, 5)
    assert await server.weight_checksum() == await whole.weight_checksum()
    assert await tokens(server) == await tokens(whole)
    assert len(list(tmp_path.iterdir())) == 2 * RANKS, "two buffers of each sender"


async def test_a_bad_stream_fails_every_rank_and_the_next_one_heals(server, whole, weights):
    spoiled = {**weights, "model.norm.weight": torch.ones(3)}
    results = await update(server, spoiled, 6)
    assert "model.norm.weight" in str(results[0])
    assert all(isinstance(result, Exception) for result in results)
    with pytest.raises(EngineStateError, match="failed"):
        await server.generate([5], dict(SAMPLED), "b")
    assert await update(server, weights, 7) == [7, 7]
    await sender(whole, 0, weights, 7)
    assert await tokens(server, "c") == await tokens(whole, "c")


async def test_a_rank_that_gives_up_frees_the_others(server, weights):
    waiting = asyncio.ensure_future(sender(server, 1, weights, 8))
    await asyncio.sleep(0.01)
    await server.abandon_weights("rank 0 died")
    with pytest.raises(SendersError, match="rank 0 died"):
        await asyncio.wait_for(waiting, 10)
    assert await update(server, weights, 9) == [9, 9]


async def test_a_rank_that_does_not_come_to_the_end_frees_the_engine(server, weights, monkeypatch):
    """Rank 0 has sent everything; rank 1 is lost before it says that it has, too."""

    async def send_all() -> None:
        packing = pack(iter(weights.items()), 1 << 13, torch.bfloat16)
        async for bucket in packing:
            await server.receive_weights(bucket, 0)

    await asyncio.gather(*[server.begin_weights(20, rank, "") for rank in range(RANKS)])
    await send_all()
    with monkeypatch.context() as patched:
        patched.setattr("verl_tim.rollout.senders.TIMEOUT", 0.05)
        with pytest.raises(SendersError, match=r"finish_weights: after 0 s rank \[1\] has not come"):
            await server.finish_weights(0)
    await asyncio.wait_for(server.stats(), 10)
    with pytest.raises(EngineStateError, match=r"rank \[1\] has not come"):
        await server.generate([5], dict(SAMPLED), "none")
    assert await update(server, weights, 21) == [21, 21]


async def test_an_update_that_nobody_ended_gives_way_to_the_next_of_all_ranks(server, weights):
    await asyncio.gather(*[server.begin_weights(22, rank, "") for rank in range(RANKS)])
    assert await update(server, weights, 23) == [23, 23]


async def test_sleep_and_wake(server, weights):
    await asyncio.gather(*[server.sleep() for _ in range(RANKS)])  # every rank's adapter asks
    await asyncio.gather(*[server.wake_up(["weights"]) for _ in range(RANKS)])
    assert await update(server, weights, 10) == [10, 10]
    await asyncio.gather(*[server.wake_up(["kv_cache"]) for _ in range(RANKS)])
    assert len((await tokens(server, "d"))[0]) > 0


async def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr("verl_tim.rollout.senders.TIMEOUT", 0.02)
    gathering = Gathering(3, "begin_weights")
    assert not gathering.come(1)
    with pytest.raises(SendersError, match=r"rank \[0, 2\] has not come"):
        await gathering.result()
    with pytest.raises(SendersError, match="rank 1 came twice"):
        gathering.come(1)
    with pytest.raises(SendersError, match="rank 3 is none of 3"):
        gathering.come(3)
