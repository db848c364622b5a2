"""What does not fit is refused by name; what is offered was planned, and fits when it is composed anew."""

import copy
import dataclasses

import pytest

from tests.planning.conftest import DENSE, ROLLOUT, Run
from verl_tim.planning.gpu import find_gpu
from verl_tim.planning.plan import memory_of
from verl_tim.planning.remedy import remedies
from verl_tim.planning.shape import Shape, shape_of
from verl_tim.planning.source import planned

CASES = {
    "too little for a backward": ([*DENSE, "cluster=gpu1"], "qwen3-8b", "H100", {"update", "rollout"}),
    "experts on a node": (
        [*DENSE, f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.tensor_model_parallel_size=4",
         "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"],
        "qwen3-30b-a3b",
        "H100",
        {"rollout", "update"},
    ),
    "rollout and trainer beside each other": (
        [*DENSE, f"{ROLLOUT}.gpu_memory_utilization=0.97"],
        "qwen3-1.7b",
        "H100",
        {"rollout"},
    ),
    "no room for a sequence": ([*DENSE, f"{ROLLOUT}.gpu_memory_utilization=0.05"], "qwen3-1.7b", "H100", {"rollout"}),
    "the smallest GPU": (DENSE, "qwen3-30b-a3b", "L40S", {"rollout", "log-probs", "update", "weight sync"}),
    "a micro-batch too large": (
        [*DENSE, "cluster=gpu1", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400000",
         f"{ROLLOUT}.log_prob_max_token_len_per_gpu=16384", f"{ROLLOUT}.max_num_seqs=8"],
        "qwen3-1.7b",
        "H100",
        {"update"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_remedy_fits(case):
    words, shape, gpu, phases = CASES[case]
    run = Run(words, shape, gpu)
    as_it_was = copy.deepcopy(run.config)
    memory = run.memory
    assert phases <= {misfit.phase for misfit in memory.misfits}
    found = remedies(run.config, run.shape, run.gpu)
    assert run.config == as_it_was
    assert found
    for remedy in found:
        assert remedy.cost
        values = {key.replace(".", "__"): value for key, value in remedy.overrides.items()}
        assert Run(words, shape, gpu).set(**values).memory.fits, remedy.words
    # one of them as it is typed, composed anew
    longest = max(found, key=lambda remedy: len(remedy.words))
    again = planned([*words, *longest.words]).config
    assert memory_of(again, shape_of(shape), find_gpu(gpu)).fits, longest.words


def test_a_misfit_names_phase_sizes_and_the_largest_items(sparse):
    (rollout,) = sparse.memory.misfits
    assert rollout.phase == "rollout"
    assert "of 79.1 GiB (H100 80GB)" in rollout.problem
    assert "AdamW moments 28.4 GiB" in rollout.problem


def test_sets_leave_nothing_in_that_is_not_needed():
    words, shape, gpu, _ = CASES["the smallest GPU"]
    run = Run(words, shape, gpu)
    sets = [remedy for remedy in remedies(run.config, run.shape, run.gpu) if len(remedy.overrides) > 1]
    assert sets
    for remedy in sets:
        for left_out in remedy.overrides:
            rest = {key.replace(".", "__"): v for key, v in remedy.overrides.items() if key != left_out}
            assert not Run(words, shape, gpu).set(**rest).memory.fits, left_out


def test_what_fits_needs_none(dense):
    assert dense.memory.fits
    assert remedies(dense.config, dense.shape, dense.gpu) == []


def test_nothing_helps_where_nothing_can():
    """A model of which one layer's experts alone exceed the GPU, and whose key-value heads cannot be divided."""
    run = Run([*DENSE, "cluster=gpu1"], "qwen3-30b-a3b", "L40S")
    moe = dataclasses.replace(run.shape.config.moe, intermediate_size=1 << 16)
    shape = Shape("huge", dataclasses.replace(run.shape.config, moe=moe, num_kv_heads=1))
    assert not memory_of(run.config, shape, run.gpu).fits
    assert remedies(run.config, shape, run.gpu) == []
