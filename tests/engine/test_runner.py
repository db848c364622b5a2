"""The runner: buffers made once, rows padded, logits only where a token is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import fake_engine, random_prompts, run_all
from verl_tim.engine import EngineStateError, SamplingParams
from verl_tim.engine.runner import ModelRunner
from verl_tim.engine.sampler import sampling_tensors
from verl_tim.numerics.contract import ROW_FLOOR


class WatchedModel(FakeModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict] = []

    def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
        self.seen.append(
            {
                "pointers": tuple(
                    t.data_ptr() for t in (token_ids_T, paged.slot_T, paged.position_T, paged.block_table_SM, k_pages)
                ),
                "rows": len(token_ids_T),
                "live": int(paged.query_start_S1[-1]),
                "width": paged.block_table_SM.shape[1],
                "longest": int(paged.context_len_S.max()),
                "dtypes": {t.dtype for t in vars(paged).values() if isinstance(t, torch.Tensor)},
                "logit_rows": 0,
            }
        )
        return super().forward(token_ids_T, paged, k_pages, v_pages)

    def logits(self, hidden_BD):
        self.seen[-1]["logit_rows"] = len(hidden_BD)
        return super().logits(hidden_BD)


def test_batches_are_padded_views_of_buffers_made_once():
    model = WatchedModel()
    engine = fake_engine(model, max_num_batched_tokens=33, kv_cache_tokens=1024)
    for index, prompt in enumerate(random_prompts(10, 1, 50, VOCAB)):
        engine.add(str(index), prompt, SamplingParams(max_tokens=9))
    run_all(engine)
    assert len({step["pointers"] for step in model.seen}) == 1
    for step in model.seen:
        assert step["rows"] == -(-step["live"] // ROW_FLOOR) * ROW_FLOOR
        assert step["width"] == -(-step["longest"] // 4), "no wider than the longest sequence of the step"
        assert step["dtypes"] == {torch.int64}
    drawn = engine.stats().drawn_tokens
    assert sum(step["logit_rows"] for step in model.seen) == drawn < sum(step["live"] for step in model.seen)


def test_a_step_that_draws_nothing_asks_for_no_logits():
    model = WatchedModel()
    engine = fake_engine(model, max_num_batched_tokens=8)
    engine.add("a", [2] * 20, SamplingParams(max_tokens=1))
    for _ in range(3):
        engine.step()
    assert [step["logit_rows"] for step in model.seen] == [0, 0, 1]


def test_kv_pages_are_made_zeroed_and_sized_as_said():
    engine = fake_engine(kv_cache_tokens=64)
    runner = engine._runner
    assert runner._k_pages_LPSHD.shape == (2, 17, 4, 1, 2)
    assert not runner._k_pages_LPSHD.any()
    held = runner._k_pages_LPSHD.nbytes + runner._v_pages_LPSHD.nbytes
    assert held == 17 * ModelRunner.page_bytes(engine._model, 4) == engine.describe()["kv_cache_bytes"]
    runner.release_kv_cache()
    assert not runner.has_kv_cache
    engine.add("a", [2], SamplingParams(max_tokens=2))
    with pytest.raises(EngineStateError, match="resume_kv_cache"):
        runner.execute(engine._scheduler.schedule())


def test_sampling_parameters_reach_their_rows():
    engine = fake_engine()
    wanted = {
        "a": SamplingParams(temperature=0.0, seed=4, max_tokens=9),
        "b": SamplingParams(temperature=1.5, top_k=3, seed=2**63 - 1, max_tokens=9),
        "c": SamplingParams(top_p=0.25, min_p=0.125, seed=0, max_tokens=9),
    }
    for name, params in wanted.items():
        engine.add(name, [2] * (3 + ord(name) - ord("a")), params)
    plan = engine._scheduler.schedule()
    tensors = sampling_tensors(engine._rows, plan.slots_B, torch.device("cpu"))
    assert tensors.temperature_B.tolist() == [0.0, 1.5, 1.0]
    assert tensors.top_k_B.tolist() == [-1, 3, -1]
    assert tensors.top_p_B.tolist() == [1.0, 1.0, 0.25]
    assert tensors.min_p_B.tolist() == [0.0, 0.0, 0.125]
    assert tensors.seed_B.tolist() == [4, 2**63 - 1, 0]
    assert tensors.position_B.tolist() == [3, 4, 5], "the position of the token to be drawn"
    assert tensors.temperature_B.dtype == tensors.top_p_B.dtype == tensors.min_p_B.dtype == torch.float32
    assert tensors.top_k_B.dtype == tensors.seed_B.dtype == tensors.position_B.dtype == torch.int64
    assert np.isfinite(engine._rows.temperature_S).all()
