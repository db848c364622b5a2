"""The runner that launches ahead: same outputs as the plain one, few submissions, late stops, memory, recordings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import check_output, fake_engine, random_prompts, run_all
from tests.engine.tiny_models import save
from verl_tim.engine import Engine, EngineConfig, EngineConfigError, SamplingParams
from verl_tim.engine.graphs import bucket_sizes
from verl_tim.engine.memory import GIB, MemoryUse
from verl_tim.engine.runner import ModelRunner
from verl_tim.engine.staging import Staging

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def parameters(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=[0.0, 1.0, 0.7][index % 3],
        top_k=[-1, 5][index % 2],
        max_tokens=1 + 3 * index,
        ignore_eos=index % 4 == 0,
    )


def outputs_of(device, **settings):
    engine = fake_engine(device=device, **settings)
    for index, prompt in enumerate(random_prompts(20, 1, 50, VOCAB)):
        engine.add(str(index), prompt, parameters(index))
    return run_all(engine), engine.stats()


@pytest.mark.parametrize("early", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_tokens": 2048},
        {"kv_cache_tokens": 2048, "enforce_eager": True},
        {"kv_cache_tokens": 2048, "max_num_seqs": 3},
        {"kv_cache_tokens": 2048, "max_num_seqs": 20, "max_num_batched_tokens": 21},
        {"kv_cache_tokens": 2048, "max_prefill_chunk": 1},
        {"kv_cache_tokens": 2048, "enable_prefix_cache": True, "page_size": 3},
        {"kv_cache_tokens": 160, "watermark": 0.0, "max_num_seqs": 20, "preempts": True},
        {"kv_cache_tokens": 160, "watermark": 0.0, "max_num_batched_tokens": 9, "page_size": 1, "preempts": True},
    ],
    ids=str,
)
def test_same_outputs_as_the_plain_runner(settings, early):
    settings = dict(settings)
    preempts = settings.pop("preempts", False)
    plain, plain_stats = outputs_of(None, **settings)
    ahead, stats = outputs_of(DeferredDevice(early=early), **settings)
    for name, output in plain.items():
        got = ahead[name]
        assert (got.token_ids, got.log_probs, got.top1_ids, got.kept_mass, got.finish_reason) == (
            output.token_ids,
            output.log_probs,
            output.top1_ids,
            output.kept_mass,
            output.finish_reason,
        )
    assert ahead.keys() == plain.keys()
    assert stats.drawn_tokens == plain_stats.drawn_tokens
    assert (stats.preemptions > 0) == (plain_stats.preemptions > 0) == preempts
    # Only what ended by a token ran once too often.
    assert 0 < stats.overrun_tokens <= stats.finished["stop"]
    if not preempts:
        assert stats.decode_tokens == plain_stats.decode_tokens + stats.overrun_tokens


def test_the_host_is_a_step_ahead():
    device = DeferredDevice()
    engine = fake_engine(device=device)
    engine.add("a", [5, 6, 7], LONG)
    ran = device.ran
    assert engine.step() == []
    assert device.ran == ran, "the first step was waited for"
    engine.step()
    assert ran < device.ran < device.submitted, "the second step was waited for, or the first was not"
    assert engine.stats().drawn_tokens == 1
    engine.drain()
    assert device.ran == device.submitted
    assert engine.stats().drawn_tokens == 2
    engine.audit()


def test_a_steady_decode_sends_page_numbers_only():
    device = DeferredDevice()
    engine = fake_engine(device=device, page_size=16)
    sent = []
    put = Staging.put

    def watched(self, array):
        sent.append(array.copy())
        return put(self, array)

    for index in range(5):
        engine.add(str(index), [5] * (3 + index), LONG)
    engine.step()
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "put", watched)
        submissions = []
        for _ in range(20):
            before = device.submitted, len(sent)
            engine.step()
            submissions.append((device.submitted - before[0], len(sent) - before[1]))
    # A replay and the copy of the results; where a sequence got a page: its number, its place, their copy.
    assert set(submissions) == {(2, 0), (4, 2)}
    assert sum(count for _, count in submissions) == 2 * 5, "each sequence crossed into its second page once"
    run_all(engine)


def test_the_end_by_length_is_known_beforehand():
    device = DeferredDevice()
    engine = fake_engine(device=device)
    engine.add("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))
    output = run_all(engine)["a"]
    stats = engine.stats()
    assert len(output.token_ids) == 3
    assert (stats.steps, stats.overrun_tokens, stats.decode_tokens) == (3, 0, 2)


def test_a_late_stop_costs_one_row_and_its_slot_may_be_taken_at_once():
    plain = fake_engine()
    plain.add("a", [9, 4], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    stop = run_all(plain)["a"].token_ids[3]
    asked = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, stop_token_ids=(stop,))
    engine = fake_engine(device=DeferredDevice(), max_num_seqs=1, kv_cache_tokens=64)
    for name in "abc":
        engine.add(name, [9, 4], asked)
    for output in run_all(engine).values():
        check_output(output, [9, 4], asked)
        assert output.finish_reason == "stop"
    assert engine.stats().overrun_tokens == 3


def test_broken_logits_end_one_request_a_step_late():
    model = FakeModel()
    model.poison = {3}
    engine = fake_engine(model, device=DeferredDevice())
    engine.add("bad", [3, 4], LONG)
    engine.add("good", [5, 4], LONG)
    outputs = run_all(engine)
    assert outputs["bad"].finish_reason == "error"
    assert "position 2 are not finite" in str(outputs["bad"].error)
    assert outputs["good"].finish_reason == "length"
    check_output(outputs["good"], [5, 4], LONG)


def test_a_weight_update_between_steps_keeps_the_recordings():
    device = DeferredDevice()
    engine = fake_engine(device=device)
    prompts = random_prompts(6, 2, 9, VOCAB)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, LONG)
    recorded = device.captures
    outputs = []
    for version in (1, 2):
        for _ in range(7):
            outputs += engine.step()
        engine.update_weights([("salt", torch.tensor(version))], version)
        engine.audit()
    outputs += run_all(engine).values()
    assert device.captures == recorded > 0
    for output in outputs:
        check_output(output, prompts[int(output.request_id)], LONG)
        assert sorted(set(output.weight_versions)) == [0, 1, 2]


def test_sleep_drops_the_recordings_and_waking_makes_the_needed_ones_again():
    device = DeferredDevice()
    engine = fake_engine(device=device, max_num_seqs=30)
    assert engine.describe()["decode_graphs"] == [8, 16, 24, 32]
    engine.add("a", [5, 6], LONG)
    for _ in range(5):
        engine.step()
    engine.release_kv_cache()
    engine.release_weights()
    assert device.live_captures == 0
    assert engine.describe()["decode_graphs"] == []
    engine.resume_kv_cache()
    engine.update_weights([("salt", torch.tensor(1))], 1)
    output = run_all(engine)["a"]
    check_output(output, [5, 6], LONG)
    assert engine.describe()["decode_graphs"] == [8]
    assert set(output.weight_versions) == {0, 1}


def test_an_abort_meets_no_step_halfway():
    engine = fake_engine(device=DeferredDevice())
    for name in ("long", "short"):
        engine.add(name, [5, 6], SamplingParams(max_tokens=30 if name == "long" else 2, ignore_eos=True))
    engine.step()
    engine.step()  # the second token of "short" is drawn by the step in flight
    outputs = engine.abort()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("long", "abort")]
    assert len(outputs[0].token_ids) == 2
    assert engine.has_work(), "an output waits to be fetched"
    assert [output.finish_reason for output in engine.step()] == ["length"]
    assert not engine.has_work()
    engine.audit()


def test_waiting_requests_cost_a_step_nothing():
    """A step's host work is counted, not timed: the same submissions and the same plan beside 3,000 waiting."""
    counts = []
    for waiting in (0, 3000):
        device = DeferredDevice()
        engine = fake_engine(device=device, max_num_seqs=4, kv_cache_tokens=1024)
        for index in range(4 + waiting):
            engine.add(str(index), [5, 6, 7], LONG)
        before = device.submitted
        for _ in range(20):
            engine.step()
        counts.append(device.submitted - before)
        assert engine.stats().num_waiting == waiting
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("most", "floor", "want"),
    [
        (1, 1, [1]),
        (6, 1, [1, 2, 4, 6]),
        (20, 1, [1, 2, 4, 8, 16, 20]),
        (20, 8, [8, 16, 24]),
        (3, 8, [8]),
    ],
)
def test_bucket_sizes(most, floor, want):
    assert bucket_sizes(most, floor) == want


def test_many_sequences_get_coarser_buckets():
    sizes = bucket_sizes(1024, 1)
    assert sizes[-1] == 1024
    assert {256, 272, 512, 544} <= set(sizes)
    assert not {264, 528} & set(sizes)


def memory(**changes) -> MemoryUse:
    values = {"total": 100, "free": 80, "held": 10, "activations": 4, "graphs": 1} | changes
    return MemoryUse(**{name: int(value * GIB) for name, value in values.items()})


def test_the_pool_gets_what_the_share_leaves():
    assert memory().kv_bytes(0.5) == int(50 * GIB) - int(15.25 * GIB)


def test_a_share_that_leaves_nothing_is_refused():
    with pytest.raises(EngineConfigError, match=r"gpu_memory_utilization=0.15 of 100.00 GiB leaves no room"):
        memory().kv_bytes(0.15)


def test_memory_that_others_hold_cannot_be_promised():
    with pytest.raises(EngineConfigError, match=r"only 14.75 GiB of the device are free"):
        memory(free=20).kv_bytes(0.5)


def test_a_pool_sized_by_measurement(tmp_path):
    folder = save("qwen3", tmp_path)
    device = DeferredDevice(free=6 << 30, total=8 << 30, peak=1 << 28)
    device.capture_bytes = 1 << 20
    # The two largest of 8, 16, 24 and 32 rows are recorded to measure: 1 MiB each.
    engine = Engine(
        EngineConfig(str(folder), gpu_memory_utilization=0.1, max_num_seqs=30, max_model_len=1000), device=device
    )
    page = ModelRunner.page_bytes(engine.model, 16)
    want = int(0.1 * (8 << 30)) - (1 << 28) - 4 * (1 << 20) - (256 << 20)
    limit = 30 * -(-1000 // 16)
    assert engine.stats().total_pages == min(want // page - 1, limit)
    assert device.live_captures == 4
    engine.add("a", [5, 6], SamplingParams(max_tokens=5))
    assert np.isfinite(run_all(engine)["a"].log_probs).all()


def test_a_share_of_a_gpu_means_nothing_on_a_cpu():
    with pytest.raises(EngineConfigError, match=r"gpu_memory_utilization=0.5 is a share of a GPU"):
        fake_engine(gpu_memory_utilization=0.5)


@pytest.mark.parametrize("growing", [False, True])
def test_a_packet_arrives_whole_in_one_copy_however_late_the_device_is(growing):
    device = DeferredDevice()
    staging = Staging(device, 256, depth=2)
    arrived = []
    for number in range(1, 7):
        length = 20 * number if growing else 20
        staging.begin(16 * length)
        there = staging.put(np.full(length, number, np.int64)), staging.put(np.full(length, -number, np.float32))
        before = device.submitted
        staging.send()
        assert device.submitted == before + 1
        device.submit(lambda there=there: arrived.append([part.unique().tolist() for part in there]))
    device.run_until(device.submitted)
    assert arrived == [[[number], [-number]] for number in range(1, 7)]
