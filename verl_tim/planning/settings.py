"""The keys of a verl config that decide memory and time, read once and checked against what a plan can speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.engine.config import EngineConfig
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.planning.shape import Shape
from verl_tim.sequence_parallel import sequence_parallel_key

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
LOG_PROB_LIMIT = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
LIMIT = f"{ACTOR}.ppo_max_token_len_per_gpu"


@dataclass(frozen=True)
class Settings:
    """One run. Token counts are of one GPU where the name does not say otherwise."""

    # where
    nodes: int
    gpus_per_node: int
    cpu: bool
    # batch
    prompts: int
    samples: int
    mini_prompts: int
    epochs: int
    prompt_length: int
    response_length: int
    # trainer
    numerics: str  # contract | stock
    master_bytes: int
    shards: int
    reshard: bool
    sequence_parallel: int
    checkpointing: bool
    activation_offload: bool
    param_offload: bool
    optimizer_offload: bool
    offload_policy: bool
    foreach_adam: bool
    entropy: bool
    update_tokens: int | None  # limit of a micro-batch; None: by sequences
    update_sequences: int
    log_prob_tokens: int | None
    log_prob_sequences: int
    recompute_share: float  # of the steps that compute old log-probs in the trainer
    reference: bool
    # rollout
    engine: str
    rollout_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    utilization: float
    max_sequences: int
    max_batched_tokens: int
    max_model_length: int
    graphs: bool
    frees: bool
    kv_tokens: int | None
    kv_bytes: int | None
    kv_fraction: float  # of a CPU's free memory
    page_size: int
    cpu_page_size: int
    prefix_cache: bool
    bucket_bytes: int
    agent_workers: int
    # length of the run
    steps: int | None
    training_epochs: int | None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that get different sequences."""
        return self.gpus // self.sequence_parallel

    @property
    def replica_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def replicas(self) -> int:
        return self.gpus // self.replica_gpus

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Longest prompt with its longest answer."""
        return self.prompt_length + self.response_length

    @property
    def mini_sequences(self) -> float:
        """Sequences of one optimiser step that a rank gets."""
        return self.mini_prompts * self.samples / self.data_parallel

    def micro_tokens(self, *, update: bool) -> int:
        """Most tokens of a micro-batch on one GPU.

        Dynamic (verl 0.9.1, workers/engine/utils.py and utils/seqlen_balancing.py:384-454): the limit, times the
        sequence-parallel ranks over which it is split again, but no more than the rank has. By sequences: all at their
        longest, since padding is removed. At least one sequence in either case.
        """
        limit, count = (
            (self.update_tokens, self.update_sequences) if update else (self.log_prob_tokens, self.log_prob_sequences)
        )
        have = self.mini_sequences if update else self.sequences / self.data_parallel
        most = max(1.0, have) * self.longest / self.sequence_parallel
        wanted = float(limit) if limit is not None else count * self.longest / self.sequence_parallel
        return int(min(wanted, most))


def plain(config: DictConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    """A resolved config as nested dicts; one that already is, as it is."""
    if isinstance(config, DictConfig):
        found: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        return found
    return config


class _Reader:
    """Values by key, and what is wrong with them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.findings: list[Finding] = []

    def get(self, key: str, default: Any = None) -> Any:
        value: Any = self._config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == "???" else value

    def count(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, f"is {value!r}", "give a whole number of at least 1")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def refuse(self, key: str, problem: str, remedy: str) -> None:
        self.findings.append(Finding(key, problem, remedy))


def read_settings(config: DictConfig | Mapping[str, Any], shape: Shape) -> Settings:
    """The settings of a resolved config.

    Raises:
        LaunchError: every key that a plan cannot speak of, or that would keep the run from starting.
    """
    reader = _Reader(plain(config))
    settings = Settings(
        **_where(reader),
        **_batch(reader),
        **_trainer(reader),
        **_rollout(reader),
        steps=reader.get("trainer.total_training_steps"),
        training_epochs=reader.get("trainer.total_epochs"),
    )
    _check_kind(reader)
    if not reader.findings:
        _check_degrees(reader, settings, shape)
        _check_lengths(reader, settings, shape)
    if reader.findings:
        raise LaunchError(reader.findings)
    return settings


def _where(reader: _Reader) -> dict[str, Any]:
    return {
        "nodes": reader.count("trainer.nnodes", 1),
        "gpus_per_node": reader.count("trainer.n_gpus_per_node", 1),
        "cpu": reader.get("trainer.device") == "cpu",
    }


def _batch(reader: _Reader) -> dict[str, Any]:
    return {
        "prompts": reader.count("data.train_batch_size", 1),
        "samples": reader.count(f"{ROLLOUT}.n", 1),
        "mini_prompts": reader.count(f"{ACTOR}.ppo_mini_batch_size", 1),
        "epochs": reader.count(f"{ACTOR}.ppo_epochs", 1),
        "prompt_length": reader.count("data.max_prompt_length", 512),
        "response_length": reader.count("data.max_response_length", 512),
    }


def _trainer(reader: _Reader) -> dict[str, Any]:
    contract = reader.get(f"{MODEL}.fused_kernel_options.impl_backend") == "contract"
    ranks = reader.count("trainer.nnodes", 1) * reader.count("trainer.n_gpus_per_node", 1)
    size = reader.get(f"{FSDP}.fsdp_size", -1)
    shards = ranks if not isinstance(size, int) or size <= 0 else min(size, ranks)
    dynamic = reader.flag(f"{ACTOR}.use_dynamic_bsz", False)
    log_prob_dynamic = reader.flag(f"{ROLLOUT}.log_prob_use_dynamic_bsz", dynamic)
    micro, log_prob_micro = (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    )  # fmt: skip
    for given, key, instead in (
        (dynamic, micro, f"{ACTOR}.use_dynamic_bsz=true"),
        (log_prob_dynamic, log_prob_micro, f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"),
    ):
        if not given and reader.get(key) is None:
            reader.refuse(key, "is not given, and micro-batches are not dynamic", f"give it, or {instead}")
    optimizer = reader.get(f"{ACTOR}.optim.optimizer", "AdamW")
    if optimizer != "AdamW" or reader.get(f"{ACTOR}.optim.optimizer_impl", "torch.optim") != "torch.optim":
        reader.refuse(f"{ACTOR}.optim.optimizer", f"is {optimizer!r}", "a plan knows torch.optim's AdamW only")
    width = 4 if str(reader.get(f"{FSDP}.model_dtype", "fp32")) in ("fp32", "float32") else 2
    entropy = bool(reader.get(f"{ACTOR}.entropy_coeff", 0)) or reader.flag(f"{ACTOR}.calculate_entropy", False)
    options = reader.get(f"{ACTOR}.optim.override_optimizer_config", {})
    fused = isinstance(options, Mapping) and bool(options.get("fused", False))
    return {
        "numerics": "contract" if contract else "stock",
        "master_bytes": width,
        "shards": shards,
        "reshard": reader.flag(f"{FSDP}.reshard_after_forward", True),
        "sequence_parallel": reader.count(sequence_parallel_key(reader.get), 1),
        "checkpointing": reader.flag(f"{MODEL}.enable_gradient_checkpointing", True),
        "activation_offload": reader.flag(f"{MODEL}.enable_activation_offload", False),
        "param_offload": reader.flag(f"{FSDP}.param_offload", False),
        "optimizer_offload": reader.flag(f"{FSDP}.optimizer_offload", False),
        "offload_policy": reader.flag(f"{FSDP}.offload_policy", False),
        "foreach_adam": not fused,
        "entropy": entropy,
        "update_tokens": reader.count(LIMIT, 16384) if dynamic else None,
        "update_sequences": 1 if dynamic else reader.count(micro, 1),
        "log_prob_tokens": reader.count(LOG_PROB_LIMIT, 16384) if log_prob_dynamic else None,
        "log_prob_sequences": 1 if log_prob_dynamic else reader.count(log_prob_micro, 1),
        "recompute_share": _recompute_share(reader),
        "reference": reader.flag(f"{ACTOR}.use_kl_loss", False) or reader.flag("algorithm.use_kl_in_reward", False),
    }


def _recompute_share(reader: _Reader) -> float:
    """Share of the steps whose old log-probs the trainer computes: none under bypass without `old_forward`; the
    audited ones where they are taken from the rollout (`tim.reuse_rollout_log_probs`, where there is such a group)."""
    correction = reader.get("algorithm.rollout_correction", {})
    if correction.get("bypass_mode") and not correction.get("old_forward"):
        return 0.0
    if reader.get("tim.reuse_rollout_log_probs.enabled", False):
        return 1.0 / max(1, int(reader.get("tim.reuse_rollout_log_probs.audit_every", 1)))
    return 1.0


def _rollout(reader: _Reader) -> dict[str, Any]:
    engine = str(reader.get(f"{ROLLOUT}.name", ""))
    options = reader.get(f"{ROLLOUT}.engine_kwargs.{engine}", {})
    longest = reader.count("data.max_prompt_length", 512) + reader.count("data.max_response_length", 512)
    share = reader.get(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        reader.refuse(f"{ROLLOUT}.gpu_memory_utilization", f"is {share!r}", "give a share in (0, 1]")
        share = 0.5
    ours = engine in ("vexact", "stock")
    cached = options.get("enable_prefix_cache") if ours else None
    if engine == "stock":
        cached = bool(cached)
    return {
        "engine": engine,
        "rollout_bytes": 4 if str(reader.get(f"{ROLLOUT}.dtype", "bfloat16")) in ("float32", "fp32") else 2,
        "tensor_parallel": reader.count(f"{ROLLOUT}.tensor_model_parallel_size", 1),
        "pipeline_parallel": reader.count(f"{ROLLOUT}.pipeline_model_parallel_size", 1),
        "utilization": float(share),
        "max_sequences": reader.count(f"{ROLLOUT}.max_num_seqs", 256),
        "max_batched_tokens": reader.count(f"{ROLLOUT}.max_num_batched_tokens", 8192),
        "max_model_length": reader.count(f"{ROLLOUT}.max_model_len", longest),
        "graphs": not reader.flag(f"{ROLLOUT}.enforce_eager", False),
        "frees": reader.flag(f"{ROLLOUT}.free_cache_engine", True),
        "kv_tokens": options.get("kv_cache_tokens") if ours else None,
        "kv_bytes": options.get("kv_cache_bytes" if ours else "kv_cache_memory_bytes"),
        "kv_fraction": float(options.get("kv_memory_fraction") or EngineConfig.kv_memory_fraction),
        "page_size": int(options.get("page_size") or 64) if ours else 16,
        "cpu_page_size": int(options.get("page_size") or 16) if ours else 16,
        "prefix_cache": reader.flag(f"{ROLLOUT}.enable_prefix_caching", True) if cached is None else bool(cached),
        "bucket_bytes": reader.count(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 2048) << 20,
        "agent_workers": reader.count(f"{ROLLOUT}.agent.num_workers", 8),
    }


def _check_kind(reader: _Reader) -> None:
    """Kinds of runs that no formula here describes."""
    strategy = reader.get(f"{ACTOR}.strategy", "fsdp")
    if strategy not in ("fsdp", "fsdp2"):
        reader.refuse(f"{ACTOR}.strategy", f"is {strategy}", "a plan knows FSDP's memory only: fsdp2")
    engine = reader.get(f"{ROLLOUT}.name")
    if engine not in ("vexact", "stock", "vllm"):
        reader.refuse(f"{ROLLOUT}.name", f"is {engine}", "a plan knows vexact, stock and vllm")
    if reader.get("trainer.use_v1", True) and reader.get("trainer.v1.trainer_mode", "sync") == "separate_async":
        reader.refuse(
            "trainer.v1.trainer_mode", "is separate_async", "a plan knows trainer and rollout on the same GPUs: sync"
        )
    if reader.get(f"{ROLLOUT}.nnodes", 0):
        reader.refuse(f"{ROLLOUT}.nnodes", "gives the rollout GPUs of its own", "a plan knows shared GPUs: set it to 0")
    if reader.get("algorithm.adv_estimator") == "gae" or reader.get("critic.enable", False):
        reader.refuse("algorithm.adv_estimator", "needs a critic", "take grpo or reinforce_plus_plus")
    if int(reader.get(f"{MODEL}.lora_rank", 0)) > 0:
        reader.refuse(f"{MODEL}.lora_rank", "is above 0", "a plan knows training of all weights only: set it to 0")
    for key in ("data_parallel_size", "expert_parallel_size"):
        if int(reader.get(f"{ROLLOUT}.{key}", 1)) > 1:
            reader.refuse(f"{ROLLOUT}.{key}", "is above 1", "a plan knows tensor and pipeline parallel replicas: set 1")


def _check_degrees(reader: _Reader, settings: Settings, shape: Shape) -> None:
    s, c = settings, shape.config
    tensor, stages = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size"
    if s.gpus_per_node % s.replica_gpus:
        reader.refuse(
            tensor,
            f"{s.tensor_parallel} x {s.pipeline_parallel} (pipeline) ranks of a replica do not divide "
            f"trainer.n_gpus_per_node={s.gpus_per_node}",
            "lower one of the two degrees to a divisor",
        )
    for count, what in ((c.num_heads, "attention heads"), (c.num_kv_heads, "key-value heads")):
        if count % s.tensor_parallel:
            reader.refuse(tensor, f"is {s.tensor_parallel}, and {shape.name} has {count} {what}", "take a divisor")
            break
    if s.pipeline_parallel > c.num_layers:
        reader.refuse(stages, f"is {s.pipeline_parallel}, and {shape.name} has {c.num_layers} layers", "lower it")
    if s.gpus % s.sequence_parallel:
        reader.refuse(
            sequence_parallel_key(reader.get),
            f"is {s.sequence_parallel} and does not divide {s.gpus} GPUs",
            "take a divisor",
        )
    elif s.sequence_parallel > 1 and s.numerics == "contract":
        reader.refuse(
            sequence_parallel_key(reader.get),
            f"is {s.sequence_parallel}, which the contract does not cover",
            "set it to 1, or take trainer=stock",
        )
    if s.prompts % s.mini_prompts:
        reader.refuse(
            f"{ACTOR}.ppo_mini_batch_size",
            f"is {s.mini_prompts} and does not divide data.train_batch_size={s.prompts}",
            "take a divisor",
        )
    elif (s.mini_prompts * s.samples) % s.gpus:
        reader.refuse(
            "trainer.nnodes",
            f"{s.mini_prompts * s.samples} sequences of an optimiser step (ppo_mini_batch_size x rollout.n) cannot be "
            f"dealt to {s.gpus} ranks",
            "make them a multiple of the ranks",
        )


def _check_lengths(reader: _Reader, settings: Settings, shape: Shape) -> None:
    s = settings
    if s.longest > s.max_model_length or s.max_model_length > shape.config.max_position_embeddings:
        reader.refuse(
            "data.max_response_length",
            f"prompt and answer ({s.longest}) or rollout.max_model_len ({s.max_model_length}) exceed what is allowed "
            f"(model: {shape.config.max_position_embeddings})",
            "lower the lengths",
        )
    for key, limit in ((LIMIT, s.update_tokens), (LOG_PROB_LIMIT, s.log_prob_tokens)):
        # asserted by verl 0.9.1, utils/seqlen_balancing.py:384, in the first step
        if limit is not None and limit * s.sequence_parallel < s.longest:
            reader.refuse(key, f"is {limit}, less than the longest sequence ({s.longest})", "raise it to at least that")
