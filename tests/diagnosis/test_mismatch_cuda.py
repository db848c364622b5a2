"""The same numbers from a GPU as from the CPU, with deterministic algorithms demanded."""

from __future__ import annotations

import pytest
import torch

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.gate import compare_bits
from verl_tim.diagnosis.process import process_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(rows=64, width=300):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    old = -normal(rows, width).abs() * 3
    rollout = torch.where(normal(rows, width) > 0, old, old + 0.05 * normal(rows, width))
    routes = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(rows * width * 2)])
    train_routes = routes.clone()
    train_routes[::7, 0] = 16
    return {
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "response_mask": normal(rows, width) > -1,
        "advantages": normal(rows, 1).expand(rows, width).contiguous(),
        "log_prob": old + 0.1 * normal(rows, width),
        "rollout_top1": torch.randint(-1, 5, (rows, width), generator=generator),
        "train_top1": torch.randint(-1, 5, (rows, width), generator=generator),
        "rollout_routes": routes.reshape(rows, width, 2, 4),
        "train_routes": train_routes.reshape(rows, width, 2, 4),
        "weight_versions": torch.randint(0, 4, (rows, width), generator=generator),
    }


def test_metrics_agree(deterministic):
    fields = batch()
    on_cpu = mismatch_metrics(**fields, current_version=4)
    on_gpu = mismatch_metrics(**{name: x.cuda() for name, x in fields.items()}, current_version=4)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-9, abs=1e-12)
    assert len(on_gpu) > 80


def test_sides_on_different_devices(deterministic):
    fields = batch()
    mixed = {name: x.cuda() if name in ("old_log_probs", "log_prob") else x for name, x in fields.items()}
    assert mismatch_metrics(**mixed, current_version=4) == pytest.approx(
        mismatch_metrics(**fields, current_version=4), rel=1e-9, abs=1e-12
    )


def test_gate(deterministic):
    fields = batch()
    old, rollout, mask = (fields[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    assert compare_bits(old.cuda(), rollout, mask.cuda()) == compare_bits(old, rollout, mask)
    assert compare_bits(old.cuda(), old, mask).passed


def test_facts_of_a_gpu_process():
    facts = process_facts("cuda")
    assert "NVIDIA" in facts["device"]
    assert facts["driver"]
    assert {"cuda", "nccl"} <= facts["versions"].keys()
