"""The paper's table of runs, as values of a composed config; what is not the paper's says where it is from."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# The public scripts' optimiser and validation, and what the paper names for every run.
_OPTIMISER = {
    f"{ACTOR}.optim.betas": [0.9, 0.95],
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.optim.override_optimizer_config.eps": 1e-15,
    f"{ACTOR}.optim.lr": 1e-6,
}
_VALIDATION = {
    f"{ROLLOUT}.val_kwargs.n": 32,
    f"{ROLLOUT}.val_kwargs.temperature": 0.6,
    f"{ROLLOUT}.val_kwargs.do_sample": True,
}
_DENSE = {
    "actor_rollout_ref.model.path": "Qwen/Qwen3-1.7B",
    "tim.task.name": "sanity_r1d",
    "tim.task.validation": ["aime24"],
    "data.train_batch_size": 64,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 8192,
    "data.seed": 42,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 32768,
    f"{ACTOR}.fsdp_config.param_offload": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.max_num_seqs": 512,
    f"{ROLLOUT}.max_num_batched_tokens": 4096,
    "trainer.total_epochs": 88,
    "trainer.test_freq": 50,
    **_OPTIMISER,
    **_VALIDATION,
}
_GROUP = {"algorithm.adv_estimator": "grpo", f"{ACTOR}.policy_loss.loss_mode": "vanilla", "tim.on_policy": False}
_WHITENED = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    f"{ACTOR}.policy_loss.loss_mode": "gpg",
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_kl_loss": False,
    "tim.on_policy": True,
}
_DENSE_GRPO = {
    **_DENSE,
    **_GROUP,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ROLLOUT}.n": 8,
    f"{ACTOR}.clip_ratio_high": 0.28,
}
_DENSE_REINFORCE = {**_DENSE, **_WHITENED, f"{ACTOR}.ppo_mini_batch_size": 64}
_MOE = {
    "tim.task.name": "dapo_math",
    "data.max_prompt_length": 2048,
    "data.max_response_length": 20480,
    f"{ACTOR}.fsdp_config.param_offload": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 4,
}


def _nodes(nodes: int, gpus: int) -> dict[str, int]:
    return {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus}


PAPER = {
    "dense_grpo": {**_DENSE_GRPO, **_nodes(1, 8), f"{ROLLOUT}.gpu_memory_utilization": 0.9},
    "dense_grpo_1gpu": {**_DENSE_GRPO, **_nodes(1, 1)},
    "dense_reinforce": {**_DENSE_REINFORCE, **_nodes(2, 8), f"{ROLLOUT}.gpu_memory_utilization": 0.9},
    "dense_reinforce_1gpu": {**_DENSE_REINFORCE, **_nodes(1, 1)},
    "moe_reinforce": {
        **_MOE,
        **_WHITENED,
        **_OPTIMISER,
        **_VALIDATION,
        **_nodes(8, 8),
        "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B-Base",
        "tim.task.validation": ["aime24"],
        "data.train_batch_size": 512,
        "data.seed": 42,
        f"{ACTOR}.ppo_mini_batch_size": 512,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ROLLOUT}.n": 16,
        f"{ROLLOUT}.max_num_batched_tokens": 20480,
        f"{ROLLOUT}.gpu_memory_utilization": 0.5,
        "trainer.total_epochs": 8,
        "trainer.test_freq": 20,
        "trainer.save_freq": 50,
    },
    "moe_grpo": {
        **_MOE,
        **_GROUP,
        **_nodes(1, 8),
        "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B",
        "tim.task.validation": ["aime25"],
        "data.train_batch_size": 1024,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.clip_ratio_high": 0.2,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.max_num_batched_tokens": 4096,
        f"{ROLLOUT}.gpu_memory_utilization": 0.9,
        "trainer.total_epochs": 10,
        "trainer.test_freq": 5,
    },
}
