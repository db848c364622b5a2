"""Memory of the phases: what is resident when, and that it moves in the right direction."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planning.conftest import DENSE, Run
from verl_tim.planning.phase import PHASES

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"


@pytest.fixture(scope="module")
def shared():
    return Run(DENSE, "qwen3-1.7b", "H200")


@pytest.fixture(scope="module")
def shared_sparse():
    return Run(DENSE, "qwen3-30b-a3b", "H200")


def totals(run, **values):
    run.set(**{**START, **values})
    memory = run.memory
    return {phase.name: phase.total for phase in memory.phases}


START = {
    "trainer__nnodes": 1,
    "data__train_batch_size": 4096,
    f"{ACTOR}__ppo_mini_batch_size": 4096,
    "data__max_response_length": 4096,
    f"{ROLLOUT}__response_length": 4096,
    f"{ACTOR}__ppo_max_token_len_per_gpu": 65536,
    f"{ROLLOUT}__log_prob_max_token_len_per_gpu": 65536,
    f"{ROLLOUT}__max_num_seqs": 64,
    f"{ROLLOUT}__gpu_memory_utilization": 0.6,
    f"{ROLLOUT}__tensor_model_parallel_size": 1,
    f"{ROLLOUT}__free_cache_engine": True,
    f"{ACTOR}__fsdp_config__optimizer_offload": False,
    f"{ACTOR}__fsdp_config__param_offload": False,
    f"{ACTOR}__fsdp_config__offload_policy": False,
    "actor_rollout_ref__model__enable_gradient_checkpointing": True,
    "actor_rollout_ref__model__enable_activation_offload": False,
}
POWERS = st.integers(0, 6).map(lambda power: 2**power)
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(few=POWERS, times=POWERS, tokens=st.integers(5, 64))
def test_more_gpus_never_raise_what_one_holds(shared, shared_sparse, few, times, tokens):
    for run in (shared, shared_sparse):
        limit = {f"{ACTOR}__ppo_max_token_len_per_gpu": 1024 * tokens}
        less = totals(run, trainer__nnodes=few, **limit)
        more = totals(run, trainer__nnodes=few * times, **limit)
        for phase in PHASES:
            assert more[phase] <= less[phase] * (1 + 1e-12), phase


@quick
@given(short=st.integers(16, 20_000), further=st.integers(0, 19_900))
def test_longer_answers_never_lower_it(shared, short, further):
    before = totals(shared, data__max_response_length=short)
    after = totals(shared, data__max_response_length=short + further)
    for phase in PHASES:
        assert after[phase] >= before[phase] * (1 - 1e-12), phase


@quick
@given(small=st.integers(6, 64), further=st.integers(0, 64))
def test_larger_micro_batches_never_lower_the_update(shared, small, further):
    key = f"{ACTOR}__ppo_max_token_len_per_gpu"
    before, after = (totals(shared, **{key: 1024 * size})["update"] for size in (small, small + further))
    assert after >= before


@quick
@given(low=st.integers(10, 95), further=st.integers(0, 40))
def test_a_larger_share_never_lowers_the_rollout_or_its_pool(shared, low, further):
    key = f"{ROLLOUT}__gpu_memory_utilization"
    high = min(95, low + further)
    before = totals(shared, **{key: low / 100})["rollout"]
    pool = shared.memory.rollout.pool_tokens
    assert totals(shared, **{key: high / 100})["rollout"] >= before
    assert shared.memory.rollout.pool_tokens >= pool


@quick
@given(batch=st.integers(1, 8), more=st.integers(1, 8))
def test_more_sequences_never_lower_the_update(shared, batch, more):
    def update(count):
        values = {"data__train_batch_size": count, f"{ACTOR}__ppo_mini_batch_size": count}
        return totals(shared, **values)["update"]

    assert update(batch * more) >= update(batch)


def test_sharding_divides_the_states(shared):
    one = totals(shared, trainer__n_gpus_per_node=1, trainer__nnodes=1)
    memory = shared.memory
    master = {item.name: item.nbytes for item in memory.phases[2].items}
    assert master["master weights"] == 4 * shared.shape.parameters
    assert master["AdamW moments"] == 8 * shared.shape.parameters
    totals(shared, trainer__n_gpus_per_node=8)
    eight = {item.name: item.nbytes for item in shared.memory.phases[2].items}
    assert eight["master weights"] == master["master weights"] / 8
    assert eight["AdamW moments"] == master["AdamW moments"] / 8
    assert one["update"] > sum(eight.values())


def items(run, phase, **values):
    run.set(**{**START, "trainer__n_gpus_per_node": 8, **values})
    (found,) = (one for one in run.memory.phases if one.name == phase)
    return {item.name: item.nbytes for item in found.items}


def test_what_is_asleep_is_not_there(shared):
    for phase in ("log-probs", "update"):
        assert "KV pool" not in items(shared, phase)
        assert items(shared, phase, **{f"{ROLLOUT}__free_cache_engine": False})["KV pool"] > 0
    sync = items(shared, "weight sync")
    assert "KV pool" not in sync
    assert sync["rollout weights"] == 2 * shared.shape.parameters - 2 * shared.shape.config.hidden_size
    assert sync["buckets"] == 2 * (2048 << 20)


def test_offloads(shared):
    fsdp = f"{ACTOR}__fsdp_config"
    stays = items(shared, "rollout")
    moments = items(shared, "rollout", **{f"{fsdp}__optimizer_offload": True})
    assert stays["AdamW moments"] > 0
    assert moments["AdamW moments"] == 0
    assert moments["master weights"] == stays["master weights"]
    assert items(shared, "rollout", **{f"{fsdp}__param_offload": True})["master weights"] == 0
    # an update has all of it on the GPU; a forward has the parameters
    both = {f"{fsdp}__optimizer_offload": True, f"{fsdp}__param_offload": True}
    assert items(shared, "update", **both)["AdamW moments"] == items(shared, "update")["AdamW moments"]
    assert items(shared, "log-probs", **both)["AdamW moments"] == 0
    assert items(shared, "log-probs", **both)["master weights"] > 0
    policy = items(shared, "update", **{f"{fsdp}__offload_policy": True})
    for name in ("master weights", "AdamW moments", "gradients", "AdamW's temporary"):
        assert policy[name] == 0, name
    assert shared.memory.host_bytes == 16 * shared.shape.parameters


def test_checkpointing_and_activation_offload(shared):
    model = "actor_rollout_ref__model"
    with_it = items(shared, "update")["activations"]
    without = items(shared, "update", **{f"{model}__enable_gradient_checkpointing": False})["activations"]
    offloaded = items(shared, "update", **{f"{model}__enable_activation_offload": True})["activations"]
    tokens, layers, width = 65536, 28, 2048
    assert with_it > 2 * tokens * layers * width
    assert without > 2 * tokens * layers * (width + shared.shape.saved_elements)
    assert offloaded < with_it < without


def test_tensor_and_pipeline_ranks_share_weights_and_pool(shared):
    one = shared.set(**START, trainer__n_gpus_per_node=8).memory.rollout
    four = shared.set(**{f"{ROLLOUT}__tensor_model_parallel_size": 4}).memory.rollout
    assert four.weights == pytest.approx(one.weights / 4)
    assert four.token_bytes == one.token_bytes / 4
    both = shared.set(
        **{f"{ROLLOUT}__tensor_model_parallel_size": 2, f"{ROLLOUT}__pipeline_model_parallel_size": 2}
    ).memory.rollout
    assert both.token_bytes == one.token_bytes / 4
    assert one.weights / 4 <= both.weights < one.weights / 2  # the embedding is on one stage
    shared.set(**{f"{ROLLOUT}__pipeline_model_parallel_size": 1})


def test_the_largest_pool_is_what_the_longest_sequences_can_use(shared):
    shared.set(**START, trainer__n_gpus_per_node=8)
    assert shared.memory.rollout.pool_tokens == 64 * 5120
    shared.set(**{f"{ROLLOUT}__max_num_seqs": 4096})
    rollout = shared.memory.rollout
    held = rollout.weights + rollout.activations + rollout.graphs + (256 << 20) + rollout.pool
    assert held == pytest.approx(0.6 * shared.gpu.memory)


def test_recomputing_twice_makes_no_difference(dense):
    first = [phase.total for phase in dense.memory.phases]
    assert first == [phase.total for phase in dense.memory.phases]
    assert [phase.name for phase in dense.memory.phases] == list(PHASES)
    for phase in dense.memory.phases:
        assert all(item.nbytes >= 0 for item in phase.items)
