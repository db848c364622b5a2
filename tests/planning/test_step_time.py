"""Times of passes and collectives move as they must; a step is the sum of its parts."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.conftest import DENSE, Run
from verl_tim.planning.gpu import GPUS, find_gpu
from verl_tim.planning.network import Network
from verl_tim.planning.rates import Speeds, measured_gpu, trainer_rates
from verl_tim.planning.sync_time import sync_time
from verl_tim.planning.trainer_time import TrainerTime, Work

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"


def trainer(run):
    return TrainerTime(run.shape, run.memory.settings, Speeds(run.gpu))


@settings(max_examples=50)
@given(nbytes=st.floats(1e3, 1e12), few=st.integers(1, 512), more=st.integers(0, 512))
def test_a_ring_over_more_ranks_never_gets_faster(nbytes, few, more):
    network = Network(Speeds(find_gpu("H100")), 8)
    assert network.ring_seconds(nbytes, few + more) >= network.ring_seconds(nbytes, few)
    assert network.ring_seconds(nbytes, 1) == 0


@settings(max_examples=30)
@given(tokens=st.floats(1e3, 1e7), more=st.floats(1, 10))
def test_more_tokens_never_take_less(tokens, more):
    time = trainer(Run(DENSE, "qwen3-1.7b", "H200"))
    less, all_of_it = Work(tokens, tokens * 2048), Work(tokens * more, tokens * more * 2048)
    assert time.update(all_of_it, 16384).seconds >= time.update(less, 16384).seconds
    assert time.forward(all_of_it, 16384).seconds >= time.forward(less, 16384).seconds


def test_checkpointing_costs_a_forward(dense):
    work = Work(1e6, 1e6 * 2048)
    again = trainer(dense).update(work, 16384)
    once = trainer(dense.set(actor_rollout_ref__model__enable_gradient_checkpointing=False)).update(work, 16384)
    forward = trainer(dense).forward(work, 16384)
    assert again.arithmetic - once.arithmetic == pytest.approx(forward.arithmetic)


def test_offloads_cost_time(dense):
    before = {part.name: part.seconds for part in dense.plan().step.parts}
    fsdp = f"{ACTOR}__fsdp_config"
    moved = {part.name: part for part in dense.set(**{f"{fsdp}__optimizer_offload": True}).plan().step.parts}
    assert moved["update"].seconds > before["update"]
    assert any("host link" in reason for reason in moved["update"].basis)
    host = {part.name: part for part in dense.set(**{f"{fsdp}__offload_policy": True}).plan().step.parts}
    assert host["update"].seconds > moved["update"].seconds
    assert host["old log-probs"].seconds > before["old log-probs"]


def test_moments_cross_once_per_update_whatever_the_mini_batches(dense):
    one = trainer(dense.set(**{f"{ACTOR}__fsdp_config__optimizer_offload": True})).moving_states
    four = trainer(dense.set(**{f"{ACTOR}__ppo_mini_batch_size": 32})).moving_states
    assert one == four == pytest.approx(2 * 8 * dense.shape.parameters / 8 / 2.5e10)


def test_a_sync_is_bounded_by_copies_network_and_calls(dense, sparse):
    small = sync_time(dense.shape, dense.memory.settings, Speeds(dense.gpu))
    large = sync_time(sparse.shape, sparse.memory.settings, Speeds(sparse.gpu))
    assert small.copies == pytest.approx(18 * dense.shape.parameters / Speeds(dense.gpu).bandwidth)
    # one tensor per expert and matrix
    assert large.host / small.host > 0.5 * sparse.shape.tensors / dense.shape.tensors
    alone = dataclasses.replace(dense.memory.settings, shards=1)
    assert sync_time(dense.shape, alone, Speeds(dense.gpu)).network == 0


def test_rates_are_scaled_by_the_data_sheet_only_elsewhere():
    here, there = Speeds(measured_gpu()), Speeds(find_gpu("L40S"))
    run = Run(DENSE, "qwen3-1.7b", "H200")
    assert here.bandwidth == 4.3e12
    assert here.linear("contract", run.shape) == trainer_rates("contract").linear
    assert there.bandwidth == pytest.approx(4.3e12 * 0.864 / 4.8)
    assert here.reasons(run.shape) == []
    assert len(there.reasons(run.shape)) == 1
    sparse = Run(DENSE, "qwen3-30b-a3b", "H200").shape
    assert "measured with qwen3-1.7b," in here.reasons(sparse)[0]
    assert "measured with qwen3-30b-a3b, 6 layers," in here.reasons(sparse, training=True)[0]
    assert all(gpu.source and gpu.memory < 200 << 30 for gpu in GPUS.values())


def test_fewer_answers_at_once_where_the_pool_is_small(dense):
    large = dense.plan().step.rollout
    small = dense.set(**{f"{ROLLOUT}__gpu_memory_utilization": 0.16}).plan()
    assert small.memory.fits
    assert small.step.rollout.preemptions > 0
    assert large.preemptions == 0
    assert small.step.rollout.seconds > large.seconds


def test_a_longer_mean_takes_longer(dense):
    short, long = (dense.plan(mean_answer=mean).step for mean in (500, 3000))
    assert long.seconds > short.seconds
    assert long.drawn == 6 * short.drawn


def test_a_plan_is_the_same_twice(dense):
    assert dense.plan().to_mapping() == dense.plan().to_mapping()
