"""A recorded decode step on the GPU schedules, in Triton's interpreter: it works, and never asks the device."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import verl_tim
from tests.engine.deferred_device import DeferredDevice
from tests.engine.support import random_prompts, run_all
from tests.engine.tiny_models import VOCAB, save
from verl_tim.engine import Engine, EngineConfig, SamplingParams
from verl_tim.models import build_model, load_model_config
from verl_tim.numerics.contract import interpreted_schedules

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")

PACKAGE = str(Path(verl_tim.__file__).parent)
READS = ("item", "tolist", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted_schedules():
        yield


def engine_of(folder, device=None, **settings) -> Engine:
    # Made here: an engine that builds its model also probes it, which takes the interpreter minutes.
    model = build_model(load_model_config(folder), dtype=torch.bfloat16, device="cpu")
    defaults = {"kv_cache_tokens": 512, "max_num_seqs": 3, "max_model_len": 128, "page_size": 16}
    return Engine(EngineConfig(str(folder), **{**defaults, **settings}), model=model, device=device)


def test_recorded_steps_draw_what_the_plain_runner_draws(tmp_path):
    folder = save("qwen3", tmp_path)
    outputs = []
    for device in (None, DeferredDevice()):
        engine = engine_of(folder, device)
        for index, prompt in enumerate(random_prompts(3, 4, 9, VOCAB)):
            cut = {"top_k": 5} if index == 2 else {}
            engine.add(str(index), prompt, SamplingParams(max_tokens=2 + index, ignore_eos=True, **cut))
        outputs.append(run_all(engine, audit=False))
    assert engine.describe()["decode_graphs"] == [1, 2, 3]
    plain, ahead = outputs
    for name, output in plain.items():
        assert ahead[name].token_ids == output.token_ids
        # numpy's products depend on the number of rows; bits are the device's business
        np.testing.assert_allclose(ahead[name].log_probs, output.log_probs, atol=0.05)
        np.testing.assert_allclose(ahead[name].kept_mass, output.kept_mass, atol=0.05)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_nothing_in_a_recorded_step_reads_a_value_back(tmp_path, kind, monkeypatch):
    """What a CUDA graph cannot hold: a value of the device that steers the host. Triton's interpreter itself may."""
    engine = engine_of(save(kind, tmp_path), DeferredDevice())
    reads = []

    def watch(name):
        original = getattr(torch.Tensor, name)

        def watched(self, *args, **kwargs):
            caller = sys._getframe(1).f_code.co_filename
            if caller.startswith(PACKAGE):
                reads.append((name, caller))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, watched)

    for name in READS:
        watch(name)
    with engine.model.any_weights(), torch.inference_mode():
        engine._graph_runner._graphs.run(2)
        assert reads == []
        graphs = engine._graph_runner._graphs
        rows = torch.zeros(2)
        sampling = graphs.uncut.parameters(rows, rows.long(), rows.long())
        engine.model.draw(graphs.hidden(2), sampling)  # not told which rows cut, it has to ask
    assert [name for name, _ in reads] == ["nonzero"], "the watch sees nothing"
