"""Keys that a plan cannot speak of, or under which the run would not start, are named."""

import pytest

from verl_tim.launch.errors import LaunchError

ACTOR, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__rollout"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({f"{ACTOR}__strategy": "megatron"}, "actor.strategy"),
        ({f"{ROLLOUT}__name": "sglang"}, "rollout.name"),
        ({"trainer__v1__trainer_mode": "separate_async"}, "trainer.v1.trainer_mode"),
        ({f"{ROLLOUT}__nnodes": 2}, "rollout.nnodes"),
        ({"algorithm__adv_estimator": "gae"}, "algorithm.adv_estimator"),
        ({"actor_rollout_ref__model__lora_rank": 8}, "model.lora_rank"),
        ({f"{ROLLOUT}__expert_parallel_size": 2}, "rollout.expert_parallel_size"),
        ({f"{ACTOR}__optim__optimizer": "AdamW8bit"}, "optim.optimizer"),
        ({f"{ROLLOUT}__tensor_model_parallel_size": 3}, "tensor_model_parallel_size"),
        ({f"{ROLLOUT}__tensor_model_parallel_size": 16, "trainer__n_gpus_per_node": 16}, "tensor_model_parallel_size"),
        ({f"{ROLLOUT}__gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({f"{ACTOR}__ulysses_sequence_parallel_size": 2}, "actor.ulysses_sequence_parallel_size"),
        ({f"{ACTOR}__fsdp_config__ulysses_sequence_parallel_size": 2}, "fsdp_config.ulysses_sequence_parallel_size"),
        (
            {f"{ACTOR}__ulysses_sequence_parallel_size": 0, f"{ACTOR}__fsdp_config__ulysses_sequence_parallel_size": 2},
            "fsdp_config.ulysses_sequence_parallel_size",
        ),
        ({f"{ACTOR}__ppo_mini_batch_size": 48}, "ppo_mini_batch_size"),
        ({"trainer__nnodes": 3}, "trainer.nnodes"),
        ({f"{ACTOR}__ppo_max_token_len_per_gpu": 4096}, "ppo_max_token_len_per_gpu"),
        ({"data__max_response_length": 50_000}, "data.max_response_length"),
        (
            {f"{ACTOR}__use_dynamic_bsz": False, f"{ACTOR}__ppo_micro_batch_size_per_gpu": None},
            "ppo_micro_batch_size_per_gpu",
        ),
    ],
)
def test_refused(dense, values, key):
    with pytest.raises(LaunchError) as caught:
        dense.set(**values).memory  # noqa: B018
    assert any(key in finding.key for finding in caught.value.findings), caught.value.findings
    assert all(finding.remedy for finding in caught.value.findings)


def test_several_are_named_together(dense):
    with pytest.raises(LaunchError) as caught:
        dense.set(**{f"{ACTOR}__strategy": "megatron", f"{ROLLOUT}__name": "sglang"}).memory  # noqa: B018
    assert len(caught.value.findings) == 2


def test_parallel_degrees_are_verls(dense):
    dense.set(**{f"{ROLLOUT}__tensor_model_parallel_size": 2, f"{ROLLOUT}__pipeline_model_parallel_size": 2})
    settings = dense.memory.settings
    assert (settings.replica_gpus, settings.replicas) == (4, 2)


def test_old_log_probs_that_are_not_computed_are_not_planned(dense):
    assert dense.memory.settings.recompute_share == 1
    dense.set(tim__reuse_rollout_log_probs={"enabled": True, "audit_every": 10})
    assert dense.memory.settings.recompute_share == pytest.approx(0.1)
    dense.set(tim__reuse_rollout_log_probs={"enabled": False, "audit_every": 10})
    dense.set(algorithm__rollout_correction__bypass_mode=True)
    assert dense.memory.settings.recompute_share == 0
    assert "old log-probs" not in [part.name for part in dense.plan().step.parts]
    dense.set(algorithm__rollout_correction__old_forward=True)
    assert dense.memory.settings.recompute_share == 1


def test_the_reference_costs_a_pass_and_no_gpu_memory(dense):
    before = [phase.total for phase in dense.memory.phases]
    dense.set(**{f"{ACTOR}__use_kl_loss": True})
    assert [phase.total for phase in dense.memory.phases] == before
    assert dense.memory.host_bytes == 4 * dense.shape.parameters
    parts = {part.name: part.seconds for part in dense.plan().step.parts}
    assert parts["reference"] > parts["old log-probs"]


def test_micro_batches_by_sequences(dense):
    dense.set(
        **{
            f"{ACTOR}__use_dynamic_bsz": False,
            f"{ROLLOUT}__log_prob_use_dynamic_bsz": False,
            f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4,
            f"{ROLLOUT}__log_prob_micro_batch_size_per_gpu": 8,
        }
    )
    settings = dense.memory.settings
    assert settings.micro_tokens(update=True) == 4 * 5120
    assert settings.micro_tokens(update=False) == 8 * 5120
