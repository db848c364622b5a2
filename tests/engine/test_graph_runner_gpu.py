"""The graph runner on a GPU: the bits of a request are its own, whatever was recorded, launched ahead, or put to sleep.

The reference is every request alone, eager, in one chunk. Then everything else: all graph sizes, staggered arrivals,
odd chunks, preemption, prefix hits, cuts beside none, a weight update, sleep and waking. Last: no step makes the host
wait.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from tests.engine.support import random_prompts
from verl_tim.engine import Engine, EngineConfig, SamplingParams
from verl_tim.models import load_model_config
from verl_tim.models.weights import checkpoint_weights
from verl_tim.numerics.attention import resolve_attention
from verl_tim.numerics.contract import ContractError
from verl_tim.tasks.random_model import save_random_model

pytestmark = pytest.mark.gpu

VOCAB = 151936
PROMPTS = [*random_prompts(23, 1, 90, VOCAB, seed=3), random_prompts(1, 700, 700, VOCAB, seed=4)[0]]
PROMPTS[7] = PROMPTS[6][:48] + PROMPTS[7]
SHAPES = [("qwen3-0.6b", "fa3"), ("qwen3-0.6b", "chunk64"), ("qwen3-30b-a3b", "fa3"), ("qwen3-30b-a3b", "chunk64")]


def params(index: int, *, plain: bool = False) -> SamplingParams:
    cuts = {} if plain else {"top_k": [-1, 5, -1][index % 3], "top_p": [1.0, 1.0, 0.9, 1.0][index % 4]}
    return SamplingParams(
        temperature=[1.0, 0.6, 1.3, 0.0][index % 4],
        max_tokens=9 + 3 * index % 40,
        ignore_eos=True,
        record_routes=index % 2 == 0,
        **cuts,
    )


@pytest.fixture(scope="module", params=SHAPES, ids=lambda case: "/".join(case))
def case(request, tmp_path_factory):
    shape, attention = request.param
    folder = tmp_path_factory.mktemp("model") / "model"
    save_random_model(shape, folder, layers=2, device="cuda")
    try:
        resolve_attention(attention, "cuda", load_model_config(folder).head_dim)
    except ContractError as error:
        pytest.skip(str(error))
    return folder, attention


def make(case, **settings) -> Engine:
    folder, attention = case
    defaults = {"kv_cache_tokens": 16384, "max_num_seqs": 40, "max_model_len": 1024}
    return Engine(EngineConfig(str(folder), device="cuda:0", attention=attention, **{**defaults, **settings}))


def allocated() -> int:
    """Bytes of PyTorch's, once other tests' engines are gone (their parts point at each other)."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def bits(output) -> tuple:
    """Tokens, bits of their log-probs, likeliest tokens, and routes where they were asked for."""
    routes = None if output.routes_TLK is None else output.routes_TLK.tolist()
    return output.token_ids, np.array(output.log_probs, np.float32).view(np.int32).tolist(), output.top1_ids, routes


def run(engine: Engine, indices, *, every: int = 0, plain: bool = False) -> dict[int, tuple]:
    """Serve requests, all at once or one every so many steps."""
    outputs, left, steps = {}, list(indices), 0
    while left or engine.has_work():
        while left and (not every or steps % every == 0):
            index = left.pop(0)
            engine.add(str(index), PROMPTS[index % len(PROMPTS)], params(index, plain=plain))
            if every:
                break
        for output in engine.step():
            outputs[int(output.request_id)] = bits(output)
        steps += 1
    engine.audit()
    return outputs


@pytest.fixture(scope="module")
def reference(case):
    engine = make(case, enforce_eager=True)
    outputs = {}
    for index in range(len(PROMPTS)):
        outputs |= run(engine, [index])
    log_probs = np.concatenate([np.array(o[1], np.int32).view(np.float32) for o in outputs.values()])
    assert np.isfinite(log_probs).all()
    assert log_probs.std() > 0.5, "the logits are meant to be peaked"
    moe = load_model_config(case[0]).moe
    for index, (token_ids, *_, routes) in outputs.items():
        assert (routes is not None) == (moe is not None and index % 2 == 0)
        if routes is not None:
            routes_TLK = np.array(routes)
            assert routes_TLK.shape == (len(PROMPTS[index]) + len(token_ids) - 1, len(moe.layers), moe.top_k)
            assert routes_TLK.min() >= 0
            assert routes_TLK.max() < moe.num_experts
            assert (np.diff(np.sort(routes_TLK), axis=-1) > 0).all(), "an expert twice in one place"
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"every": 3},
        {"max_num_batched_tokens": 61, "every": 2},
        {"max_prefill_chunk": 7},
        {"page_size": 64},
        {"kv_cache_tokens": 768, "page_size": 4, "watermark": 0.0, "preempts": True},
        {"enable_prefix_cache": True, "max_num_batched_tokens": 97},
        {"max_num_seqs": 5},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_no_schedule_changes_a_bit(case, reference, settings):
    settings = dict(settings)
    every, preempts = settings.pop("every", 0), settings.pop("preempts", False)
    engine = make(case, **settings)
    got = run(engine, range(len(PROMPTS)), every=every)
    for index, want in reference.items():
        assert got[index] == want, f"request {index}"
    assert (engine.stats().preemptions > 0) >= preempts


def test_every_graph_size_gives_the_same_bits(case, reference):
    engine = make(case)
    sizes = engine.describe()["decode_graphs"]
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == 40
    asked = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)
    want = None
    for size in sizes:
        for rows in {size, max(1, size - 1)}:
            for index in range(rows):
                engine.add(f"{size}-{index}", PROMPTS[index % 3], asked)
            outputs = {}
            while engine.has_work():
                outputs |= {output.request_id: bits(output) for output in engine.step()}
            first = outputs[f"{size}-0"]
            want = want or first
            assert first == want, f"{rows} rows"


def test_updates_and_sleep_keep_the_bits(case, reference):
    base = allocated()
    engine = make(case)
    run(engine, range(6))
    engine.update_weights(checkpoint_weights(case[0]), 1)
    assert engine.describe()["decode_graphs"], "an update in place keeps the recordings"
    assert run(engine, range(6)) == {index: reference[index] for index in range(6)}
    awake = allocated() - base
    engine.release_kv_cache()
    engine.release_weights()
    assert allocated() - base < 0.2 * awake, "sleep holds on to memory"
    engine.resume_kv_cache()
    engine.update_weights(checkpoint_weights(case[0]), 2)
    assert run(engine, range(len(PROMPTS))) == reference
    assert engine.describe()["decode_graphs"], "the needed sizes were recorded again"


def test_no_step_makes_the_host_wait(case):
    """torch raises for every hidden synchronisation; the wait for a mark is not one of those."""
    engine = make(case)
    for mode in ("default", "error"):  # what a shape brings with its first step (compiling, trying algorithms) may wait
        for index in range(12):
            engine.add(str(index), PROMPTS[index], params(index))
        for _ in range(4):
            engine.step()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for index in range(12, 16):  # mixed steps too
                engine.add(str(index), PROMPTS[index], params(index))
            for _ in range(8):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while engine.has_work():
            engine.step()


def test_the_share_of_the_memory_is_kept(case):
    allocated()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    engine = make(case, kv_cache_tokens=None, gpu_memory_utilization=0.3, max_num_seqs=256, max_model_len=40000)
    for index in range(64):
        engine.add(str(index), PROMPTS[index % len(PROMPTS)], params(index))
    while engine.has_work():
        engine.step()
    held = free - torch.cuda.mem_get_info()[0]
    assert held <= 0.3 * total
    assert held > 0.2 * total, "the pool is smaller than what was granted"
