"""Weights that were put aside come back to the bit, as `separate_async` needs it."""

from __future__ import annotations

import numpy as np
import torch

from verl_tim.training.in_process import InProcessTrainer, ScoredSequence, single_rank_group


def test_a_snapshot_does_not_move_with_the_weights(folders):
    sequences = [ScoredSequence(np.arange(5, 9), np.arange(10, 30)), ScoredSequence(np.arange(3), np.arange(40, 50))]
    with single_rank_group():
        trainer = InProcessTrainer(folders("qwen3"), lr=1e-2)

        def bits():
            return torch.cat(trainer.log_probs(sequences)).view(torch.int32)

        first, snapshot = bits(), trainer.snapshot()
        assert trainer.update(sequences, [1.0, -1.0]) > 0
        second = bits()
        assert int((first != second).sum()) > len(first) // 2
        with trainer.at(snapshot):
            assert torch.equal(bits(), first)
        assert torch.equal(bits(), second)
        # training goes on from where it was
        trainer.update(sequences, [1.0, -1.0])
        with trainer.at(snapshot):
            assert torch.equal(bits(), first)
