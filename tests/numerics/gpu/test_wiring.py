"""The GPU schedules under the whole model, in Triton's interpreter: engine and trainer take them and mean the same.

Bits are the device's business (marker gpu); here the interpreter's float32 must agree closely with the CPU contract,
and every op must have been asked for with arguments that its kernel takes.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import engine_of, rollout, tiny_model
from tests.parity.bits import recorded, score
from verl_tim.models import apply_contract
from verl_tim.numerics.contract import interpreted_schedules

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")

T = 0.8


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted_schedules():
        yield


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
def test_engine_and_trainer_run_on_gpu_schedules(kind):
    hf_model = tiny_model(kind, dtype=torch.bfloat16, num_hidden_layers=1 + (kind == "qwen3_moe"))
    engine = engine_of(hf_model, dtype=torch.bfloat16)
    sequences = rollout(engine, prompts=2, new_tokens=2, temperature=T, preempt=False)
    apply_contract(hf_model)
    log_probs = score(hf_model, sequences, "packed", T)
    torch.testing.assert_close(log_probs, recorded(sequences), atol=0.05, rtol=0.0)  # BLAS under numpy depends on rows
    log_probs.sum().backward()
    gradients = {name: p.grad for name, p in hf_model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
