"""What a run without a GPU holds of its machine's memory."""

import pytest

from tests.planning.conftest import ROLLOUT, Run
from verl_tim.planning.host import Host
from verl_tim.planning.host_plan import make_host_plan
from verl_tim.planning.shape import find_shape

GIB = 1 << 30
HOST = Host(64 * GIB, 60 * GIB)
WORDS = ("cpu_grpo", "model=hf", "actor_rollout_ref.model.path=Qwen/Qwen3-1.7B")


def planned(*words, host=HOST):
    run = Run([*WORDS, *words], "qwen3-1.7b", "H200")
    return make_host_plan(run.config, run.shape, host)


def items(plan, phase):
    (found,) = (one for one in plan.phases if one.name == phase)
    return {item.name: item.nbytes for item in found.items}


def test_states_are_there_in_every_phase_whatever_is_offloaded():
    plain = planned()
    parameters = plain.shape.parameters
    for phase in ("rollout", "log-probs", "update", "weight sync"):
        assert items(plain, phase)["master weights"] == 4 * parameters
        assert items(plain, phase)["AdamW moments"] == 8 * parameters
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    offloaded = planned(f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true")
    assert [phase.total for phase in offloaded.phases] == [phase.total for phase in plain.phases]


def test_the_rollout_sleeps_while_the_trainer_works_unless_it_is_vllm():
    assert "KV pool" not in items(planned(), "update")
    vllm = planned("rollout=vllm")
    assert items(vllm, "update")["KV pool"] == items(vllm, "rollout")["KV pool"] == GIB, "kv_cache_memory_bytes"
    kept = planned(f"{ROLLOUT}.free_cache_engine=false")
    assert "KV pool" in items(kept, "update")


def test_the_pool_is_a_share_of_what_is_free_and_no_more_than_the_sequences_need():
    plan = planned()
    page, longest = 16, 96
    assert plan.rollout.pool_tokens == plan.settings.max_sequences * -(-longest // page) * page
    weights, base = plan.shape.parameters, items(plan, "rollout")["processes"]
    long = planned("data.max_response_length=4032", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192")
    assert long.rollout.pool == pytest.approx(0.3 * (64 * GIB - base - 14 * weights), rel=1e-3)
    given = planned(f"+{ROLLOUT}.engine_kwargs.vexact.kv_cache_tokens=4096")
    assert given.rollout.pool_tokens == 4096


def test_nothing_is_of_a_gpu_and_the_processes_are_counted():
    one, two = planned(), planned("trainer.n_gpus_per_node=2")
    for phase in one.phases:
        assert not any("CUDA" in item.why for item in phase.items)
        assert {"decode graphs", "allocator", "rollout's reserve"}.isdisjoint(item.name for item in phase.items)
    assert items(two, "rollout")["processes"] > items(one, "rollout")["processes"] > 4 * GIB
    assert items(two, "rollout")["rollout weights"] == 2 * items(one, "rollout")["rollout weights"]
    assert items(two, "rollout")["master weights"] == items(one, "rollout")["master weights"], "two shards"


def test_a_bucket_is_no_larger_than_the_weights():
    plan = planned()
    weights = 2 * plan.shape.parameters
    assert items(plan, "weight sync")["buckets"] == 3 * min(weights, 2048 << 20)
    small = planned(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=8")
    assert items(small, "weight sync")["buckets"] == 3 * (8 << 20)


def test_a_pool_below_one_sequence_is_a_misfit():
    plan = planned(f"+{ROLLOUT}.engine_kwargs.vexact.kv_cache_tokens=64")
    (misfit,) = plan.misfits
    assert misfit.phase == "rollout"
    assert "less than one sequence" in misfit.problem


def test_a_peak_that_was_measured():
    """recipe=cpu_grpo, proportional set size of all its processes, 2026-12-03: 4.46 GiB."""
    run = Run(["cpu_grpo"], "qwen3-1.7b", "H200")
    plan = make_host_plan(run.config, find_shape(None, kind="qwen3"), HOST)
    assert max(phase.total for phase in plan.phases) / GIB == pytest.approx(4.46, rel=0.1)


def test_a_reference_model_is_there_too():
    with_loss = planned("actor_rollout_ref.actor.use_kl_loss=true")
    assert items(with_loss, "rollout")["reference model"] == 4 * with_loss.shape.parameters
