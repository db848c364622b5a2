"""On a GPU: gradient checkpointing and activation offload change no bit of the loss or of any gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

SAVERS = [
    {},
    {"gradient_checkpointing": True},
    {"activation_offload": True},
    {"gradient_checkpointing": True, "activation_offload": True},
]


@pytest.mark.parametrize(("shape", "layers"), [("qwen3-0.6b", 3), ("qwen3-30b-a3b", 2)])
def test_bits_of_loss_and_gradients(shape, layers, tmp_path):
    from verl_tim.tasks.random_model import save_random_model
    from verl_tim.training.in_process import InProcessTrainer, ScoredSequence, single_rank_group

    folder = save_random_model(shape, tmp_path / "model", layers=layers, device="cuda")
    rng = np.random.default_rng(0)
    sequences = [
        ScoredSequence(rng.integers(2, 151936, prompt), rng.integers(2, 151936, response))
        for prompt, response in ((5, 70), (130, 9), (64, 64), (1, 513))
    ]
    want = None
    with single_rank_group():
        for savers in SAVERS:
            trainer = InProcessTrainer(str(folder), **savers)
            loss, gradients = trainer.gradient(sequences, [1.0, -0.5, 0.25, 2.0])
            del trainer
            torch.cuda.empty_cache()
            assert torch.isfinite(loss).all()
            assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 0
            want = want or (loss, gradients)
            assert torch.equal(loss.view(torch.int32), want[0].view(torch.int32)), savers
            assert gradients.keys() == want[1].keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient.view(torch.int32), want[1][name].view(torch.int32)), (savers, name)
