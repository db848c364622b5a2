"""Real models: tokens and the bits of their log-probs are the request's own, whatever the engine was doing besides.

The reference of each model and dtype is every request alone in a fresh engine, computed in one chunk. Everything else
(company, chunks, pages, preemption, prefix hits, another replica, a restart) must give the same tokens and the same
fp32 bit patterns. Last, the trainer's forward over the finished sequences gives these patterns again.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.support import random_prompts, run_all
from tests.engine.tiny_models import EOS, VOCAB, hf_model, save
from verl_tim.engine import Engine, EngineConfig, SamplingParams
from verl_tim.models import apply_contract

CASES = [("qwen3", "bfloat16"), ("qwen3", "float32"), ("qwen3_moe", "bfloat16")]
PROMPTS = [*random_prompts(11, 1, 60, VOCAB, seed=3), random_prompts(1, 530, 530, VOCAB, seed=4)[0]]
PROMPTS[7] = PROMPTS[6][:48] + PROMPTS[7]  # two that share a beginning
ALL = range(len(PROMPTS))


def params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=[1.0, 0.6, 1.3, 0.0][index % 4],
        top_k=[-1, 5][index // 4 % 2],
        top_p=[1.0, 0.9][index // 2 % 2],
        min_p=[0.0, 0.0, 0.05][index % 3],
        max_tokens=8 + 3 * index % 17,
        ignore_eos=index % 2 == 0,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("qwen3", "qwen3_moe")}


def make(folder, dtype: str, *, ahead: bool = False, **settings) -> Engine:
    defaults = {"kv_cache_tokens": 4096, "max_num_seqs": 16, "numerics": "contract"}
    device = DeferredDevice() if ahead else None
    return Engine(EngineConfig(str(folder), dtype=dtype, **{**defaults, **settings}), device=device)


def run(engine: Engine, indices=ALL):
    for index in indices:
        engine.add(f"r{index}", PROMPTS[index], params(index))
    return run_all(engine, audit=False)


def bits(output) -> tuple:
    patterns = np.array(output.log_probs, np.float32).view(np.int32).tolist()
    masses = np.array(output.kept_mass, np.float32).view(np.int32).tolist()
    return output.token_ids, patterns, masses, output.top1_ids, output.finish_reason


@pytest.fixture(scope="module")
def reference(folders):
    """Lazily, per case: every request alone."""
    cache: dict[tuple[str, str], dict[str, tuple]] = {}

    def of(kind: str, dtype: str):
        if (kind, dtype) not in cache:
            outputs = {}
            for index in range(len(PROMPTS)):
                outputs |= run(make(folders[kind], dtype), [index])
            log_probs = np.concatenate([output.log_probs for output in outputs.values()])
            assert np.isfinite(log_probs).all()
            assert np.exp(log_probs).mean() > 0.3, "the logits are meant to be peaked"
            assert log_probs.std() > 0.5
            cache[kind, dtype] = {name: bits(output) for name, output in outputs.items()}
        return cache[kind, dtype]

    return of


SCHEDULES = [
    {},
    {"max_num_batched_tokens": 1, "indices": range(0, 11, 3)},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 64},
    {"max_prefill_chunk": 64},
    {"page_size": 1},
    {"page_size": 5},
    {"page_size": 64},
    {"page_size": 100, "kv_cache_tokens": 1600},
    {"kv_cache_tokens": 160, "page_size": 4, "preempts": True},
    {"kv_cache_tokens": 160, "page_size": 3, "max_num_batched_tokens": 33, "preempts": True},
    {"enable_prefix_cache": True, "hits": True},
    {"enable_prefix_cache": True, "kv_cache_tokens": 160, "page_size": 7, "preempts": True},
    {"ahead": True},
    {"ahead": True, "enforce_eager": True, "max_num_batched_tokens": 64},
    {"ahead": True, "max_num_seqs": 3, "page_size": 5, "max_prefill_chunk": 7},
    {"ahead": True, "kv_cache_tokens": 160, "page_size": 4, "preempts": True},
    {"ahead": True, "enable_prefix_cache": True, "max_num_batched_tokens": 33, "hits": True},
]


@pytest.mark.parametrize(
    ("kind", "dtype", "schedule"),
    # Every schedule in bfloat16; float32 and the experts in a third each, the preempting ones among them.
    [
        (*case, schedule)
        for number, case in enumerate(CASES)
        for index, schedule in enumerate(SCHEDULES)
        if number == 0 or index % 3 == 1
    ],
    ids=str,
)
def test_no_schedule_changes_a_bit(folders, reference, kind, dtype, schedule):
    settings = dict(schedule)
    indices, preempts, hits = (settings.pop(key, None) for key in ("indices", "preempts", "hits"))
    if preempts:
        settings |= {"watermark": 0.0, "max_model_len": 160}
        indices = range(11)  # all but the long one
    indices = ALL if indices is None else indices
    engine = make(folders[kind], dtype, **settings)
    outputs = run(engine, indices)
    want = reference(kind, dtype)
    assert len(outputs) == len(indices)
    for name, output in outputs.items():
        assert bits(output) == want[name], name
    stats = engine.stats()
    assert stats.preemptions > 0 or not preempts
    assert stats.prefix_hit_tokens > 0 or not hits


def test_parameters_had_their_effect(reference):
    want = reference("qwen3", "bfloat16")
    for index in range(len(PROMPTS)):
        tokens, _, masses, top1, reason = want[f"r{index}"]
        asked = params(index)
        masses = np.array(masses, np.int32).view(np.float32)
        cuts = (asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0) and asked.temperature > 0
        assert (masses < 1).any() == cuts
        assert (masses <= 1 + 1e-6).all()
        if asked.temperature == 0:
            assert tokens == top1
        if asked.ignore_eos:
            assert (reason, len(tokens)) == ("length", asked.max_tokens)
        elif reason == "stop":
            assert tokens[-1] in EOS


@pytest.mark.parametrize(("kind", "dtype"), CASES[:1])
def test_replicas_and_restarts_agree(folders, reference, kind, dtype):
    """Requests spread over two replicas in two ways; then a run cut short, and its rest drawn after a restart."""
    want = reference(kind, dtype)
    for split in (2, 3):
        outputs = {}
        for part in range(split):
            outputs |= run(make(folders[kind], dtype), range(part, len(PROMPTS), split))
        assert {name: bits(output) for name, output in outputs.items()} == want

    engine = make(folders[kind], dtype)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, params(index))
    done = {}
    for _ in range(6):
        done |= {output.request_id: output for output in engine.step()}
    cut = {output.request_id: output for output in engine.abort()}
    restarted = make(folders[kind], dtype)
    for name, output in cut.items():
        index = int(name[1:])
        asked = params(index)
        rest = asked.max_tokens - len(output.token_ids)
        # The same request id, so the same seed; a draw is keyed by its absolute position.
        restarted.add(
            name,
            PROMPTS[index] + output.token_ids,
            SamplingParams(**{**asked.__dict__, "max_tokens": rest}),
        )
    rest_outputs = run_all(restarted)
    for name, output in cut.items():
        joined = output.token_ids + rest_outputs[name].token_ids
        log_probs = np.array(output.log_probs + rest_outputs[name].log_probs, np.float32).view(np.int32).tolist()
        assert (joined, log_probs) == want[name][:2]
    assert cut


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(folders, reference, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outputs = run(make(folders["qwen3"], "bfloat16"), range(6))
    finally:
        torch.set_num_threads(before)
    want = reference("qwen3", "bfloat16")
    assert all(bits(output) == want[name] for name, output in outputs.items())


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("scenario", ["long context", "preempted", "updated mid-response"])
def test_the_trainer_gives_these_bits_again(folders, kind, dtype, scenario):
    """Each token by the weights that drew it, also where the weights changed or pages were lost in mid-response."""
    old, new = hf_model(kind, seed=0), hf_model(kind, seed=9)
    pool = 1024 if scenario == "long context" else 160
    indices = ALL[-3:] if scenario == "long context" else ALL[:-1]
    engine = make(
        folders[kind],
        dtype,
        kv_cache_tokens=pool,
        max_model_len=min(pool, 640),
        max_num_batched_tokens=48,
        page_size=4,
        watermark=0.0,
    )
    asked = SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True)
    outputs = {}
    updates_late = scenario == "updated mid-response"
    if not updates_late:
        engine.update_weights(new.state_dict().items(), 1)
    for index in indices:
        engine.add(f"r{index}", PROMPTS[index], asked)
    if updates_late:
        for _ in range(40):
            outputs |= {output.request_id: output for output in engine.step()}
        engine.update_weights(new.state_dict().items(), 1)
    outputs |= run_all(engine)
    assert (engine.stats().preemptions > 0) == (scenario != "long context")
    versions = {version for output in outputs.values() for version in output.weight_versions}
    assert versions == ({0, 1} if updates_late else {1})
    assert not updates_late or any(len(set(output.weight_versions)) == 2 for output in outputs.values())

    scored = {}
    for version, model in {0: old, 1: new}.items():
        contract = apply_contract(model.to(getattr(torch, dtype)))
        for index in indices:
            prompt = PROMPTS[index]
            tokens = torch.tensor([prompt + outputs[f"r{index}"].token_ids])
            with torch.no_grad():
                log_probs = model(tokens, position_ids=torch.arange(tokens.shape[1])[None], temperature=0.7).log_probs
            scored[version, index] = log_probs[0, len(prompt) - 1 : -1]
        assert contract.forward_calls == len(indices), "the recomputation did not run"
    compared = 0
    for index in indices:
        output = outputs[f"r{index}"]
        for at, (log_prob, version) in enumerate(zip(output.log_probs, output.weight_versions, strict=True)):
            want = scored[version, index][at]
            assert math.isfinite(log_prob)
            assert np.float32(log_prob).view(np.int32) == want.view(torch.int32).item()
            compared += 1
    assert compared == 30 * len(indices)


def test_stock_numerics_differ_somewhere(folders, reference):
    """The gate can fail: the same engine on stock kernels does not give the contract's bits."""
    outputs = run(make(folders["qwen3"], "bfloat16", numerics="stock"))
    want = reference("qwen3", "bfloat16")
    assert any(bits(output) != want[name] for name, output in outputs.items())
