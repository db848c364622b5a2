"""The weight stream: what goes in comes out, bucket by bucket, and no failure is lost or hangs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.rollout.shared_buckets import SharedBuffers, device_identity, pack_shared
from verl_tim.rollout.weights import Bucket, Unpacker, WeightStreamError, pack, send

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


def tensors(shapes, dtypes):
    generator = torch.Generator().manual_seed(0)
    for number, shape in enumerate(shapes):
        dtype = dtypes[number % len(dtypes)]
        yield f"layer.{number}.weight", torch.randn(shape, generator=generator).to(dtype)


async def through(stream, bucket_bytes, dtype):
    unpacker, arrived, buckets = Unpacker(), [], []
    async for bucket in pack(stream, bucket_bytes, dtype):
        buckets.append(bucket)
        # cloned, as a model copies: the views are only good until the next bucket
        arrived.extend((name, tensor.clone()) for name, tensor in unpacker.unpack(bucket))
    unpacker.finish()
    return arrived, buckets


@settings(max_examples=60)
@given(shapes=SHAPES, bucket_bytes=st.integers(64, 600), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_round_trip_at_any_bucket_size(shapes, bucket_bytes, dtype):
    sent = list(tensors(shapes, (torch.float32, torch.bfloat16)))
    arrived, buckets = asyncio.run(through(iter(sent), bucket_bytes, dtype))
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, got), (_, want) in zip(arrived, sent, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))
    assert all(len(bucket.data) <= bucket_bytes for bucket in buckets)


def test_integer_tensors_keep_their_dtype():
    arrived, _ = asyncio.run(through(iter([("counter", torch.arange(5))]), 64, torch.bfloat16))
    assert arrived[0][1].dtype == torch.int64
    assert arrived[0][1].tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_larger_than_a_bucket_is_spread():
    big = torch.randn(1000)
    arrived, buckets = asyncio.run(
        through(iter([("a", torch.ones(3)), ("big", big), ("b", torch.ones(2))]), 512, torch.float32)
    )
    assert len(buckets) > 7
    assert torch.equal(dict(arrived)["big"], big)
    assert dict(arrived)["b"].tolist() == [1, 1]


def test_an_asynchronous_stream():
    async def stream():
        for item in tensors([(3,), (2, 2)], (torch.float32,)):
            await asyncio.sleep(0)
            yield item

    arrived, _ = asyncio.run(through(stream(), 1024, torch.float32))
    assert len(arrived) == 2


def test_a_bucket_out_of_order_is_refused():
    async def swapped():
        buckets = [bucket async for bucket in pack(iter([("big", torch.ones(500))]), 512, torch.float32)]
        unpacker = Unpacker()
        list(unpacker.unpack(buckets[0]))
        list(unpacker.unpack(buckets[2]))

    with pytest.raises(WeightStreamError, match="bucket 2 arrived where bucket 1 was due"):
        asyncio.run(swapped())


def test_a_stream_that_ends_within_a_tensor_is_refused():
    async def cut():
        buckets = [bucket async for bucket in pack(iter([("big", torch.ones(500))]), 512, torch.float32)]
        unpacker = Unpacker()
        list(unpacker.unpack(buckets[0]))
        unpacker.finish()

    with pytest.raises(WeightStreamError, match="ended within big"):
        asyncio.run(cut())


class Gather:
    """A generator whose every item is a collective: a rank that stops pulling leaves the others waiting."""

    def __init__(self, items, fail_at=None):
        self.items, self.fail_at, self.pulled = items, fail_at, 0

    def __iter__(self):
        for number in range(self.items):
            if number == self.fail_at:
                raise RuntimeError("the gather failed")
            self.pulled += 1
            yield f"w{number}", torch.ones(100)


def test_a_failing_receiver_surfaces_after_the_stream_is_drained():
    gather, delivered = Gather(20), []

    async def deliver(bucket):
        delivered.append(bucket.number)
        if bucket.number == 2:
            raise ValueError("unknown tensor w7")

    with pytest.raises(ValueError, match="unknown tensor w7"):
        asyncio.run(send(gather, bucket_bytes=512, dtype=torch.float32, deliver=deliver))
    assert gather.pulled == 20
    assert max(delivered) <= 3, "buckets were sent on after the receiver had failed"


def test_a_receiver_that_fails_on_the_last_bucket_surfaces():
    async def deliver(bucket):
        raise ValueError("misshapen")

    with pytest.raises(ValueError, match="misshapen"):
        asyncio.run(send(Gather(1), bucket_bytes=4096, dtype=torch.float32, deliver=deliver))


def test_an_error_of_the_stream_surfaces():
    async def deliver(bucket):
        return None

    with pytest.raises(RuntimeError, match="the gather failed"):
        asyncio.run(send(Gather(5, fail_at=3), bucket_bytes=512, dtype=torch.float32, deliver=deliver))


def test_bytes_sent_are_counted_and_one_bucket_is_in_flight_at_a_time():
    running, most = 0, 0

    async def deliver(bucket):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    sent = asyncio.run(send(Gather(10), bucket_bytes=1024, dtype=torch.bfloat16, deliver=deliver))
    assert sent >= 10 * 200
    assert most == 1


class Exchange:
    """Stands for CUDA IPC: the receiver opens the sender's very buffer, by its handle."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.opened = 0

    def share(self, buffer: torch.Tensor) -> tuple[int]:
        self.buffers.append(buffer)
        return (len(self.buffers) - 1,)

    def open(self, handle, device) -> torch.Tensor:
        self.opened += 1
        return self.buffers[handle[0]]


async def through_shared(stream, bucket_bytes, dtype):
    """As a server does it: late, while the next bucket is packed; done with a bucket only when it says so."""
    exchange, unpacker, arrived, numbers = Exchange(), Unpacker(), [], []
    buffers = SharedBuffers(torch.device("cpu"), exchange.open)

    async def deliver(bucket):
        await asyncio.sleep(0)
        numbers.append(bucket.number)
        assert bucket.data is None
        for name, tensor in unpacker.unpack(bucket, buffers.data(bucket)):
            await asyncio.sleep(0)
            arrived.append((name, tensor.clone()))
        buffers.done()

    def packing(weights, nbytes, kind):
        return pack_shared(weights, nbytes, kind, torch.device("cpu"), share=exchange.share)

    sent = await send(stream, bucket_bytes=bucket_bytes, dtype=dtype, deliver=deliver, packing=packing)
    unpacker.finish()
    assert len(exchange.buffers) == exchange.opened == min(2, len(numbers)), "a buffer nobody opens is never freed"
    return arrived, numbers, sent


@settings(max_examples=60)
@given(shapes=SHAPES, bucket_bytes=st.integers(64, 600), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_round_trip_through_shared_buffers(shapes, bucket_bytes, dtype):
    weights = list(tensors(shapes, (torch.float32, torch.bfloat16)))
    arrived, numbers, sent = asyncio.run(through_shared(iter(weights), bucket_bytes, dtype))
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, got), (_, want) in zip(arrived, weights, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))
    assert numbers == list(range(len(numbers)))
    assert sent == sum(want.numel() for _, want in weights) * dtype.itemsize


def test_a_bucket_without_bytes_is_refused():
    with pytest.raises(WeightStreamError, match="bucket 3 holds neither data nor a shared buffer"):
        SharedBuffers(torch.device("cpu")).data(Bucket(3))


def test_a_cpu_shares_with_nobody():
    assert device_identity(torch.device("cpu")) == ""
