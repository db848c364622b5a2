"""Counts that do not come out even are refused before anything starts, each with its key and what to set instead."""

import json

import pytest
from omegaconf import OmegaConf

from verl_tim.tasks.random_model import hf_config
from verl_tim.training.batches import batches, replicas
from verl_tim.training.start_checks import View

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
GOOD = {
    "data.train_batch_size": 64,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
    f"{REF}.log_prob_micro_batch_size_per_gpu": 8,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 8,
}


def view(changes=None):
    config = OmegaConf.create({})
    for key, value in {**GOOD, **(changes or {})}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return View(config)


def found(changes=None):
    looked_at = view(changes)
    return [*batches(looked_at, None), *replicas(looked_at, None)]


def test_what_comes_out_even_is_fine():
    assert found() == []
    for fine in (
        {f"{ACTOR}.ppo_mini_batch_size": 64},
        {f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1},
        {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1},
        {f"{ROLLOUT}.tensor_model_parallel_size": 4},
        {f"{ROLLOUT}.tensor_model_parallel_size": 8, f"{ROLLOUT}.data_parallel_size": 2},
        {f"{ACTOR}.fsdp_config.fsdp_size": 8},
        {f"{ACTOR}.fsdp_config.fsdp_size": 64},
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        {f"{ROLLOUT}.agent.num_workers": 3},
    ):
        assert found(fine) == [], fine


@pytest.mark.parametrize(
    ("changes", "key", "problem", "remedy"),
    [
        ({f"{ACTOR}.ppo_mini_batch_size": 24}, f"{ACTOR}.ppo_mini_batch_size", "train_batch_size=64", "divisor of 64"),
        ({f"{ACTOR}.ppo_mini_batch_size": 128}, f"{ACTOR}.ppo_mini_batch_size", "train_batch_size=64", "divisor"),
        (
            {f"{ACTOR}.ppo_mini_batch_size": 1},
            f"{ACTOR}.ppo_mini_batch_size",
            "1 prompts x actor_rollout_ref.rollout.n=8 are 8 sequences per optimiser step, which cannot be dealt to "
            "the 16 ranks (trainer.nnodes=2 x trainer.n_gpus_per_node=8)",
            "multiple of 2",
        ),
        ({"trainer.n_gpus_per_node": 3}, f"{ACTOR}.ppo_mini_batch_size", "6 ranks", "multiple of 3"),
        (
            # 16 x 3 sequences come out even on 16 ranks, and 3 of each do not in micro-batches of 4
            {f"{ROLLOUT}.n": 3, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1},
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            "the 3 sequences",
            "divisor of 3",
        ),
        (
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6},
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            "is 6 and does not divide the 8 sequences",
            "divisor of 8",
        ),
        (
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 12},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "32 sequences",
            "divisor of 32",
        ),
        (
            {f"{REF}.log_prob_micro_batch_size_per_gpu": 12, f"{ACTOR}.use_kl_loss": True},
            f"{REF}.log_prob_micro_batch_size_per_gpu",
            "32 sequences",
            "use_dynamic_bsz=true",
        ),
        (
            {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 3},
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            "16 ranks",
            "Set it to 1",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 3},
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "16 ranks",
            "Set it to 1",
        ),
        (
            {"trainer.use_v1": False, f"{ROLLOUT}.agent.num_workers": 3},
            f"{ROLLOUT}.agent.num_workers",
            "512 sequences",
            "divisor of 512",
        ),
        ({f"{ACTOR}.fsdp_config.fsdp_size": 6}, f"{ACTOR}.fsdp_config.fsdp_size", "16 ranks", "divisor of 16"),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 3},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "a replica takes 3 GPUs",
            "divide 8",
        ),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.data_parallel_size": 3},
            f"{ROLLOUT}.data_parallel_size",
            "a replica takes 6 GPUs",
            "divide 8",
        ),
        (
            # divides all GPUs, and some replicas would lie across two nodes
            {f"{ROLLOUT}.tensor_model_parallel_size": 3, "trainer.nnodes": 3, f"{ROLLOUT}.n": 12},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "24, 8 per node",
            "whole nodes",
        ),
        (
            {f"{ROLLOUT}.pipeline_model_parallel_size": 4},
            f"{ROLLOUT}.pipeline_model_parallel_size",
            "no vllm in pipeline stages",
            "tensor_model_parallel_size",
        ),
    ],
)
def test_each_misfit_is_named(changes, key, problem, remedy):
    (finding,) = found(changes)
    assert finding.key == key
    assert problem in finding.problem
    assert remedy in finding.remedy


def test_micro_batches_by_tokens_need_no_divisor():
    assert found({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6, f"{ACTOR}.use_dynamic_bsz": True}) == []
    # a reference model that nobody asks
    assert found({f"{REF}.log_prob_micro_batch_size_per_gpu": 12}) == []


@pytest.mark.parametrize("wrong", ["x", 0, -1, 1.5, True, float("nan")])
def test_values_that_are_no_counts_are_left_to_their_check(wrong):
    assert found({f"{ACTOR}.ppo_mini_batch_size": wrong, "data.train_batch_size": 7}) == []


def test_heads_of_another_engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3-30b-a3b").to_dict()))
    model = {
        "actor_rollout_ref.model.path": str(tmp_path),
        "trainer.n_gpus_per_node": 64,
        "trainer.nnodes": 1,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    }
    assert found({**model, f"{ROLLOUT}.tensor_model_parallel_size": 32}) == []
    (finding,) = found({**model, f"{ROLLOUT}.tensor_model_parallel_size": 64})
    assert finding.key == f"{ROLLOUT}.tensor_model_parallel_size"
    assert "32 heads" in finding.problem
