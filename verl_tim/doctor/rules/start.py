"""The start-up checks as rules: the same functions that keep a run of verl_tim from starting, listed and not raised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rule, Severity
from verl_tim.doctor.view import View
from verl_tim.launch.checks import CHECKS, Check, verl_config
from verl_tim.training import start_checks
from verl_tim.training.config import ATTENTION_KEY, BACKEND_KEY
from verl_tim.training.contract_limits import BUCKET
from verl_tim.training.finding import Finding

# What a check of the launcher looks at, by its name.
_KEYS = {
    "keys": ("tim.*", "any key left `???`"),
    "spelling": ("every key outside `tim:`",),
    "values": ("every key that verl has",),
    "correction": ("algorithm.rollout_correction",),
    "cluster": ("tim.launch",),
    "run folder": ("tim.run_dir",),
    "folders": ("tim.run_dir", "tim.cache_dir", "trainer.default_local_dir"),
    "prometheus": (f"{ROLLOUT}.prometheus.enable", f"{ROLLOUT}.prometheus.file"),
    "to be made": ("tim.task", "tim.model"),
    "machine": ("trainer.n_gpus_per_node", f"{ROLLOUT}.name"),
    "packages": (f"{ROLLOUT}.name", "trainer.use_v1", "trainer.logger", "reward.custom_reward_function.path"),
    "model": (f"{MODEL}.path",),
    "tokenizer": (f"{MODEL}.path", f"{MODEL}.tokenizer_path", f"{MODEL}.custom_chat_template"),
    "data": ("data.train_files", "data.val_files"),
    "reward": ("reward.custom_reward_function",),
    "lengths": ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.max_model_len"),
    "verl": (ACTOR, ROLLOUT, "algorithm.adv_estimator", "data.train_batch_size"),
}
# The rules of start_checks: name, severity, keys; by function.
_START_CHECKS: dict[str, tuple[str, Severity, tuple[str, ...]]] = {
    "_tim_group": ("tim", Severity.STOPS, ("tim", "tim.trainer_numerics")),
    "_ray_resources": (
        "ray",
        Severity.STOPS,
        ("ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_gpus", "trainer.nnodes"),
    ),
    "_cpu_machine": (
        "cpu",
        Severity.STOPS,
        ("trainer.device", f"{MODEL}.external_lib", ATTENTION_KEY, f"{MODEL}.enable_activation_offload"),
    ),
    "_strategy": ("strategy", Severity.EXACTNESS, (f"{ACTOR}.strategy",)),
    "_contract": ("contract", Severity.EXACTNESS, (BACKEND_KEY, f"{MODEL}.use_fused_kernels", ATTENTION_KEY)),
    "_padding": ("padding", Severity.STOPS, (f"{ACTOR}.{BUCKET}", f"actor_rollout_ref.ref.{BUCKET}")),
    "_dtypes": (
        "dtypes",
        Severity.EXACTNESS,
        (f"{ROLLOUT}.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"),
    ),
    "_rollout": (
        "rollout",
        Severity.STOPS,
        (
            ROLLOUT,
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.engine_kwargs.vexact",
            f"{MODEL}.lora.merge",
        ),
    ),
    "_model": ("architecture", Severity.STOPS, (f"{MODEL}.path",)),
    "_data": ("data-schema", Severity.STOPS, ("data.train_files", "data.val_files")),
    "batches": (
        "batches",
        Severity.STOPS,
        (
            "data.train_batch_size",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.agent.num_workers",
        ),
    ),
    "replicas": (
        "replicas",
        Severity.STOPS,
        (
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.data_parallel_size",
            f"{ROLLOUT}.pipeline_model_parallel_size",
            f"{ACTOR}.fsdp_config.fsdp_size",
            "trainer.n_gpus_per_node",
        ),
    ),
    "on_policy": (
        "on-policy",
        Severity.CORRECTION,
        (
            "tim.on_policy",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_epochs",
            f"{ACTOR}.use_kl_loss",
            f"{ACTOR}.policy_loss.loss_mode",
        ),
    ),
    "_correction": (
        "correction-reaches-the-loss",
        Severity.CORRECTION,
        ("algorithm.rollout_correction", f"{MODEL}.external_lib", f"{ROLLOUT}.calculate_log_probs"),
    ),
    "_asynchronous": (
        "asynchronous",
        Severity.STOPS,
        ("trainer.v1.trainer_mode", f"{ROLLOUT}.checkpoint_engine.backend", "tim.partial_rollout"),
    ),
    "_reuse": (
        "reused-log-probs",
        Severity.EXACTNESS,
        ("tim.reuse_rollout_log_probs", f"{ROLLOUT}.name", BACKEND_KEY, "algorithm.rollout_correction", "tim.gate"),
    ),
    "_routing_replay": (
        "routing-replay",
        Severity.CORRECTION,
        (
            f"{ACTOR}.fsdp_config.router_replay.mode",
            f"{ROLLOUT}.enable_rollout_routing_replay",
            f"{ACTOR}.strategy",
            f"{MODEL}.external_lib",
            "algorithm.rollout_correction.bypass_mode",
        ),
    ),
    "_vllm_routes": (
        "vllm-routes",
        Severity.STOPS,
        ("tim.vllm_routes", f"{ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts", f"{MODEL}.path"),
    ),
    "_vllm_invariant": (
        "vllm-invariant",
        Severity.STOPS,
        ("VLLM_BATCH_INVARIANT", f"{ROLLOUT}.full_determinism"),
    ),
    "_deterministic": (
        "deterministic",
        Severity.EXACTNESS,
        (
            "tim.deterministic",
            "NCCL_ALGO",
            "VLLM_BATCH_INVARIANT",
            "trainer.v1.trainer_mode",
            f"{ROLLOUT}.name",
            f"{ROLLOUT}.full_determinism",
            f"{ROLLOUT}.agent.agent_loop_manager_class",
            f"{MODEL}.override_config",
        ),
    ),
    "_reward_in_loop": (
        "reward-in-loop",
        Severity.STOPS,
        ("tim.reward_in_loop", "trainer.use_v1", "reward.reward_model.enable"),
    ),
    "_restarts": (
        "restarts",
        Severity.STOPS,
        ("tim.restarts", "trainer.save_freq", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    ),
}
# Start checks that look at this machine.
_OF_MACHINE = ("_ray_resources", "_cpu_machine")
_SEE_FINDING = "the finding says it"


def _why(function: Callable[..., object]) -> str:
    """The first paragraph of a function's docstring, in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def _of_check(check: Check) -> Rule:
    return Rule(
        f"start.{check.name.replace(' ', '-')}",
        Severity.CORRECTION if check.name == "correction" else Severity.STOPS,
        _KEYS[check.name],
        _why(check.run),
        _SEE_FINDING,
        lambda view: check.run(view.config),
        at_start=True,
        needs_machine=check.of_machine,
    )


def _of_start_check(function: start_checks.StartRule) -> Rule:
    name, severity, keys = _START_CHECKS[function.__name__]

    def examine(view: View) -> Iterable[Finding]:
        return function(view, None)

    return Rule(
        f"start.{name}",
        severity,
        keys,
        _why(function),
        _SEE_FINDING,
        examine,
        at_start=True,
        needs_machine=function.__name__ in _OF_MACHINE,
    )


# `verl_config.check_verl_tim` runs the rules of start_checks one after the other; here each is a rule of its own.
CHECK_RULES: dict[str, Rule] = {
    check.name: _of_check(check) for check in CHECKS if check.run is not verl_config.check_verl_tim
}
START_RULES: tuple[Rule, ...] = tuple(_of_start_check(function) for function in start_checks.RULES)
RULES: list[Rule] = [*CHECK_RULES.values(), *START_RULES]


def applies(rule: Rule, view: View) -> bool:
    """Whether a rule of start_checks speaks of a config: the correction's only where this package's correction runs."""
    return not (rule.id == "start.correction-reaches-the-loss" and view.native)
