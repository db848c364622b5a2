"""Numbers that are not finite stay with the requests that made them: nobody who gets their pages later reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.support import random_prompts, run_all
from tests.engine.tiny_models import VOCAB, hf_model, save
from verl_tim.engine import Engine, EngineConfig, SamplingParams
from verl_tim.engine.kv_cache import PagePool

PROMPTS = random_prompts(6, 3, 40, VOCAB, seed=1)
DEVICES = {"plain": lambda: None, "late": DeferredDevice, "at once": lambda: DeferredDevice(early=1.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("qwen3", tmp_path_factory.mktemp("model"))


def engine_of(folder, device, **more) -> Engine:
    settings = {"page_size": 4, "kv_cache_tokens": 180, "max_num_seqs": 3, "max_model_len": 60, "watermark": 0.0}
    return Engine(
        EngineConfig(str(folder), max_num_batched_tokens=13, enable_prefix_cache=True, **settings, **more),
        device=device,
    )


def ask(engine: Engine, name: str) -> None:
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=9, seed=index, ignore_eos=index % 2 == 0)
        engine.add(f"{name}{index}", prompt, params)


def bits(outputs) -> list:
    return [
        (outputs[name].token_ids, np.array(outputs[name].log_probs, np.float32).view(np.int32).tolist())
        for name in sorted(outputs)
    ]


def watch(engine: Engine) -> list[int]:
    """Check every forward from now on: what it may read is finite. How many were checked."""
    model, checked = engine.model, [0]
    forward = model.forward

    def watched(token_ids_T, batch, k_pages, v_pages, *rest, **named):
        gpu = batch.gpu
        table = (batch.block_table_SM if gpu is None else gpu.block_table_SM).to(torch.int64)
        read = torch.unique(torch.cat([table.flatten(), torch.zeros(1, dtype=torch.int64)]))
        for pages in (k_pages, v_pages):
            assert torch.isfinite(pages[:, read]).all(), "a step may read numbers that are not finite"
        checked[0] += 1
        return forward(token_ids_T, batch, k_pages, v_pages, *rest, **named)

    model.forward = watched
    return checked


def broken_run(folder, device) -> tuple[list, list, int]:
    """(what other requests drew before and after requests that ran with broken weights, forwards checked)."""
    engine = engine_of(folder, device)
    good = [(name, weight.detach()) for name, weight in hf_model("qwen3").state_dict().items()]
    ask(engine, "a")
    before = bits(run_all(engine))

    engine.update_weights([(name, weight * float("nan")) for name, weight in good], 1)
    ask(engine, "b")
    assert {output.finish_reason for output in run_all(engine).values()} == {"error"}
    ask(engine, "c")  # aborted before anybody has seen a log-prob of theirs
    engine.step()
    aborted = engine.abort()
    assert len(aborted) >= len(PROMPTS) - 1
    assert {output.finish_reason for output in aborted} == {"abort"}

    engine.update_weights(good, 2)
    checked = watch(engine)
    ask(engine, "d")
    return before, bits(run_all(engine)), checked[0]


@pytest.mark.parametrize("device", DEVICES)
def test_other_requests_get_their_pages_clean(folder, device):
    before, after, checked = broken_run(folder, DEVICES[device]())
    assert after == before
    assert checked > 10


@pytest.mark.parametrize("order", ["who computed first", "who found first", "at once"])
def test_shared_pages_are_cleaned_after_who_computed_them(folder, order):
    """Two of one prompt, broken weights, both aborted before a draw; who found the pages says nothing of them."""
    engine = engine_of(folder, None, max_prefill_chunk=8)
    good = [(name, weight.detach()) for name, weight in hf_model("qwen3").state_dict().items()]
    engine.update_weights([(name, weight * float("nan")) for name, weight in good], 1)
    prompt = random_prompts(1, 20, 20, VOCAB, seed=3)[0]
    for name in ("computes", "finds"):
        engine.add(name, prompt, SamplingParams(max_tokens=9))
    assert engine.step() == []
    assert engine.stats().prefix_hit_tokens == 8  # two pages, which are written in this very step
    orders = {"who computed first": ["computes", "finds"], "who found first": ["finds", "computes"]}
    for names in orders.get(order, [["computes", "finds"]]):
        assert {output.finish_reason for output in engine.abort(names)} == {"abort"}
    engine.update_weights(good, 2)
    checked = watch(engine)
    ask(engine, "d")
    run_all(engine)
    assert checked[0] > 10


def test_pages_that_were_found_are_not_cleaned(folder):
    """Those who computed them drew by them; who found them and was aborted leaves what it computed itself."""
    engine = engine_of(folder, None)
    prompt = random_prompts(1, 30, 30, VOCAB, seed=3)[0]  # seven full pages, and half of one
    engine.add("computes", prompt, SamplingParams(max_tokens=1))
    run_all(engine)
    pool = engine._pool
    assert not pool._unclean.any()
    engine.add("finds", [*prompt[:16], *prompt[:14]], SamplingParams(max_tokens=9))
    assert engine.step() == []  # 14 tokens are left to compute, of which a step takes 13
    assert engine.stats().prefix_hit_tokens == 16
    (table,) = engine._scheduler.rows.block_tables()
    found, own = table[:4].copy(), table[4:].copy()
    engine.abort("finds")
    assert not pool._unclean[found].any()
    assert pool._unclean[own].all()
    assert len(own) == 4


@pytest.mark.parametrize("seen", ["none", "errors only"])
def test_pages_that_are_not_cleaned_are_noticed(folder, seen, monkeypatch):
    if seen == "none":
        monkeypatch.setattr(PagePool, "take_unclean", lambda self: np.empty(0, np.int64))
    else:  # and of those that were aborted unseen
        monkeypatch.setattr(PagePool, "suspect", lambda self, pages: None)
    with pytest.raises(AssertionError, match="not finite"):
        broken_run(folder, None)


def test_healthy_requests_cost_no_cleaning(folder):
    """Without look-ahead nothing is unseen when a request ends."""
    engine = engine_of(folder, None)
    cleaned = []
    clean = engine._runner._clean
    engine._runner._clean = lambda pages: (cleaned.append(len(pages)), clean(pages))
    for name in "ab":
        ask(engine, name)
        run_all(engine)
    assert sum(cleaned) == 0
    assert len(cleaned) > 10
