"""Every rule: one config that it names, with the key, and the same config put right, of which it says nothing."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from verl_tim.correction import find_in_overrides
from verl_tim.doctor.rule import ENVIRONMENT, Severity
from verl_tim.doctor.rules import ALL, start
from verl_tim.replay.routers import NUM_EXPERTS
from verl_tim.training.config import ATTENTION_KEY, BACKEND_KEY, EXTERNAL_LIB
from verl_tim.training.correction_config import CORRECTION_KEY, LOSS_MODE_KEY, WORKER_KEY
from verl_tim.training.determinism import AGENT_LOOP_KEY

from .conftest import GPU_MACHINE, H200

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENGINE = f"{ACTOR}.fsdp_config"
PARAM = f"{ENGINE}.mixed_precision.param_dtype"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
VEXACT = f"{ROLLOUT}.engine_kwargs.vexact"
CONTRACT = {BACKEND_KEY: "contract"}
INVARIANT = {f"{ENVIRONMENT}.VLLM_BATCH_INVARIANT": "1"}
DETERMINISTIC = {"tim.deterministic": True}
MOE = {"num_experts": 128}
NO_GPU = replace(GPU_MACHINE, gpus=())
GIB = 2**30


def machine(**changes):
    return replace(GPU_MACHINE, **changes)


def environment(**variables):
    return machine(environment=variables)


@dataclass(frozen=True)
class Case:
    """`bad` makes the rule name `key`; with `good` it is silent. Both are keys changed in the config `base`."""

    rule: str
    key: str
    bad: dict = field(default_factory=dict)
    good: dict = field(default_factory=dict)
    base: str = "verl"
    facts: dict = field(default_factory=dict)  # view_of's other arguments, in both
    bad_facts: dict = field(default_factory=dict)
    good_facts: dict = field(default_factory=dict)


def rejecting(**more):
    return {
        f"{CORRECTION_KEY}.rollout_rs": "seq_mean_k3",
        f"{CORRECTION_KEY}.rollout_rs_threshold": 0.01,
        **{f"{CORRECTION_KEY}.{name}": value for name, value in more.items()},
    }


TOKEN_TIS = {f"{CORRECTION_KEY}.rollout_is": "token"}
BYPASS = {f"{CORRECTION_KEY}.bypass_mode": True}
REINFORCE = {**BYPASS, f"{CORRECTION_KEY}.loss_type": "reinforce"}
REUSE = {"tim.reuse_rollout_log_probs.enabled": True}
ON_POLICY = {"tim.on_policy": True, f"{ACTOR}.ppo_mini_batch_size": 16, LOSS_MODE_KEY: "gpg"}

PACKED = {
    f"{MODEL}.use_remove_padding": True,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 32768,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
}

CASES = [
    # the trainer's forward
    Case("exact.trainer-numerics", BACKEND_KEY, {}, CONTRACT),
    Case("exact.strategy", f"{ACTOR}.strategy", {f"{ACTOR}.strategy": "fsdp"}, {f"{ACTOR}.strategy": "fsdp2"}),
    Case(
        "exact.sequence-parallel",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
    ),
    Case(
        "exact.sequence-parallel",
        f"{ENGINE}.ulysses_sequence_parallel_size",
        {f"{ENGINE}.ulysses_sequence_parallel_size": 2},
    ),
    Case("exact.lora", f"{MODEL}.lora_rank", {f"{MODEL}.lora_rank": 8}),
    Case("exact.lora", f"{MODEL}.lora_adapter_path", {f"{MODEL}.lora_adapter_path": "adapter"}),
    Case("exact.liger", f"{MODEL}.use_liger", {f"{MODEL}.use_liger": True}),
    Case("exact.tiled-mlp", f"{MODEL}.tiled_mlp.enabled", {f"{MODEL}.tiled_mlp.enabled": True}),
    Case("exact.quantised-training", f"{ENGINE}.qat.enable", {f"{ENGINE}.qat.enable": True}),
    Case("exact.multi-token-prediction", f"{MODEL}.mtp.enable", {f"{MODEL}.mtp.enable": True}),
    Case("exact.torch-compile", f"{ENGINE}.use_torch_compile", {f"{ENGINE}.use_torch_compile": True}),
    Case(
        "exact.torch-compile",
        f"{ACTOR}.torchtitan.use_torch_compile",
        {f"{ACTOR}.strategy": "torchtitan"},
        {f"{ACTOR}.strategy": "torchtitan", f"{ACTOR}.torchtitan.use_torch_compile": False},
    ),
    Case("exact.autocast", PARAM, {PARAM: "bf16"}, {PARAM: "fp32"}),
    Case("exact.autocast", PARAM, {}, CONTRACT),
    Case("exact.model-dtype", f"{ENGINE}.model_dtype", {f"{ENGINE}.model_dtype": "bf16"}),
    Case("exact.dtypes", f"{ROLLOUT}.dtype", {f"{ROLLOUT}.dtype": "float16"}, {f"{ROLLOUT}.dtype": "bfloat16"}),
    Case("exact.dtypes", f"{ROLLOUT}.dtype", {PARAM: "fp32"}, {PARAM: "fp32", f"{ROLLOUT}.dtype": "float32"}),
    Case(
        "exact.dtypes",
        f"{ROLLOUT}.dtype",
        {f"{ROLLOUT}.dtype": "auto"},
        {f"{ROLLOUT}.dtype": "auto"},
        bad_facts={"model": {"dtype": "torch.float16"}},
        good_facts={"model": {"dtype": "torch.bfloat16"}},
    ),
    Case(
        "exact.head-temperature",
        f"{ROLLOUT}.temperature",
        {f"{ROLLOUT}.temperature": 0.7},
        {f"{ROLLOUT}.temperature": 1.0},
    ),
    Case(
        "exact.dropout",
        f"{MODEL}.override_config.attention_dropout",
        facts={},
        bad_facts={"model": {"attention_dropout": 0.1}},
        good_facts={"model": {"attention_dropout": 0.0}},
    ),
    Case(
        "exact.micro-batches",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8},
    ),
    Case(
        "exact.micro-batches",
        f"{ACTOR}.use_dynamic_bsz",
        {f"{ACTOR}.use_dynamic_bsz": True},
        {f"{ACTOR}.use_dynamic_bsz": True, **CONTRACT},
    ),
    Case("exact.attention-backends", f"{MODEL}.override_config.attn_implementation", {}, CONTRACT),
    Case(
        "start.padding",
        f"{ENGINE}.pad_to_length_bucket",
        {f"{ENGINE}.pad_to_length": True, f"{ENGINE}.pad_to_length_bucket": 100_000},
        {f"{ENGINE}.pad_to_length": True, f"{ENGINE}.pad_to_length_bucket": 64},
        base="vexact",
    ),
    Case("start.contract", ATTENTION_KEY, {ATTENTION_KEY: "fa2"}, {ATTENTION_KEY: "fa3"}, base="vexact"),
    Case(
        "exact.fused-sequence-parallel",
        f"{MODEL}.use_fused_kernels",
        {f"{MODEL}.use_fused_kernels": True, f"{ENGINE}.ulysses_sequence_parallel_size": 2},
        {f"{MODEL}.use_fused_kernels": True},
    ),
    Case(
        "exact.fused-sequence-parallel",
        f"{MODEL}.use_fused_kernels",
        {f"{MODEL}.use_fused_kernels": True, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        {f"{MODEL}.use_fused_kernels": True},
    ),
    # the rollout
    Case("exact.rollout-engine", f"{ROLLOUT}.name", {}, {f"{ROLLOUT}.name": "vexact"}),
    Case(
        "exact.rollout-parallel",
        f"{ROLLOUT}.tensor_model_parallel_size",
        {f"{ROLLOUT}.tensor_model_parallel_size": 2},
    ),
    Case(
        "exact.rollout-parallel",
        f"{ROLLOUT}.expert_parallel_size",
        {f"{ROLLOUT}.expert_parallel_size": 2},
        {f"{ROLLOUT}.expert_parallel_size": 1},
    ),
    Case("exact.batch-invariance", f"{ENVIRONMENT}.VLLM_BATCH_INVARIANT", {}, INVARIANT),
    Case(
        "exact.batch-invariance",
        "environment variable VLLM_BATCH_INVARIANT",
        bad_facts={"machine": environment(VLLM_BATCH_INVARIANT="0")},
        good_facts={"machine": environment(VLLM_BATCH_INVARIANT="1")},
    ),
    Case(
        "exact.batch-invariance",
        f"{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference",
        {f"{ROLLOUT}.name": "sglang"},
        {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference": True},
    ),
    Case("note.batch-invariance-gaps", f"{ROLLOUT}.enforce_eager", INVARIANT, {}),
    Case(
        "note.batch-invariance-gaps",
        f"{MODEL}.path",
        {**INVARIANT, f"{ROLLOUT}.enforce_eager": True},
        {**INVARIANT, f"{ROLLOUT}.enforce_eager": True},
        bad_facts={"model": MOE},
        good_facts={"model": {}},
    ),
    Case(
        "exact.prefix-cache",
        f"{ROLLOUT}.enable_prefix_caching",
        {f"{ROLLOUT}.enable_prefix_caching": True},
        {f"{ROLLOUT}.enable_prefix_caching": False},
    ),
    Case("exact.cuda-graphs", f"{ROLLOUT}.enforce_eager", {}, {f"{ROLLOUT}.enforce_eager": True}),
    Case("exact.quantisation", f"{ROLLOUT}.quantization", {f"{ROLLOUT}.quantization": "fp8"}),
    Case("exact.quantisation", f"{VLLM}.quantization", {f"{VLLM}.quantization": "fp8"}),
    Case(
        "exact.quantisation",
        f"{MODEL}.path",
        bad_facts={"model": {"quantization_config": {"bits": 4}}},
        good_facts={"model": {}},
    ),
    Case(
        "exact.kv-cache-dtype",
        f"{VLLM}.kv_cache_dtype",
        {f"{VLLM}.kv_cache_dtype": "fp8"},
        {f"{VLLM}.kv_cache_dtype": "auto"},
    ),
    Case("exact.kv-cache-dtype", f"{VLLM}.kv-cache-dtype", {f"{VLLM}.kv-cache-dtype": "fp8"}),
    Case("exact.speculative-decoding", f"{VLLM}.speculative_config", {f"{VLLM}.speculative_config": {"method": "mtp"}}),
    Case(
        "exact.speculative-decoding",
        f"{ROLLOUT}.mtp.enable_rollout",
        {f"{ROLLOUT}.mtp": {"enable": True, "enable_rollout": True}},
        {f"{ROLLOUT}.mtp": {"enable": True, "enable_rollout": False}},
    ),
    Case(
        "exact.vocabulary-padding",
        f"{MODEL}.path",
        facts={"model": {"vocab_size": 128}},
        bad_facts={"tokens": 99},
        good_facts={"tokens": 128},
    ),
    Case(
        "exact.vocabulary-padding",
        f"{MODEL}.path",
        {},
        {f"{ROLLOUT}.name": "vexact"},
        facts={"model": {"vocab_size": 128}, "tokens": 99},
    ),
    Case(
        "exact.attention-head-dim",
        f"{MODEL}.path",
        bad_facts={"model": {"head_dim": 64}},
        good_facts={"model": {"head_dim": 128}},
    ),
    Case(
        "exact.attention-head-dim",
        ATTENTION_KEY,
        {ATTENTION_KEY: "fa3"},
        {ATTENTION_KEY: "chunk64"},
        base="vexact",
        facts={"model": {"hidden_size": 512, "num_attention_heads": 8}},
    ),
    Case("exact.routes", f"{MODEL}.path", bad_facts={"model": MOE}, good_facts={"model": {"num_experts": 0}}),
    *(
        Case("exact.routes", f"{MODEL}.path", bad_facts={"model": {name: 64}}, good_facts={"model": {name: 0}})
        for name in NUM_EXPERTS
    ),
    Case(
        "exact.routes",
        f"{MODEL}.path",
        bad_facts={"model": {"text_config": SimpleNamespace(**MOE)}},
        good_facts={"model": {"text_config": SimpleNamespace()}},
    ),
    Case("exact.routes", f"{MODEL}.path", {BACKEND_KEY: "torch"}, {}, base="vexact", facts={"model": MOE}),
    Case(
        "exact.staleness",
        "trainer.v1.trainer_mode",
        {"trainer.v1.trainer_mode": "separate_async"},
        {"trainer.v1.trainer_mode": "sync"},
    ),
    Case(
        "note.stale-tokens",
        "trainer.v1.trainer_mode",
        {"trainer.v1.trainer_mode": "colocate_async"},
        {"trainer.v1.trainer_mode": "colocate_async", "tim.partial_rollout.max_version_lag": 0},
        base="vexact",
    ),
    Case("exact.weight-conversion", f"{ACTOR}.strategy", {f"{ACTOR}.strategy": "megatron"}),
    # sampling
    Case(
        "exact.logprobs-mode",
        f"{ROLLOUT}.logprobs_mode",
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs", f"{ROLLOUT}.temperature": 0.5},
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs", f"{ROLLOUT}.temperature": 1.0},
    ),
    Case("exact.logprobs-mode", f"{VLLM}.logprobs_mode", {f"{VLLM}.logprobs_mode": "processed_logits"}),
    Case("exact.sampling-support", f"{ROLLOUT}.top_p", {f"{ROLLOUT}.top_p": 0.9}),
    Case("exact.sampling-support", f"{ROLLOUT}.top_k", {f"{ROLLOUT}.top_k": 20}, {f"{ROLLOUT}.top_k": -1}),
    Case("exact.sampling-support", f"{ROLLOUT}.min_p", {f"{ROLLOUT}.min_p": 0.05}, {f"{ROLLOUT}.min_p": 0.0}),
    Case("note.sampling-support", f"{ROLLOUT}.top_p", {f"{ROLLOUT}.top_p": 0.9}, base="vexact"),
    Case("exact.repetition-penalty", f"{ROLLOUT}.repetition_penalty", {f"{ROLLOUT}.repetition_penalty": 1.1}),
    Case(
        "exact.retokenisation",
        f"{ROLLOUT}.multi_turn.use_inference_chat_template",
        {f"{ROLLOUT}.multi_turn.enable": True, f"{ROLLOUT}.multi_turn.use_inference_chat_template": True},
        {f"{ROLLOUT}.multi_turn.enable": True},
    ),
    Case(
        "exact.retokenisation",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
        {f"{ROLLOUT}.multi_turn.enable": True, f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "disable"},
        {f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "disable"},
    ),
    # the environment
    Case(
        "exact.tf32",
        f"{ENVIRONMENT}.NVIDIA_TF32_OVERRIDE",
        {f"{ENVIRONMENT}.NVIDIA_TF32_OVERRIDE": "1"},
        {f"{ENVIRONMENT}.NVIDIA_TF32_OVERRIDE": "0"},
    ),
    Case(
        "exact.tf32",
        "environment variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        bad_facts={"machine": environment(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")},
    ),
    Case(
        "exact.cublas-workspace",
        f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG",
        {f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        {f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    ),
    Case(
        "exact.flash-attention-version",
        f"{ENVIRONMENT}.VLLM_FLASH_ATTN_VERSION",
        {},
        {f"{ENVIRONMENT}.VLLM_FLASH_ATTN_VERSION": "2"},
    ),
    Case(
        "exact.determinism-variables",
        f"{ROLLOUT}.full_determinism",
        {f"{ROLLOUT}.full_determinism": True},
        {
            f"{ROLLOUT}.full_determinism": True,
            f"{ENVIRONMENT}.NCCL_ALGO": "Ring",
            f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG": ":16:8",
            f"{ENVIRONMENT}.FLASH_ATTENTION_DETERMINISTIC": "1",
        },
    ),
    # runs that repeat
    Case("exact.only-warns", f"{ENGINE}.full_determinism", {f"{ENGINE}.full_determinism": True}),
    Case("note.unseeded-order", "data.seed", {}, {"data.seed": 1}),
    Case("note.unseeded-order", "data.seed", {}, {"data.shuffle": False}),
    Case("note.unseeded-order", "data.seed", {}, DETERMINISTIC),
    Case("note.unseeded-samples", AGENT_LOOP_KEY, {}, DETERMINISTIC),
    Case(
        "start.deterministic",
        "trainer.v1.trainer_mode",
        {**DETERMINISTIC, "trainer.v1.trainer_mode": "colocate_async"},
        DETERMINISTIC,
        base="vexact",
    ),
    Case(
        "start.reward-in-loop",
        "tim.reward_in_loop",
        {"tim.reward_in_loop": True, "reward.reward_model.enable": True},
        {"tim.reward_in_loop": True},
        base="vexact",
    ),
    Case(
        "start.deterministic",
        f"{ENVIRONMENT}.VLLM_BATCH_INVARIANT",
        DETERMINISTIC,
        {**DETERMINISTIC, **INVARIANT},
    ),
    Case(
        "exact.variables-left-behind",
        "environment variable VLLM_FLASH_ATTN_VERSION",
        {"ray_kwargs.ray_init.address": "auto"},
        {"ray_kwargs.ray_init.address": "auto", f"{ENVIRONMENT}.VLLM_FLASH_ATTN_VERSION": "2"},
        facts={"machine": environment(VLLM_FLASH_ATTN_VERSION="2")},
    ),
    Case(
        "stops.expandable-segments",
        f"{ENVIRONMENT}.PYTORCH_CUDA_ALLOC_CONF",
        {f"{ENVIRONMENT}.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {f"{ENVIRONMENT}.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    ),
    Case(
        "correction.plugin-not-loaded",
        "environment variable VERL_USE_EXTERNAL_PLUGINS",
        base="vexact",
        bad_facts={"machine": environment(VERL_USE_EXTERNAL_PLUGINS="none")},
        good_facts={"machine": environment(VERL_USE_EXTERNAL_PLUGINS="verl_tim,other")},
    ),
    Case("stops.nccl-timeout", "actor_rollout_ref.nccl_timeout", {"actor_rollout_ref.nccl_timeout": 30}),
    Case(
        "stops.nccl-transports",
        f"{ENVIRONMENT}.NCCL_P2P_DISABLE",
        {
            f"{ENVIRONMENT}.NCCL_P2P_DISABLE": "1",
            f"{ENVIRONMENT}.NCCL_SHM_DISABLE": "1",
            "trainer.n_gpus_per_node": 2,
        },
        {f"{ENVIRONMENT}.NCCL_P2P_DISABLE": "1", "trainer.n_gpus_per_node": 2},
    ),
    # the correction
    Case(
        "correction.band-read-as-number",
        f"{CORRECTION_KEY}.rollout_is_threshold",
        bad_facts={"numbers": find_in_overrides([f"{CORRECTION_KEY}.rollout_is_threshold=0.5_5"])},
        good_facts={"numbers": find_in_overrides([f"{CORRECTION_KEY}.rollout_is_threshold='0.5_5'"])},
    ),
    Case(
        "correction.threshold-below-one",
        f"{CORRECTION_KEY}.rollout_is_threshold",
        {**TOKEN_TIS, f"{CORRECTION_KEY}.rollout_is_threshold": 0.55},
        {**TOKEN_TIS, f"{CORRECTION_KEY}.rollout_is_threshold": [0.5, 5]},
    ),
    Case(
        "correction.sequence-ratio-twice",
        LOSS_MODE_KEY,
        {LOSS_MODE_KEY: "gspo", f"{CORRECTION_KEY}.rollout_is": "sequence"},
        {LOSS_MODE_KEY: "gspo", **TOKEN_TIS},
    ),
    Case(
        "correction.sequence-ratio-twice",
        LOSS_MODE_KEY,
        {LOSS_MODE_KEY: "gspo", f"{CORRECTION_KEY}.rollout_is": "sequence_mean"},
        {LOSS_MODE_KEY: "vanilla", f"{CORRECTION_KEY}.rollout_is": "sequence_mean"},
        base="vexact",
    ),
    Case(
        "note.unused-setting",
        f"{CORRECTION_KEY}.rollout_is_threshold",
        {f"{CORRECTION_KEY}.rollout_is_threshold": 3},
        {**TOKEN_TIS, f"{CORRECTION_KEY}.rollout_is_threshold": 3},
    ),
    Case(
        "note.unused-setting",
        f"{CORRECTION_KEY}.rollout_rs_threshold",
        {f"{CORRECTION_KEY}.rollout_rs_threshold": 0.01},
        rejecting(),
    ),
    Case("note.unused-setting", f"{CORRECTION_KEY}.denominator", {**TOKEN_TIS, f"{CORRECTION_KEY}.denominator": "all"}),
    Case(
        "note.weights-hold-drift",
        f"{CORRECTION_KEY}.rollout_is",
        {**TOKEN_TIS, **REINFORCE, f"{ACTOR}.ppo_mini_batch_size": 8},
        {**TOKEN_TIS, **REINFORCE, f"{ACTOR}.ppo_mini_batch_size": 16},
    ),
    Case(
        "note.weights-hold-drift",
        f"{CORRECTION_KEY}.rollout_is",
        {**TOKEN_TIS, **REINFORCE, f"{ACTOR}.ppo_epochs": 2},
        {**TOKEN_TIS, **REINFORCE, f"{ACTOR}.ppo_epochs": 2, f"{CORRECTION_KEY}.old_forward": True},
        base="vexact",
    ),
    Case(
        "correction.padding-rejects-all",
        f"{CORRECTION_KEY}.rollout_rs",
        rejecting(),
        {},
        facts={"model": {"vocab_size": 128}, "tokens": 99},
    ),
    Case(
        "start.routing-replay",
        f"{ROLLOUT}.enable_rollout_routing_replay",
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        {f"{ROLLOUT}.enable_rollout_routing_replay": True, f"{ACTOR}.strategy": "megatron"},
    ),
    Case(
        "start.routing-replay",
        f"{ENGINE}.router_replay.mode",
        {f"{ENGINE}.router_replay.mode": "R3"},
        {f"{ENGINE}.router_replay.mode": "disabled"},
    ),
    Case(
        "start.vllm-routes",
        f"{ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts",
        {f"{ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts": True},
        {f"{ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts": False},
    ),
    Case(
        "start.vllm-invariant",
        f"{ROLLOUT}.full_determinism",
        {f"{ROLLOUT}.full_determinism": True},
        {f"{ROLLOUT}.full_determinism": False},
        facts={"machine": NO_GPU},
    ),
    Case(
        "start.vllm-invariant",
        "environment variable VLLM_BATCH_INVARIANT",
        bad_facts={"machine": replace(NO_GPU, environment={"VLLM_BATCH_INVARIANT": "1"})},
        good_facts={"machine": replace(NO_GPU, environment={"VLLM_BATCH_INVARIANT": "0"})},
    ),
    Case("waste.nothing-to-correct", CORRECTION_KEY, TOKEN_TIS, {}, base="vexact"),
    Case("note.nothing-corrected", CORRECTION_KEY, {}, TOKEN_TIS),
    # verl's own correction
    Case(
        "correction.log-probs-missing",
        f"{ROLLOUT}.calculate_log_probs",
        {**TOKEN_TIS, f"{ROLLOUT}.calculate_log_probs": False},
        {f"{ROLLOUT}.calculate_log_probs": False},
    ),
    Case(
        "correction.loss-ignores-it",
        LOSS_MODE_KEY,
        {**TOKEN_TIS, LOSS_MODE_KEY: "a_loss_of_mine"},
        {**TOKEN_TIS, LOSS_MODE_KEY: "cispo"},
    ),
    Case(
        "correction.bypass-in-the-driver-only",
        f"{CORRECTION_KEY}.bypass_mode",
        BYPASS,
        {**BYPASS, LOSS_MODE_KEY: "bypass_mode"},
    ),
    Case(
        "correction.worker-default",
        WORKER_KEY,
        {**BYPASS, LOSS_MODE_KEY: "bypass_mode"},
        {**BYPASS, LOSS_MODE_KEY: "bypass_mode", WORKER_KEY: {"bypass_mode": True}},
    ),
    Case(
        "correction.bypass-loss-without-bypass",
        LOSS_MODE_KEY,
        {LOSS_MODE_KEY: "bypass_mode"},
        {**BYPASS, LOSS_MODE_KEY: "bypass_mode"},
    ),
    Case(
        "correction.drift-rejected",
        f"{CORRECTION_KEY}.rollout_rs_signal",
        {**BYPASS, **rejecting(), f"{ACTOR}.ppo_mini_batch_size": 8},
        {**BYPASS, **rejecting()},
    ),
    Case(
        "correction.key-ignored",
        f"{CORRECTION_KEY}.denominator",
        {f"{CORRECTION_KEY}.denominator": "all"},
        {f"{CORRECTION_KEY}.denominator": "all", f"{MODEL}.external_lib": EXTERNAL_LIB},
    ),
    Case(
        "correction.k1-band-inverted",
        f"{CORRECTION_KEY}.rollout_rs",
        {f"{CORRECTION_KEY}.rollout_rs": "token_k1", f"{CORRECTION_KEY}.rollout_rs_threshold": [0.5, 5]},
        {f"{CORRECTION_KEY}.rollout_rs": "token_k1", f"{CORRECTION_KEY}.rollout_rs_threshold": 2},
    ),
    Case("correction.denominators", f"{CORRECTION_KEY}.rollout_rs", rejecting(), TOKEN_TIS),
    Case(
        "stops.whitening-empty",
        "algorithm.adv_estimator",
        {**rejecting(), "algorithm.adv_estimator": "reinforce_plus_plus"},
        rejecting(),
    ),
    Case(
        "correction.reward-rejected",
        f"{CORRECTION_KEY}.rollout_rs",
        {
            f"{CORRECTION_KEY}.rollout_rs": "token_k3",
            f"{CORRECTION_KEY}.rollout_rs_threshold": 0.1,
            "algorithm.adv_estimator": "reinforce_plus_plus",
        },
        {**rejecting(), "algorithm.adv_estimator": "reinforce_plus_plus"},
    ),
    Case(
        "correction.geometric-zero",
        LOSS_MODE_KEY,
        {**TOKEN_TIS, f"{CORRECTION_KEY}.rollout_is_threshold": [0.5, 5], LOSS_MODE_KEY: "geo_mean"},
        {**TOKEN_TIS, LOSS_MODE_KEY: "geo_mean"},
    ),
    Case(
        "correction.scale-factor",
        f"{ACTOR}.loss_scale_factor",
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 256},
    ),
    Case("note.mismatch-metric", "trainer", {}, {f"{MODEL}.external_lib": EXTERNAL_LIB}),
    # counts, lengths, versions
    Case(
        "start.replicas",
        f"{ROLLOUT}.tensor_model_parallel_size",
        {f"{ROLLOUT}.tensor_model_parallel_size": 2},
        {f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 8},
    ),
    Case(
        "stops.token-budget",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 511},
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 512},
    ),
    Case(
        "start.batches",
        f"{ROLLOUT}.agent.num_workers",
        {"trainer.use_v1": False, f"{ROLLOUT}.agent.num_workers": 3},
        {f"{ROLLOUT}.agent.num_workers": 3},
    ),
    Case(
        "stops.clones",
        f"{ROLLOUT}.full_determinism",
        {f"{ROLLOUT}.full_determinism": True},
        {f"{ROLLOUT}.full_determinism": True, f"{ROLLOUT}.n": 1},
    ),
    Case(
        "stops.flash-attention-missing",
        f"{MODEL}.override_config.attn_implementation",
        {},
        {f"{MODEL}.override_config.attn_implementation": "sdpa"},
        facts={"machine": machine(modules=frozenset())},
    ),
    Case(
        "stops.versions",
        "vllm",
        bad_facts={"machine": machine(versions={"vllm": "0.11.0"})},
        # scripts/vllm_cpu.sh
        good_facts={"machine": machine(versions={"vllm": "0.28.0+cpu"})},
    ),
    Case("stops.versions", "verl", bad_facts={"machine": machine(versions={"verl": "0.8.0"})}),
    Case(
        "stops.disk",
        "trainer.save_freq",
        {"trainer.save_freq": 5},
        {"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": 1},
        facts={"parameters": 10**9, "machine": machine(disk=13 * 10**9)},
    ),
    # memory
    Case(
        "stops.memory-while-generating",
        f"{ROLLOUT}.gpu_memory_utilization",
        {f"{ROLLOUT}.gpu_memory_utilization": 0.5},
        {f"{ROLLOUT}.gpu_memory_utilization": 0.5, f"{ENGINE}.optimizer_offload": True},
        facts={"parameters": 7 * 10**9},
    ),
    Case(
        "stops.memory-while-generating",
        f"{VEXACT}.kv_cache_bytes",
        {"trainer.device": "cuda", f"{VEXACT}.kv_cache_bytes": 141 * GIB},
        {"trainer.device": "cuda", f"{VEXACT}.kv_cache_bytes": 100 * GIB},
        base="vexact",
    ),
    Case(
        "stops.memory-while-training",
        "trainer.n_gpus_per_node",
        {},
        {"trainer.n_gpus_per_node": 2},
        facts={"parameters": 10 * 10**9, "machine": machine(gpus=(H200, H200))},
    ),
    Case(
        "stops.memory-while-training",
        f"{ROLLOUT}.free_cache_engine",
        {f"{ROLLOUT}.free_cache_engine": False},
        {},
        facts={"parameters": 5 * 10**9},
    ),
    # waste
    Case("waste.cache-not-freed", f"{ROLLOUT}.free_cache_engine", {f"{ROLLOUT}.free_cache_engine": False}),
    Case("waste.deterministic-fill", f"{ENGINE}.full_determinism", {f"{ENGINE}.full_determinism": True}),
    Case(
        "waste.no-byte-code",
        "environment variable PYTHONDONTWRITEBYTECODE",
        bad_facts={"machine": machine(environment={"PYTHONDONTWRITEBYTECODE": "1"}, byte_code=False)},
        good_facts={"machine": machine(environment={"PYTHONDONTWRITEBYTECODE": ""}, byte_code=False)},
    ),
    Case(
        "waste.no-byte-code",
        "environment variable PYTHONDONTWRITEBYTECODE",
        bad_facts={"machine": machine(environment={"PYTHONDONTWRITEBYTECODE": "1"}, byte_code=False)},
        good_facts={"machine": environment(PYTHONDONTWRITEBYTECODE="1")},
    ),
    Case("waste.polling", "trainer.v1.sampler.custom_sampler", {}, {"trainer.use_v1": False}),
    Case(
        "waste.checkpoints-pile-up",
        "trainer.max_actor_ckpt_to_keep",
        {"trainer.save_freq": 5},
        {"trainer.save_freq": 5, "trainer.max_actor_ckpt_to_keep": 2},
    ),
    Case("waste.group-of-one", f"{ROLLOUT}.n", {f"{ROLLOUT}.n": 1}),
    Case(
        "waste.packed-sdpa",
        f"{MODEL}.override_config.attn_implementation",
        {**PACKED, f"{MODEL}.override_config.attn_implementation": "sdpa"},
        {**PACKED, f"{MODEL}.override_config.attn_implementation": "flash_attention_2"},
    ),
    Case(
        "waste.packed-sdpa",
        f"{MODEL}.override_config.attn_implementation",
        {**PACKED, f"{MODEL}.override_config.attn_implementation": "eager"},
        {**PACKED, f"{MODEL}.override_config.attn_implementation": "eager", **CONTRACT},
    ),
    Case(
        "waste.packed-sdpa",
        f"{MODEL}.override_config.attn_implementation",
        {**PACKED, f"{MODEL}.override_config.attn_implementation": "sdpa"},
        {
            **PACKED,
            f"{MODEL}.override_config.attn_implementation": "sdpa",
            f"{ACTOR}.ppo_max_token_len_per_gpu": 2000,
        },
    ),
    Case(
        "waste.log-probs-twice",
        f"{CORRECTION_KEY}.old_forward",
        {**BYPASS, f"{CORRECTION_KEY}.old_forward": True},
        BYPASS,
        base="vexact",
    ),
    Case(
        "note.audited-once",
        "tim.reuse_rollout_log_probs.audit_every",
        {**REUSE, "tim.reuse_rollout_log_probs.audit_every": 50, "trainer.total_training_steps": 20},
        {**REUSE, "tim.reuse_rollout_log_probs.audit_every": 5, "trainer.total_training_steps": 20},
        base="vexact",
    ),
    Case("note.gate-off", "tim.gate.exact", {"tim.gate.exact": False}, base="vexact"),
    Case("note.gate-off", "tim.gate.on_mismatch", {"tim.gate.on_mismatch": "warn"}, base="vexact"),
    # start-up checks
    Case("start.keys", "tim.gat", {"tim.gat": 1}, base="vexact"),
    Case("start.values", f"{ROLLOUT}.temperature", {f"{ROLLOUT}.temperature": 0}),
    Case("start.correction", f"{CORRECTION_KEY}.rollout_is", {f"{CORRECTION_KEY}.rollout_is": "word"}),
    Case("start.run-folder", "tim.run_dir", {"tim.run_dir": __file__}, base="vexact"),
    Case(
        "start.prometheus",
        f"{ROLLOUT}.prometheus.file",
        {
            "actor_rollout_ref.rollout.prometheus.enable": True,
            "actor_rollout_ref.rollout.disable_log_stats": False,
            "actor_rollout_ref.rollout.prometheus.file": __file__,
        },
        base="vexact",
    ),
    Case("start.folders", "tim.cache_dir", {"tim.cache_dir": "/proc/cache"}, base="vexact"),
    Case(
        "start.to-be-made",
        "tim.task.name",
        {"data.train_files": None, "tim.task.name": "no_such"},
        {"data.train_files": None},
        base="vexact",
    ),
    Case(
        "start.machine",
        "trainer.n_gpus_per_node",
        {"trainer.n_gpus_per_node": 4096},
        {"trainer.device": "cpu", f"{ROLLOUT}.name": "vexact"},
    ),
    Case("start.packages", "trainer.logger", {"trainer.logger": ["clearml"]}, base="vexact"),
    Case("start.model", f"{MODEL}.path", {f"{MODEL}.path": "/nowhere"}),
    Case("start.tokenizer", f"{MODEL}.custom_chat_template", {f"{MODEL}.custom_chat_template": "{{ messages"}),
    Case("start.data", "data.train_files", {"data.train_files": "/nowhere.parquet"}),
    Case("start.reward", "reward.custom_reward_function.path", {"reward.custom_reward_function.path": "/no.py"}),
    Case("start.lengths", "data.max_response_length", {f"{ROLLOUT}.response_length": 100000}),
    Case("start.verl", ACTOR, {f"{ACTOR}.loss_agg_mode": "token-median"}),
    Case("start.spelling", "trainer.total_training_step", {"trainer.total_training_step": 5}),
    Case("start.batches", f"{ACTOR}.ppo_mini_batch_size", {f"{ACTOR}.ppo_mini_batch_size": 5}),
    Case(
        "start.on-policy",
        f"{ACTOR}.ppo_epochs",
        {**ON_POLICY, f"{ACTOR}.ppo_epochs": 2},
        ON_POLICY,
        base="vexact",
    ),
    Case("start.tim", "tim.trainer_numerics", {"tim.trainer_numerics": "stock"}, base="vexact"),
    Case("start.ray", "ray_kwargs.ray_init.num_cpus", {"ray_kwargs.ray_init.num_cpus": 2}, base="vexact"),
    Case(
        "start.cpu", f"{MODEL}.external_lib", {f"{MODEL}.external_lib": None}, base="vexact", facts={"machine": NO_GPU}
    ),
    Case("start.strategy", f"{ACTOR}.strategy", {f"{ACTOR}.strategy": "fsdp"}, base="vexact"),
    Case("start.contract", f"{MODEL}.use_liger", {f"{MODEL}.use_liger": True}, base="vexact"),
    Case("start.dtypes", f"{ROLLOUT}.dtype", {f"{ROLLOUT}.dtype": "float32"}, base="vexact"),
    Case(
        "start.rollout",
        f"{ROLLOUT}.data_parallel_size=2",
        {f"{ROLLOUT}.data_parallel_size": 2},
        base="vexact",
    ),
    Case("start.architecture", f"{MODEL}.path", {f"{MODEL}.path": "./nowhere"}, base="vexact"),
    Case("start.data-schema", "data.val_files", {"data.val_files": "/nowhere.parquet"}, base="vexact"),
    Case(
        "start.correction-reaches-the-loss",
        f"{ROLLOUT}.calculate_log_probs",
        {**TOKEN_TIS, WORKER_KEY: None, f"{ROLLOUT}.calculate_log_probs": False},
        {**TOKEN_TIS, WORKER_KEY: None},
        base="vexact",
    ),
    Case(
        "start.asynchronous",
        "trainer.v1.trainer_mode",
        {"trainer.v1.trainer_mode": "async"},
        {"trainer.v1.trainer_mode": "colocate_async"},
        base="vexact",
    ),
    Case("start.reused-log-probs", "tim.gate.exact", {**REUSE, "tim.gate.exact": False}, REUSE, base="vexact"),
    Case("start.cluster", "tim.launch.cpus", {"tim.launch.cpus": 0}, {"tim.launch.cpus": 4}, base="vexact"),
    Case(
        "start.restarts",
        "trainer.save_freq",
        {"tim.restarts.limit": 1, "trainer.save_freq": -1},
        {"tim.restarts.limit": 1, "trainer.save_freq": 5},
        base="vexact",
    ),
]
BY_ID = {rule.id: rule for rule in ALL}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.rule}-{case.key.rpartition('.')[2]}" for case in CASES])
def test_rule(case, view_of):
    rule = BY_ID[case.rule]
    bad = list(rule.examine(view_of(case.base, case.bad, **{**case.facts, **case.bad_facts})))
    assert case.key in [finding.key for finding in bad]
    assert all(finding.problem and (finding.remedy or rule.remedy) for finding in bad)
    assert list(rule.examine(view_of(case.base, case.good, **{**case.facts, **case.good_facts}))) == []


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == set(BY_ID)


def test_ids_are_unique_and_say_their_severity():
    assert len(BY_ID) == len(ALL)
    prefix = {
        Severity.EXACTNESS: "exact",
        Severity.CORRECTION: "correction",
        Severity.STOPS: "stops",
        Severity.WASTE: "waste",
        Severity.NOTE: "note",
    }
    for rule in ALL:
        assert rule.id.partition(".")[0] == ("start" if rule in start.RULES else prefix[rule.severity])
        assert rule.at_start or rule not in start.RULES
        assert rule.keys
        assert len(rule.why) > 20
        assert rule.remedy


def test_no_rule_falls_over_values_that_nobody_can_mean(view_of):
    nonsense = {
        key: value
        for key in (
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.temperature",
            f"{ROLLOUT}.top_p",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ACTOR}.ulysses_sequence_parallel_size",
            f"{MODEL}.lora_rank",
            "data.train_batch_size",
            "trainer.n_gpus_per_node",
            "trainer.save_freq",
            f"{CORRECTION_KEY}.rollout_is",
            f"{CORRECTION_KEY}.rollout_is_threshold",
        )
        for value in ("word",)
    }
    for base in ("verl", "vexact"):
        view = view_of(base, nonsense)
        for rule in ALL:
            if not rule.at_start:
                list(rule.examine(view))
