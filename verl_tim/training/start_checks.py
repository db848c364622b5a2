"""Start-up checks that verl lacks: settings under which a run hangs, dies late, or is not what it says.

`findings` is a pure function over the resolved config (and what is known of the cluster); `check` raises. `verl-tim
train` calls them, plain `python -m verl.trainer.main_ppo` runs them before Ray starts (`plugin.patch_start_checks`),
and the trainers run them once more against the Ray cluster that is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.numerics.attention import ATTENTION_NAMES
from verl_tim.numerics.determinism import DROPOUT_SUFFIXES
from verl_tim.training.asynchronous_checks import asynchronous_findings, standalone_ranks
from verl_tim.training.batches import batches, replicas
from verl_tim.training.config import (
    ATTENTION_KEY,
    BACKEND_KEY,
    CONTRACT_BACKEND,
    EXTERNAL_LIB,
    EXTERNAL_LIBS,
    ROLLOUTS,
    VERL_BACKENDS,
    WORKER_ENVIRONMENT,
    ConfigError,
    TimConfig,
    joins_a_cluster,
)
from verl_tim.training.contract_limits import BUCKET, LIMITS, PADS, Limit, padding_too_long
from verl_tim.training.correction_checks import correction_findings
from verl_tim.training.determinism import determinism_findings
from verl_tim.training.dtypes import canonical
from verl_tim.training.finding import Finding
from verl_tim.training.model_file import model_file
from verl_tim.training.on_policy import on_policy
from verl_tim.training.remedy import typeable
from verl_tim.training.replay_checks import replay_findings
from verl_tim.training.reuse_checks import reuse_findings
from verl_tim.training.vllm_checks import INVARIANT, invariance_findings, route_findings

# ResourcePoolManager.max_colocate_count (single_controller/ray/base.py:192): CPUs in each rank's placement-group
# bundle.
CPUS_PER_RANK = 3
# The same of a rollout server with a GPU of its own (workers/rollout/replica.py:154).
CPUS_PER_STANDALONE_RANK = 2


@dataclass(frozen=True)
class Cluster:
    """What Ray has, summed over its nodes.

    Attributes:
        nodes: (CPUs, GPUs) of each node that is alive; empty: not known.
    """

    cpus: float
    gpus: float
    nodes: tuple[tuple[float, float], ...] = ()

    def groups(self, ranks: int) -> int:
        """How many times the nodes have room for the bundles of so many trainer ranks, which share a node."""
        return int(sum(min(gpus // ranks, cpus // (CPUS_PER_RANK * ranks)) for cpus, gpus in self.nodes))


def check(config: DictConfig, *, cluster: Cluster | None = None) -> None:
    """Raise `ConfigError` with every finding, if there are any."""
    found = findings(config, cluster=cluster)
    if found:
        told = (replace(one, remedy=typeable(one.remedy, config)) for one in found)
        lines = "\n".join(f"  - {finding}" for finding in told)
        raise ConfigError(f"this run cannot work as configured:\n{lines}")


def resource_findings(config: DictConfig, cluster: Cluster) -> list[Finding]:
    """What a cluster lacks for this run; those of `findings` that another node would mend."""
    return list(_ray_resources(View(config), cluster))


def findings(config: DictConfig, *, cluster: Cluster | None = None) -> list[Finding]:
    """Every setting of a resolved run config that cannot work, in a fixed order.

    Args:
        config: verl's composed config.
        cluster: what Ray has; None: what `ray_kwargs.ray_init` is about to start on this machine.
    """
    view = View(config)
    found: list[Finding] = []
    for rule in RULES:
        found.extend(rule(view, cluster))
    return found


class View:
    """Keys of a config by dotted name; what is absent or unset reads as the default."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    def get(self, key: str, default: Any = None) -> Any:
        value = OmegaConf.select(self.config, key, default=default, throw_on_missing=False)
        return default if value is None else value

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment that the run starts in."""
        return os.environ

    def variable(self, name: str) -> tuple[str, str | None]:
        """An environment variable as the workers get it: the key or place that sets it, and its value or None.

        Only for names that reach them from the shell in every case, which are those that verl hands on to a cluster
        that runs already (trainer/constants_ppo.py:141).
        """
        key = f"{WORKER_ENVIRONMENT}.{name}"
        given = self.get(WORKER_ENVIRONMENT, {})
        if isinstance(given, (Mapping, DictConfig)) and given.get(name) is not None:
            return key, str(given[name])
        if name in self.environment:
            return f"environment variable {name}", self.environment[name]
        return key, None

    @property
    def ranks(self) -> int:
        return int(self.get("trainer.n_gpus_per_node", 1)) * int(self.get("trainer.nnodes", 1))

    @property
    def cpu_only(self) -> bool:
        """Whether the run has no accelerator, as far as this machine tells."""
        from verl_tim.training.accelerator import host_has_accelerator

        return not host_has_accelerator()

    @property
    def rollout_is_ours(self) -> bool:
        return self.get("actor_rollout_ref.rollout.name") in ROLLOUTS

    @property
    def contract(self) -> bool:
        return self.get(BACKEND_KEY) == CONTRACT_BACKEND

    @property
    def attention_contract(self) -> str | None:
        """The attention contract that is asked for, by name; None where neither side keeps one."""
        keeps = self.contract or self.get("actor_rollout_ref.rollout.name") == "vexact"
        return self.get(ATTENTION_KEY, "auto") if keeps else None


StartRule = Callable[[View, "Cluster | None"], Iterator[Finding]]


def _tim_group(view: View, _: Cluster | None) -> Iterator[Finding]:
    """The group `tim:`: unknown keys, values that cannot work, `tim.trainer_numerics` against what workers are told."""
    try:
        tim = TimConfig.of(view.config)
    except ConfigError as error:
        yield Finding("tim", str(error), "See verl_tim/training/config.py for the group's keys")
        return
    stated = view.get("tim.trainer_numerics")
    actual = "contract" if view.contract else "stock"
    if stated is not None and tim.trainer_numerics != actual:
        yield Finding(
            "tim.trainer_numerics",
            f"it says {stated}, and {BACKEND_KEY}={view.get(BACKEND_KEY)} makes the trainer {actual}",
            f"Choose trainer=contract or trainer=stock as a whole, or set {BACKEND_KEY} to "
            f"{CONTRACT_BACKEND if stated == 'contract' else 'torch'}",
        )


def required_cpus(config: DictConfig) -> int:
    """Ray CPUs that verl needs: the ranks' bundles, one for a controller or task, and in V1 TransferQueue's storage.

    Tried with one rank in V1: 5 run, with 4 verl waits for ever.
    """
    view = View(config)
    needed = CPUS_PER_RANK * view.ranks + CPUS_PER_STANDALONE_RANK * standalone_ranks(view.get) + 1
    if view.get("trainer.use_v1", True):
        needed += int(view.get("transfer_queue.backend.SimpleStorage.num_data_storage_units", 8))
    if view.get("reward.reward_model.enable_resource_pool", False):
        needed += (
            CPUS_PER_RANK
            * int(view.get("reward.reward_model.n_gpus_per_node", 0))
            * int(view.get("reward.reward_model.nnodes", 0))
        )
    return needed


def _ray_resources(view: View, cluster: Cluster | None) -> Iterator[Finding]:
    """Ray CPUs and GPU slots: with fewer than verl needs it waits for ever without a word."""
    needed = required_cpus(view.config)
    if cluster is None:
        if joins_a_cluster(view.config):
            return  # somebody else's cluster: the trainer looks at it when it is connected
        cpus = view.get("ray_kwargs.ray_init.num_cpus")
        said = "unset, so Ray takes this machine's cores" if cpus is None else "set"
        available = float(cpus) if cpus is not None else float(len(os.sched_getaffinity(0)))
        gpus = view.get("ray_kwargs.ray_init.num_gpus")
    else:
        said, available, gpus = "what the cluster has", cluster.cpus, cluster.gpus
    if available < needed:
        yield Finding(
            "ray_kwargs.ray_init.num_cpus",
            f"Ray would have {available:g} CPUs ({said}), and {view.ranks} trainer rank(s) with their helpers need "
            f"{needed}; verl would wait for ever without a word",
            f"Set ray_kwargs.ray_init.num_cpus={max(needed, 16)}; they are slots for processes, not cores",
        )
    per_node, nodes = int(view.get("trainer.n_gpus_per_node", 1)), int(view.get("trainer.nnodes", 1))
    if cluster is not None and cluster.nodes and cluster.groups(per_node) < nodes:
        have = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in cluster.nodes)
        yield Finding(
            "trainer.nnodes",
            f"{nodes} time(s) {per_node} trainer rank(s) are asked for, each group on one node with {per_node} GPU "
            f"slot(s) and {CPUS_PER_RANK * per_node} CPUs, and the cluster's nodes ({have}) hold "
            f"{cluster.groups(per_node)}; verl would wait for ever",
            "Let the missing nodes join (`ray status`), or give them more slots (ray start --num-cpus, --num-gpus)",
        )
    slots = view.ranks + standalone_ranks(view.get)
    if view.cpu_only and (gpus or 0) < slots:
        apart = f" and per rollout server of its own, {slots} here" if slots > view.ranks else f", {slots} here"
        yield Finding(
            "ray_kwargs.ray_init.num_gpus",
            f"verl asks Ray for one GPU slot per trainer rank{apart}, and Ray would have {gpus or 0:g} on a machine "
            "without GPUs",
            f"Set +ray_kwargs.ray_init.num_gpus={slots} (cluster=cpu does); on a CPU the slot is only a name",
        )


def _cpu_machine(view: View, _: Cluster | None) -> Iterator[Finding]:
    """On a machine without an accelerator: the device, the training engine, and what needs a GPU."""
    if not view.cpu_only:
        return
    if view.get("trainer.device", "cuda") != "cpu":
        yield Finding(
            "trainer.device", f"it is {view.get('trainer.device')} on a machine without an accelerator", "Set it to cpu"
        )
    if view.get("actor_rollout_ref.model.external_lib") not in EXTERNAL_LIBS:
        yield Finding(
            "actor_rollout_ref.model.external_lib",
            "verl has no training engine for CPUs, and this key brings one",
            f"Set it to {EXTERNAL_LIB}",
        )
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    attention = view.get(key, "flash_attention_2")
    if str(attention).startswith("flash"):
        yield Finding(key, f"{attention} needs a GPU", f"Set {key}=sdpa")
    if view.attention_contract == "fa3":
        yield Finding(ATTENTION_KEY, "fa3 needs a Hopper GPU", "Set it to chunk64")
    if view.get("actor_rollout_ref.model.enable_activation_offload", False):
        # verl 0.9.1, utils/activation_offload.py:176: pins host memory, which the first update would fail at
        yield Finding(
            "actor_rollout_ref.model.enable_activation_offload",
            "it moves a GPU's activations to the host, and there is no GPU",
            "Set it to false",
        )


def _strategy(view: View, _: Cluster | None) -> Iterator[Finding]:
    """The contract is written for FSDP2, and FSDP1 cannot run on a CPU."""
    if not (view.contract or view.cpu_only):
        return
    why = "the numerics contract is written for FSDP2" if view.contract else "FSDP1 cannot run on a CPU"
    for key in ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.ref.strategy"):
        strategy = view.get(key)
        if strategy is not None and strategy != "fsdp2":
            yield Finding(key, f"it is {strategy}, and {why}", "Set it to fsdp2")


def _contract(view: View, _: Cluster | None) -> Iterator[Finding]:
    """What bypasses the contract in a trainer that asks for it, and names of neither implementation nor contract."""
    attention = view.attention_contract
    if attention not in (None, *ATTENTION_NAMES):
        yield Finding(
            ATTENTION_KEY, f"it is {attention}, which names no contract", f"Choose from {', '.join(ATTENTION_NAMES)}"
        )
    fused = bool(view.get("actor_rollout_ref.model.use_fused_kernels", False))
    backend = view.get(BACKEND_KEY)
    if not view.contract:
        if fused and backend not in VERL_BACKENDS:
            yield Finding(
                BACKEND_KEY,
                f"verl ignores an implementation called {backend}",
                f"Choose {CONTRACT_BACKEND}, or verl's {', '.join(VERL_BACKENDS)}",
            )
        return
    if not fused:
        yield Finding(
            "actor_rollout_ref.model.use_fused_kernels",
            "without it verl takes log-probs from logits, past the contract",
            "Set it to true",
        )
    if view.get("actor_rollout_ref.model.external_lib") not in EXTERNAL_LIBS and not view.cpu_only:
        yield Finding(
            "actor_rollout_ref.model.external_lib",
            "the contract's engine is registered by this module",
            f"Set it to {EXTERNAL_LIB}",
        )
    # only the trainer asks for it, so the worker's engine does not know the key
    whole_logits = Limit(
        "sum-pi-squared",
        "actor.calculate_sum_pi_squared",
        bool,
        "it needs the whole logits, which the contract's forward does not keep",
        "Set it to false",
    )
    for limit in (*LIMITS, whole_logits):
        value = view.get(f"actor_rollout_ref.{limit.key}")
        if value is not None and limit.wrong(value):
            yield Finding(f"actor_rollout_ref.{limit.key}", f"it is {value}, and {limit.problem}", limit.remedy)


def _padding(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Padding of a micro-batch (`pad_to_length`) that is longer than the model's context: the contract computes it as
    one sequence."""
    if not view.contract:
        return
    for side in ("actor", "ref"):
        bucket = view.get(f"actor_rollout_ref.{side}.{BUCKET}", 1024)
        if view.get(f"actor_rollout_ref.{side}.{PADS}", False) and isinstance(bucket, int):
            too_long = padding_too_long(side, bucket, _context_of(view))
            if too_long:
                yield too_long


def _dtypes(view: View, _: Cluster | None) -> Iterator[Finding]:
    """vexact and the contract compute in one dtype, which the contract must cover."""
    if not (view.rollout_is_ours and view.contract):
        return
    trainer_key = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
    trainer = canonical(str(view.get(trainer_key, "bf16")))
    rollout = canonical(str(view.get("actor_rollout_ref.rollout.dtype", "bfloat16")))
    if trainer not in ("bfloat16", "float32"):
        yield Finding(trainer_key, f"the contract does not cover {trainer}", "Choose bf16, or fp32 on a CPU")
    elif trainer == "float32" and not view.cpu_only:
        yield Finding(trainer_key, "on a GPU the contract covers bf16 only", "Set it to bf16")
    if trainer != rollout:
        yield Finding(
            "actor_rollout_ref.rollout.dtype",
            f"the rollout computes in {rollout} and the trainer in {trainer} ({trainer_key}), which differ",
            "Set both to one dtype",
        )


def _rollout(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Settings that vexact and stock cannot honour, options they do not know, LoRA adapters that are not merged, and
    log-probs that are not recorded."""
    if not view.rollout_is_ours:
        return
    from verl_tim.rollout.options import refusals, rollout_options

    rollout = view.get("actor_rollout_ref.rollout")
    refused = refusals(rollout)
    for key, remedy in refused:
        yield Finding(key, "the rollout cannot do this", remedy)
    if not refused:
        try:
            rollout_options(rollout, model_path="", max_position_embeddings=_context_of(view), device="cpu")
        except ConfigError as error:
            yield Finding("actor_rollout_ref.rollout", str(error), "See the keys named")
        yield from _split(view)
    if not view.get("actor_rollout_ref.rollout.calculate_log_probs", False):
        yield Finding(
            "actor_rollout_ref.rollout.calculate_log_probs",
            "without the rollout's log-probs nothing can be compared or corrected",
            "Set it to true",
        )
    if (
        not view.contract  # which covers no LoRA at all
        and int(view.get("actor_rollout_ref.model.lora_rank", 0)) > 0
        and not view.get("actor_rollout_ref.model.lora.merge", False)
    ):
        yield Finding(
            "actor_rollout_ref.model.lora.merge",
            f"rollout {view.get('actor_rollout_ref.rollout.name')} takes whole weights, and verl would send adapters",
            "Set it to true, or actor_rollout_ref.model.lora_rank=0",
        )
    for name, value in sorted(view.get("actor_rollout_ref.model.override_config", {}).items()):
        # the rollout drops nothing out either
        if name == "attn_implementation" or (name.endswith(DROPOUT_SUFFIXES) and value == 0):
            continue
        yield Finding(
            f"actor_rollout_ref.model.override_config.{name}",
            "it changes the trainer's model and not the rollout's, which reads the model's config.json",
            "Write it into the model folder's config.json instead",
        )


def _split(view: View) -> Iterator[Finding]:
    """An engine on several ranks: they share a node, and the model divides by them."""
    from verl_tim.models import ModelError, load_model_config
    from verl_tim.models.place import misfits
    from verl_tim.rollout.options import DEGREES, ranks_of

    prefix = "actor_rollout_ref.rollout"
    ranks = ranks_of(view.get(prefix))
    if ranks == 1:
        return
    degrees = [int(view.get(f"{prefix}.{key}", 1)) for key in DEGREES]
    per_node = int(view.get("trainer.n_gpus_per_node", 8))
    if per_node % ranks:
        yield Finding(
            f"{prefix}.{DEGREES[0] if degrees[0] > 1 else DEGREES[1]}",
            f"a replica takes {ranks} ranks of one node (tensor x pipeline), and trainer.n_gpus_per_node={per_node}",
            "Let the first divide the second",
        )
    folder = os.path.expanduser(str(view.get("actor_rollout_ref.model.path", "")))
    try:
        model = load_model_config(folder)
    except ModelError:
        return  # `_model` says so
    verl_keys = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), DEGREES, strict=True))
    for key, reason in misfits(model, *degrees):
        for ours, theirs in verl_keys.items():
            reason = reason.replace(ours, theirs)
        yield Finding(f"{prefix}.{verl_keys[key]}", f"the model cannot be split so: {reason}", "Choose another degree")


def _context_of(view: View) -> int:
    """The model's context, tokens; without a readable config a limit that nothing exceeds (`_model` says more)."""
    context = model_file(view.get("actor_rollout_ref.model.path", "")).get("max_position_embeddings")
    return context if isinstance(context, int) else 2**62


def _model(view: View, _: Cluster | None) -> Iterator[Finding]:
    """vexact and the contract need a model folder of an architecture they know."""
    if not (view.rollout_is_ours or view.contract):
        return
    key = "actor_rollout_ref.model.path"
    path = view.get(key)
    if path is None:
        yield Finding(key, "no model is named", "Give a folder in Hugging Face format, or choose a model group")
        return
    folder = os.path.expanduser(str(path))
    if not os.path.isdir(folder):
        # a hub name is OWNER/NAME; anything that looks like a path is meant as one
        if os.path.isabs(folder) or str(path).startswith((".", "~")) or str(path).count("/") != 1:
            yield Finding(key, f"the folder {path} does not exist", "Give a folder in Hugging Face format")
        return
    if not os.path.isfile(os.path.join(folder, "config.json")):
        yield Finding(
            key, f"{path} holds no config.json, so it is no Hugging Face model", "Give a folder in Hugging Face format"
        )
        return
    from verl_tim.models import load_model_config

    try:
        load_model_config(folder)
    except Exception as error:
        yield Finding(key, f"{path}: {error}", "Give a model of a supported architecture")


def _data(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Data files that are absent or not in verl's schema."""
    from verl_tim.tasks.checks import check_dataset
    from verl_tim.tasks.errors import InputError

    for key in ("data.train_files", "data.val_files"):
        files = view.get(key)
        for name in [files] if isinstance(files, str) else list(files or []):
            path = str(name)
            if "://" in path or not path.endswith(".parquet"):
                continue  # verl fetches the one, and reads the other by its own rules
            try:
                check_dataset(
                    path,
                    key=key,
                    prompt_key=view.get("data.prompt_key", "prompt"),
                    needs_ground_truth=not view.get("reward.reward_model.enable", False),
                )
            except InputError as error:
                remedy = "Give a parquet file in verl's schema (verl-tim data builds one)"
                yield Finding(key, str(error).removeprefix(f"{key}: "), remedy)


def _correction(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Settings under which the correction is unknown, contradictory, or would not reach the worker's loss."""
    yield from correction_findings(view.config)


def _asynchronous(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Asynchronous trainers: how new weights reach a rollout elsewhere, batches that do not come out even, and settings
    that act in another mode only."""
    yield from asynchronous_findings(view.get, cpu_only=view.cpu_only, ours=view.rollout_is_ours)


def _reuse(view: View, _: Cluster | None) -> Iterator[Finding]:
    """tim.reuse_rollout_log_probs takes old log-probs from the rollout; refused where those need not be the trainer's,
    where no gate would notice, and where a correction would compare them with themselves."""
    yield from reuse_findings(view.config)


def _routing_replay(view: View, _: Cluster | None) -> Iterator[Finding]:
    """Routing replay is refused wherever it would not take effect: verl 0.9.1 switches it off under FSDP without a word
    (engine_workers.py:498), and what is recorded on one side only is dropped."""
    yield from replay_findings(view.config, cpu_only=view.cpu_only)


def _vllm_routes(view: View, _: Cluster | None) -> Iterator[Finding]:
    """vLLM returns routes (tim.vllm_routes) of models with experts only, and on a CPU of none: its engine dies at its
    start."""
    yield from route_findings(view.get, cpu_only=view.cpu_only)


def _vllm_invariant(view: View, _: Cluster | None) -> Iterator[Finding]:
    """vLLM's batch-invariant kernels (rollout=vllm_invariant) need a GPU; on a CPU its engine dies at the first
    request."""
    yield from invariance_findings(view.get, view.variable(INVARIANT), cpu_only=view.cpu_only)


def _deterministic(view: View, _: Cluster | None) -> Iterator[Finding]:
    """tim.deterministic promises two runs that are equal bit for bit; refused are settings under which the clock, the
    company in a batch or an unseeded draw decides numbers."""
    yield from determinism_findings(view.config)


def _reward_in_loop(view: View, _: Cluster | None) -> Iterator[Finding]:
    """tim.reward_in_loop is of verl's V1 agent loop, and has no reward model behind it."""
    if view.get("tim.reward_in_loop", False) is not True:
        return
    if not view.get("trainer.use_v1", True):
        yield Finding(
            "tim.reward_in_loop",
            "the legacy trainer's agent loop sends its responses to reward workers",
            "Set it to false, or trainer.use_v1=true",
        )
    if view.get("reward.reward_model.enable", False):
        yield Finding(
            "tim.reward_in_loop",
            "a reward model is served elsewhere, and reward workers ask it",
            "Set it to false, or reward.reward_model.enable=false",
        )


def _restarts(view: View, _: Cluster | None) -> Iterator[Finding]:
    """A run that shall start again by itself needs checkpoints, and one that is whole at any moment."""
    limit = view.get("tim.restarts.limit", 0)
    if not isinstance(limit, int) or limit <= 0:
        return  # `_tim_group` says what is wrong with it
    if int(view.get("trainer.save_freq", -1)) <= 0:
        yield Finding(
            "trainer.save_freq",
            f"tim.restarts.limit={limit} would start again from the last checkpoint, and none is ever written",
            "Set it to a number of steps",
        )
    for key in ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"):
        if view.get(key) == 1:
            yield Finding(
                key,
                f"verl removes the only checkpoint before the next is whole, and tim.restarts.limit={limit} needs one",
                "Set it to 2",
            )


RULES: tuple[StartRule, ...] = (
    _tim_group,
    _ray_resources,
    _cpu_machine,
    _strategy,
    _contract,
    _padding,
    _dtypes,
    _rollout,
    _model,
    _data,
    batches,
    replicas,
    on_policy,
    _correction,
    _asynchronous,
    _reuse,
    _routing_replay,
    _vllm_routes,
    _vllm_invariant,
    _deterministic,
    _reward_in_loop,
    _restarts,
)
