"""Routes recorded for some requests: those of every position, whatever the engine was doing besides."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import fake_engine, random_prompts, run_all
from verl_tim.engine import RequestError, SamplingParams

LAYERS, TOP_K = 3, 2


class RoutedModel(FakeModel):
    """The experts a row chooses spell its token and its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config.moe = SimpleNamespace(layers=range(LAYERS), top_k=TOP_K)
        self.recorded_steps = 0

    def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
        if chosen is not None:
            self.recorded_steps += 1
            for layer in range(LAYERS):
                chosen.append(torch.stack([token_ids_T, torch.full_like(token_ids_T, layer)], 1))
        return super().forward(token_ids_T, paged, k_pages, v_pages)


@pytest.fixture(params=["plain", "ahead, recorded", "ahead, recorded, early", "ahead, eager"])
def make(request):
    """Engines of both runners: routes come with a step, or with the results of one that ran behind the host."""

    def engine(model, **settings):
        if request.param == "plain":
            return fake_engine(model, **settings)
        device = DeferredDevice(early=0.5 if "early" in request.param else 0.0)
        return fake_engine(model, device=device, enforce_eager="eager" in request.param, **settings)

    engine.plain = request.param == "plain"
    return engine


def expected(prompt, token_ids):
    read = [*prompt, *token_ids[:-1]]
    return np.array([[[token, layer] for layer in range(LAYERS)] for token in read], np.int16)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_prefill_chunk": 5},
        {"kv_cache_tokens": 96},  # preempts
        {"kv_cache_tokens": 512, "enable_prefix_cache": True},
        {"kv_cache_tokens": 96, "enable_prefix_cache": True, "max_num_batched_tokens": 16, "max_prefill_chunk": 5},
    ],
    ids=["plain", "chunks", "preemption", "prefix cache", "all of it"],
)
def test_every_position_has_its_routes(make, settings):
    model = RoutedModel()
    engine = make(model, **{"kv_cache_tokens": 1024, **settings})
    prompts = random_prompts(9, 1, 30, VOCAB)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(max_tokens=20, seed=index, record_routes=index % 3 == 0))
    outputs = run_all(engine)
    if settings.get("kv_cache_tokens") == 96:
        assert engine.stats().preemptions > 0
    for index, prompt in enumerate(prompts):
        output = outputs[str(index)]
        if index % 3:
            assert output.routes_TLK is None
            assert output.routes_NLK is None
        else:
            assert output.routes_TLK.dtype == np.int16
            whole = expected(prompt, output.token_ids)
            assert (output.routes_TLK == whole).all()
            # the rows that drew the tokens
            assert (output.routes_NLK == whole[len(prompt) - 1 :]).all()


def test_shared_pages_bring_their_routes(make):
    """Of a prompt that comes again, and of one whose pages nobody recorded, which is computed again."""
    model = RoutedModel()
    engine = make(model, kv_cache_tokens=1024, enable_prefix_cache=True)
    prompt = list(range(2, 32))
    params = {"max_tokens": 4, "seed": 1}

    def run(name, token_ids, **more):
        engine.add(name, token_ids, SamplingParams(**params, **more))
        return run_all(engine)[name]

    first = run("a", prompt, record_routes=True)
    again = run("b", prompt, record_routes=True)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 28
    for output in (first, again):
        assert (output.routes_TLK == expected(prompt, output.token_ids)).all()
    other = prompt[::-1]
    run("c", other)
    recorded = run("d", other, record_routes=True)
    assert recorded.num_cached_tokens == 0, "pages without routes were shared"
    assert (recorded.routes_TLK == expected(other, recorded.token_ids)).all()


def test_requests_that_share_pages_within_one_step(make):
    model = RoutedModel()
    engine = make(model, kv_cache_tokens=1024, enable_prefix_cache=True, max_num_batched_tokens=256)
    prompt = list(range(2, 32))
    for name in "abcd":
        engine.add(name, prompt, SamplingParams(max_tokens=4, seed=ord(name), record_routes=True))
    outputs = run_all(engine)
    assert engine.stats().prefix_hit_tokens == 3 * 28
    for output in outputs.values():
        assert (output.routes_TLK == expected(prompt, output.token_ids)).all()


def test_what_was_known_first_stays(make):
    """A token keeps the routes that it was drawn with, when its sequence is computed again under other weights."""

    class Moving(RoutedModel):
        shift = 0

        def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
            inner = None if chosen is None else []
            hidden = super().forward(token_ids_T, paged, k_pages, v_pages, inner)
            if chosen is not None:
                chosen += [ids + torch.tensor([0, 100 * self.shift]) for ids in inner]
            return hidden

    model = Moving()
    engine = make(model, kv_cache_tokens=1024)
    prompt = [5, 6, 7]
    engine.add("a", prompt, SamplingParams(max_tokens=8, seed=3, ignore_eos=True, record_routes=True))
    for _ in range(3):
        engine.step()
    engine.drain()
    model.shift = 1
    engine.update_weights([("salt", torch.tensor(1))], 1)
    output = run_all(engine)["a"]
    drawn_before = output.weight_versions.count(0)
    assert 0 < drawn_before < 8
    second_T = output.routes_TLK[:, 0, 1]
    assert second_T.tolist() == [0] * (len(prompt) + drawn_before - 1) + [100] * (8 - drawn_before)


def test_nothing_is_recorded_unasked(make):
    model = RoutedModel()
    engine = make(model, kv_cache_tokens=1024)
    measured = model.recorded_steps
    engine.add("a", [2, 3], SamplingParams(max_tokens=4))
    output = run_all(engine)["a"]
    assert output.routes_TLK is None
    if make.plain:
        assert model.recorded_steps == measured == 0


def test_a_dense_model_has_no_routes(make):
    engine = make(FakeModel(), kv_cache_tokens=1024, enable_prefix_cache=True)
    engine.add("a", [2, 3], SamplingParams(max_tokens=4, record_routes=True))
    output = run_all(engine)["a"]
    assert output.routes_TLK is None
    # and asking for them costs it no page of others
    prompt = list(range(2, 32))
    engine.add("b", prompt, SamplingParams(max_tokens=4))
    run_all(engine)
    engine.add("c", prompt, SamplingParams(max_tokens=4, record_routes=True))
    assert run_all(engine)["c"].num_cached_tokens == 28
    assert engine.moe_layers == ()


def test_the_switch_is_a_switch():
    with pytest.raises(RequestError, match="record_routes=1: expected true or false"):
        SamplingParams(record_routes=1)


class SaltedModel(RoutedModel):
    """Its experts tell the weights, too: 100 more for each version."""

    def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
        hidden = super().forward(token_ids_T, paged, k_pages, v_pages, chosen)
        for expert_TK in chosen or ():
            expert_TK[:, 0] += 100 * (self.salt or 0)
        return hidden


@pytest.mark.parametrize("seed", range(12))
def test_routes_are_those_of_the_tokens_whatever_happens_meanwhile(make, seed):
    """Preemption, shared prefixes, chunks, aborts, weight updates and a released cache, in any order."""
    rng = random.Random(seed)
    engine = make(
        SaltedModel(), kv_cache_tokens=rng.choice([48, 64, 96]), max_num_seqs=rng.choice([2, 4, 8]),
        enable_prefix_cache=rng.random() < 0.7, max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_prefill_chunk=rng.choice([None, 3, 5]),
    )  # fmt: skip
    stems = random_prompts(2, 20, 20, VOCAB, seed=seed)
    asked, outputs, version = {}, [], 0
    for _ in range(200):
        chance = rng.random()
        if chance < 0.25 and len(asked) < 40:
            prompt = rng.choice(stems)[: rng.randint(1, 20)] + [
                rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 3))
            ]
            name, records = str(len(asked)), rng.random() < 0.6
            asked[name] = prompt, records
            tokens = rng.randint(1, 20)
            engine.add(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, record_routes=records))
        elif chance < 0.29 and engine.request_ids():
            outputs += engine.abort(rng.choice(engine.request_ids()))
        elif chance < 0.33:
            version += 1
            in_flight = rng.choice(["keep", "keep", "abort", "finish"])
            outputs += engine.update_weights([("salt", torch.tensor(version))], version, in_flight=in_flight)
        elif chance < 0.36:
            engine.release_kv_cache()
            engine.resume_kv_cache()
        elif engine.has_work():
            outputs += engine.step()
    outputs += run_all(engine).values()
    assert {output.request_id for output in outputs} == asked.keys()
    for output in outputs:
        prompt, records = asked[output.request_id]
        if not records:
            assert output.routes_TLK is None
        elif output.token_ids:
            want = expected(prompt, output.token_ids)
            assert (output.routes_TLK[:, :, 0] % 100 == want[:, :, 0]).all()
            assert (output.routes_TLK[:, :, 1:] == want[:, :, 1:]).all()
            drew = output.routes_TLK[len(prompt) - 1 :, :, 0] // 100
            assert (drew == np.array(output.weight_versions)[:, None]).all(), "not of the weights that drew the token"
