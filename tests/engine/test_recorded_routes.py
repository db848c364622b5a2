"""Routes recorded for some requests: those of the row that drew each token, whatever the engine was doing besides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import fake_engine, random_prompts, run_all
from verl_tim.engine import RequestError, SamplingParams

LAYERS, TOP_K = 3, 2


class RoutedModel(FakeModel):
    """The experts a row chooses spell its token and its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded_steps = 0

    def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
        if chosen is not None:
            self.recorded_steps += 1
            for layer in range(LAYERS):
                chosen.append(torch.stack([token_ids_T, torch.full_like(token_ids_T, layer)], 1))
        return super().forward(token_ids_T, paged, k_pages, v_pages)


def expected(prompt, token_ids):
    read = [prompt[-1], *token_ids[:-1]]
    return np.array([[[token, layer] for layer in range(LAYERS)] for token in read], np.int16)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_prefill_chunk": 5},
        {"kv_cache_tokens": 96},  # preempts
        {"kv_cache_tokens": 512, "enable_prefix_cache": True},
    ],
    ids=["plain", "chunks", "preemption", "prefix cache"],
)
def test_each_token_has_the_routes_of_the_row_that_drew_it(settings):
    model = RoutedModel()
    engine = fake_engine(model, **{"kv_cache_tokens": 1024, **settings})
    prompts = random_prompts(9, 1, 30, VOCAB)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(max_tokens=20, seed=index, record_routes=index % 3 == 0))
    outputs = run_all(engine)
    if settings.get("kv_cache_tokens") == 96:
        assert engine.stats().preemptions > 0
    for index, prompt in enumerate(prompts):
        output = outputs[str(index)]
        if index % 3:
            assert output.routes_NLK is None
        else:
            assert output.routes_NLK.dtype == np.int16
            assert (output.routes_NLK == expected(prompt, output.token_ids)).all()


def test_nothing_is_recorded_unasked():
    model = RoutedModel()
    engine = fake_engine(model, kv_cache_tokens=1024)
    engine.add("a", [2, 3], SamplingParams(max_tokens=4))
    run_all(engine)
    assert model.recorded_steps == 0


def test_a_dense_model_has_no_routes():
    engine = fake_engine(kv_cache_tokens=1024)
    engine.add("a", [2, 3], SamplingParams(max_tokens=4, record_routes=True))
    output = run_all(engine)["a"]
    assert output.routes_NLK is None
    assert engine.moe_layers == ()


def test_the_switch_is_a_switch():
    with pytest.raises(RequestError, match="record_routes=1: expected true or false"):
        SamplingParams(record_routes=1)
