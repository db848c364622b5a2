"""vLLM's builds for CPUs, as far as they can be tested without one: prompts that a step cuts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_tim.rollout.vllm_cpu import draw_for_whole_prompts


class Runner:
    """vLLM 0.28's, as far as it draws: rows with a generator from it, and a cut row's draw taken back by its offset."""

    def __init__(self, cut, seeds):
        self.input_batch = SimpleNamespace(
            num_reqs=len(cut),
            generators={row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds) if seed is not None},
        )
        self.discard_request_mask = SimpleNamespace(np=np.array([*cut, True]))  # one more than there are requests

    def sample_tokens(self, fails=False):
        if fails:
            raise ValueError("no draw")
        generators = self.input_batch.generators
        drawn = {row: torch.rand(1, generator=generator).item() for row, generator in generators.items()}
        for row in self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]:
            if int(row) in generators:
                generators[int(row)].set_offset(generators[int(row)].get_offset() - 4)
        return drawn


@pytest.fixture
def patched():
    module = SimpleNamespace(CPUModelRunner=type("CPUModelRunner", (Runner,), {"sample_tokens": Runner.sample_tokens}))
    draw_for_whole_prompts(module)
    return module.CPUModelRunner


def test_a_cut_prompt_ends_the_engine_without_the_patch():
    with pytest.raises(RuntimeError, match="offset"):
        Runner([False, True], [1, 2]).sample_tokens()


def test_a_cut_prompt_draws_nothing(patched):
    """and its first token is then the one that it would have had in one piece."""
    runner = patched([False, True, True], [1, 2, None])
    whole = patched([False, False, False], [1, 2, None]).sample_tokens()
    assert runner.sample_tokens() == {0: whole[0]}
    runner.discard_request_mask.np[:] = False
    assert runner.sample_tokens()[1] == whole[1]


def test_a_draw_that_fails_leaves_the_generators(patched):
    runner = patched([False, True], [1, 2])
    with pytest.raises(ValueError, match="no draw"):
        runner.sample_tokens(fails=True)
    assert sorted(runner.input_batch.generators) == [0, 1]
