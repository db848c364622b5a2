"""What keeps the trainer's log-probs from being the rollout's: settings of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rule, Rules, Severity, found
from verl_tim.doctor.view import PARAM_DTYPE_KEY, View
from verl_tim.sequence_parallel import SEQUENCE_PARALLEL_KEYS
from verl_tim.training.config import BACKEND_KEY, CONTRACT_BACKEND
from verl_tim.training.contract_limits import LIMITS
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule


@rule(
    "exact.trainer-numerics",
    Severity.EXACTNESS,
    BACKEND_KEY,
    remedy="trainer=contract",
    reports=("verl-omni#637",),
)
def numerics(view: View) -> Iterator[Finding]:
    """The stock forward rounds where no rollout engine does: RMSNorm before its weight, cos and sin cast to bf16 at
    the FSDP border, logits to bf16. Only a trainer under the numerics contract can agree with a rollout bit for
    bit.
    """
    if not view.contract:
        backend = view.get(BACKEND_KEY, "verl's own")
        yield found(BACKEND_KEY, f"the trainer's forward is stock ({backend}), not {CONTRACT_BACKEND}")


@rule(
    "exact.strategy",
    Severity.EXACTNESS,
    f"{ACTOR}.strategy",
    remedy=f"set {ACTOR}.strategy=fsdp2",
)
def strategy(view: View) -> Iterator[Finding]:
    """The numerics contract is written for FSDP2: other engines shard or replace the modules it computes."""
    if view.strategy != "fsdp2" and not view.contract:  # with the contract, start.strategy says it
        yield found(f"{ACTOR}.strategy", f"it is {view.strategy}")


def _limit(name: str) -> Rule:
    """A limit of the contract as a rule: the same condition, text and remedy as at the start of a run."""
    limits = [limit for limit in LIMITS if limit.name == name]

    def examine(view: View) -> Iterator[Finding]:
        for limit in limits:
            key = f"actor_rollout_ref.{limit.key}"
            value = view.get(key)
            if value is not None and _says_yes(limit.wrong, value):
                yield found(key, f"it is {value}, and {limit.problem}", limit.remedy)

    why = limits[0].problem[0].upper() + limits[0].problem[1:] + "."
    keys = tuple(f"actor_rollout_ref.{limit.key}" for limit in limits)
    return Rule(f"exact.{name}", Severity.EXACTNESS, keys, why, limits[0].remedy, examine)


def _says_yes(wrong: Any, value: Any) -> bool:
    try:
        return bool(wrong(value))
    except (TypeError, ValueError):
        return False  # not a number: start.values speaks of it


RULES.extend(_limit(name) for name in dict.fromkeys(limit.name for limit in LIMITS))


@rule(
    "exact.torch-compile",
    Severity.EXACTNESS,
    f"{ACTOR}.fsdp_config.use_torch_compile",
    remedy=f"set {ACTOR}.use_torch_compile=false and {ACTOR}.fsdp_config.use_torch_compile=false",
    reports=("vllm#54243", "vllm#30907"),
)
def torch_compile(view: View) -> Iterator[Finding]:
    """A compiled kernel fixes its tile and its fusions when it is traced, for the shape it saw then. torchtitan
    compiles the whole model; under FSDP and veomni it is the entropy, which stands in the loss beside the log-prob.
    """
    engine = view.strategy if view.strategy in ("torchtitan", "veomni") else "fsdp_config"
    key = f"{ACTOR}.{engine}.use_torch_compile"
    if view.strategy != "megatron" and not view.contract and view.get(key, True) is True:
        what = "the model" if engine == "torchtitan" else "the entropy"
        yield found(key, f"it is true: {what} of the {view.strategy} trainer is compiled")


@rule(
    "exact.autocast",
    Severity.EXACTNESS,
    PARAM_DTYPE_KEY,
    remedy=f"trainer=contract, whose forward is outside autocast; or {PARAM_DTYPE_KEY}=fp32 with "
    f"{ROLLOUT}.dtype=float32",
    reports=("slime#830", "slime#833"),
)
def autocast(view: View) -> Iterator[Finding]:
    """verl wraps the stock forward in torch.autocast unless param_dtype is fp32: each op is cast by autocast's own
    list, which no rollout engine follows (0.24 nats measured when it is left on under an otherwise exact forward).
    """
    if view.on_fsdp and not view.contract and view.trainer_dtype != "float32":
        yield found(PARAM_DTYPE_KEY, f"it is {view.get(PARAM_DTYPE_KEY, 'unset, so bf16')}: the forward is autocast")


@rule(
    "exact.model-dtype",
    Severity.EXACTNESS,
    f"{ACTOR}.fsdp_config.model_dtype",
    remedy=f"set {ACTOR}.fsdp_config.model_dtype=fp32; products are bf16 by {PARAM_DTYPE_KEY}",
)
def model_dtype(view: View) -> Iterator[Finding]:
    """`module.to(bf16)` rounds buffers too: RoPE's inv_freq loses bits, which moved every token's probability by up to
    0.087. The master weights are bf16 then as well, and small updates are rounded away.
    """
    key = f"{ACTOR}.fsdp_config.model_dtype"
    if view.on_fsdp and str(view.get(key, "fp32")) not in ("fp32", "float32"):
        yield found(key, f"it is {view.get(key)}")


@rule(
    "exact.dtypes",
    Severity.EXACTNESS,
    f"{ROLLOUT}.dtype",
    PARAM_DTYPE_KEY,
    remedy=f"give {ROLLOUT}.dtype and {PARAM_DTYPE_KEY} one dtype",
)
def dtypes(view: View) -> Iterator[Finding]:
    """The two sides compute in different precisions, so every product is rounded differently (2.8e-4 between bf16
    autocast and an fp32 rollout of a tiny model).
    """
    if view.rollout_is_ours and view.contract:
        return  # start.dtypes says it
    rollout = view.rollout_dtype
    if rollout == "auto":
        rollout = str(getattr(view.model_config, "dtype", None) or view.trainer_dtype).removeprefix("torch.")
    if rollout != view.trainer_dtype:
        yield found(f"{ROLLOUT}.dtype", f"the rollout computes in {rollout}, the trainer in {view.trainer_dtype}")


@rule(
    "exact.head-temperature",
    Severity.EXACTNESS,
    f"{ROLLOUT}.temperature",
    remedy="trainer=contract, with which both sides divide fp32 logits by an fp32 temperature; or train at "
    "temperature 1",
    reports=("trl#4159", "prime-rl#697"),
)
def head_temperature(view: View) -> Iterator[Finding]:
    """verl's stock trainer divides bf16 logits by the temperature rounded to bf16 (0.7 becomes 0.69922); a rollout
    engine divides fp32 logits by the exact number.
    """
    exact = view.contract or view.trainer_dtype == "float32" or view.get(f"{MODEL}.use_fused_kernels", False)
    if view.temperature not in (0, 1) and not exact:
        yield found(f"{ROLLOUT}.temperature", f"it is {view.temperature:g}, and the trainer's logits are bf16")


@rule(
    "exact.dropout",
    Severity.EXACTNESS,
    f"{MODEL}.path",
    f"{MODEL}.override_config",
    remedy="set it to 0 in the model's config.json, or with +actor_rollout_ref.model.override_config.NAME=0",
)
def dropout(view: View) -> Iterator[Finding]:
    """In training mode the forward with gradient drops activations at random, which neither the rollout nor the pass
    for the old log-probs does.
    """
    if view.contract:
        return  # its forward has none
    overridden = view.group(f"{MODEL}.override_config")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        value = overridden.get(name, getattr(view.model_config, name, None))
        if isinstance(value, (int, float)) and value > 0:
            yield found(f"{MODEL}.override_config.{name}", f"the model's {name} is {value}")


@rule(
    "exact.micro-batches",
    Severity.EXACTNESS,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz",
    remedy="trainer=contract, whose rows do not depend on their company; or give both passes the same micro-batches",
    reports=("verl#6280", "verl#2996", "NeMo#4243"),
)
def micro_batches(view: View) -> Iterator[Finding]:
    """Old and new log-probs of the same weights come from other micro-batch shapes, and stock kernels choose by shape:
    the PPO ratio is not 1 before the first update. `tim/trainer_self_delta_max` shows it.
    """
    if view.contract:
        return
    if view.get(f"{ACTOR}.use_dynamic_bsz", False):
        yield found(f"{ACTOR}.use_dynamic_bsz", "it is true: micro-batches are packed anew for every pass")
        return
    key, other = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if view.get(key) is not None and view.get(other) is not None and view.get(key) != view.get(other):
        yield found(key, f"it is {view.get(key)}, and {other} is {view.get(other)}")


@rule(
    "exact.attention-backends",
    Severity.EXACTNESS,
    f"{MODEL}.override_config.attn_implementation",
    remedy="rollout=vexact trainer=contract: one attention contract on both sides",
    reports=("verl-omni#280",),
)
def attention(view: View) -> Iterator[Finding]:
    """The size and order of key blocks decide the bits of attention, and they differ between transformers'
    implementations, FlashAttention 2 and 3, FlashInfer, and per head dim even inside one of them.
    """
    if view.contract:
        return
    backend = view.engine_option("attention_backend")[1] or view.variable("VLLM_ATTENTION_BACKEND")[1]
    there = backend or {"stock": "sdpa over its pages", "vexact": "the contract's"}.get(view.rollout, "its own choice")
    yield found(
        f"{MODEL}.override_config.attn_implementation",
        f"the trainer's attention is {view.attention}, the rollout's is {there}",
    )


@rule(
    "exact.fused-sequence-parallel",
    Severity.EXACTNESS,
    f"{MODEL}.use_fused_kernels",
    *SEQUENCE_PARALLEL_KEYS,
    remedy=f"set {MODEL}.use_fused_kernels=false, or both ulysses_sequence_parallel_size of the actor to 1",
    reports=("verl#3723",),
)
def fused_sequence_parallel(view: View) -> Iterator[Finding]:
    """verl's fused head was reported to return wrong log-probs where sequences are split across ranks: not rounding,
    but another token's value at the border.
    """
    size = view.sequence_parallel
    if view.get(f"{MODEL}.use_fused_kernels", False) and size > 1 and not view.contract:
        yield found(f"{MODEL}.use_fused_kernels", f"it is true with sequences split over {size} ranks")
