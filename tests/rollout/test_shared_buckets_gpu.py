"""Weights from one process's GPU memory into an engine in another, through two shared buckets."""

from __future__ import annotations

import asyncio

import pytest
import torch

from verl_tim.engine import Engine, EngineConfig
from verl_tim.models.weights import checkpoint_weights
from verl_tim.rollout.shared_buckets import SharedBuffers, device_identity, pack_shared
from verl_tim.rollout.weights import Unpacker, send

pytestmark = pytest.mark.gpu

BUCKET = 8 << 20  # bytes: the embedding is spread over many, most layers share one


def _small_sender(pipe) -> None:
    """The process of a trainer whose weights fit one bucket; tells what it holds of the device after each update."""
    device = torch.device("cuda", 0)

    async def deliver(bucket):
        pipe.send(bucket)
        assert await asyncio.to_thread(pipe.recv) == "done"

    def packing(weights, nbytes, dtype):
        return pack_shared(weights, nbytes, dtype, device)

    for number in range(3):
        stream = iter([("w", torch.full((1 << 20,), float(number), device=device))])
        asyncio.run(send(stream, bucket_bytes=BUCKET, dtype=torch.bfloat16, deliver=deliver, packing=packing))
        pipe.send("sent")
        pipe.recv()  # the receiver has let go
        torch.cuda.ipc_collect()
        pipe.send(torch.cuda.memory_allocated())


def test_no_update_leaves_memory_behind_that_nobody_uses():
    """A buffer that was shared and never opened stayed: two GiB a step for models of less than a bucket."""
    pytest.importorskip("verl")
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_small_sender, args=(theirs,))
    process.start()
    held = []
    try:
        for number in range(3):
            buffers, unpacker = SharedBuffers(torch.device("cuda", 0)), Unpacker()
            assert ours.poll(120), "the sender is silent"
            bucket = ours.recv()
            for _, tensor in unpacker.unpack(bucket, buffers.data(bucket)):
                assert (tensor == number).all()
            del tensor
            buffers.done()
            ours.send("done")
            assert ours.recv() == "sent"
            buffers.close()
            ours.send("closed")
            held.append(ours.recv())
    finally:
        process.join(60)
    assert process.exitcode == 0
    assert held[2] == held[1] == held[0] < BUCKET, held


def _trainer(folder: str, pipe) -> None:
    """The sender's process."""
    device = torch.device("cuda", 0)

    async def deliver(bucket):
        pipe.send(bucket)
        answer = await asyncio.to_thread(pipe.recv)
        assert answer == "done", answer

    def packing(weights, nbytes, dtype):
        return pack_shared(weights, nbytes, dtype, device)

    stream = ((name, tensor.to(device)) for name, tensor in checkpoint_weights(folder))
    sent = asyncio.run(send(stream, bucket_bytes=BUCKET, dtype=torch.bfloat16, deliver=deliver, packing=packing))
    pipe.send((device_identity(device), sent))
    pipe.recv()  # buffers stay until the receiver has let go


def test_an_engine_loads_out_of_another_process_memory(tmp_path):
    pytest.importorskip("verl")
    from verl_tim.tasks.random_model import save_random_model

    folder = tmp_path / "model"
    save_random_model("qwen3-0.6b", folder, layers=2, device="cuda")
    config = EngineConfig(str(folder), device="cuda:0", kv_cache_tokens=2048, max_num_seqs=4, max_model_len=512)
    engine = Engine(config)
    want = engine.weight_checksum()
    engine.update_weights(((name, torch.zeros_like(t)) for name, t in checkpoint_weights(folder)), 1)
    assert engine.weight_checksum() != want

    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_trainer, args=(str(folder), theirs))
    process.start()
    buffers = SharedBuffers(torch.device("cuda", 0))
    told = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def stream():
        unpacker = Unpacker()
        while True:
            assert ours.poll(120), "the sender is silent"
            message = ours.recv()
            if isinstance(message, tuple):
                unpacker.finish()
                told.append(message)
                return
            yield from unpacker.unpack(message, buffers.data(message))
            buffers.done()
            ours.send("done")

    try:
        engine.update_weights(stream(), 2)
        most = torch.cuda.max_memory_allocated() - before
        buffers.close()
    finally:
        ours.send("end")
        process.join(60)
    assert process.exitcode == 0
    identity, sent = told[0]
    assert identity == device_identity(torch.device("cuda", 0)) != ""
    assert sent > 4 * BUCKET
    assert engine.weight_checksum() == want
    largest = 151936 * 1024 * 2  # the embedding, which many buckets bring
    assert most < largest + 4 * BUCKET, "more than one tensor was held beside the model"
