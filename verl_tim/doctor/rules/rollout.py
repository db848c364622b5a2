"""What keeps the rollout's log-probs from being the trainer's: the engine and its settings."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.config import ATTENTION_KEY
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule


@rule(
    "exact.rollout-engine",
    Severity.EXACTNESS,
    f"{ROLLOUT}.name",
    remedy="rollout=vexact",
    reports=("slime#830",),
)
def engine(view: View) -> Iterator[Finding]:
    """Only vexact computes in the trainer's rounding order. vLLM, SGLang, TensorRT-LLM and `stock` have kernels of
    their own, so their log-probs differ from the trainer's on nearly every token.
    """
    if view.rollout != "vexact":
        yield found(f"{ROLLOUT}.name", f"it is {view.rollout or 'not given'}")


@rule(
    "exact.rollout-parallel",
    Severity.EXACTNESS,
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.expert_parallel_size",
    f"{ROLLOUT}.pipeline_model_parallel_size",
    remedy="set it to 1: each rank gets a replica; or rollout=vexact",
    reports=("vllm#51290", "vllm#45683"),
)
def parallel(view: View) -> Iterator[Finding]:
    """A product that is split over ranks is summed in another order than the trainer's, and an all-reduce or expert
    exchange adds one more. verl's default for tensor parallelism is 2. (vexact splits outputs only, and sums nothing
    across ranks: any degree has the bits of one.)
    """
    if view.rollout_is_ours:
        return  # what it has not is refused by start.rollout
    for name in ("tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"):
        if view.whole(f"{ROLLOUT}.{name}", 1) > 1:
            yield found(f"{ROLLOUT}.{name}", f"it is {view.whole(f'{ROLLOUT}.{name}', 1)}")


@rule(
    "exact.batch-invariance",
    Severity.EXACTNESS,
    "VLLM_BATCH_INVARIANT",
    f"{ROLLOUT}.full_determinism",
    remedy="rollout=vllm_invariant, or rollout=vexact",
    reports=("vllm#27433", "sglang#28063"),
)
def batch_invariance(view: View) -> Iterator[Finding]:
    """Without batch-invariant kernels a token's log-prob depends on what else is in the batch: GEMMs split K by the
    number of rows, attention splits keys and cuts prefill chunks by load.
    """
    if view.on_vllm and not view.batch_invariant:
        key, value = view.variable("VLLM_BATCH_INVARIANT")
        yield found(key, f"it is {value or 'unset'}")
    elif view.rollout == "sglang" and not view.engine_option("enable_deterministic_inference")[1]:
        key = view.engine_option("enable_deterministic_inference")[0]
        yield found(key, "it is not on", "set it to true, or rollout=vexact")


@rule(
    "note.batch-invariance-gaps",
    Severity.NOTE,
    "VLLM_BATCH_INVARIANT",
    remedy=f"measure it: verl-tim verify --ladder with this engine; {ROLLOUT}.enforce_eager=true takes graphs and "
    "compilation out",
    reports=("vllm#57016", "vllm#51187", "vllm#28131", "vllm#30907", "vllm#33383"),
)
def batch_invariance_gaps(view: View) -> Iterator[Finding]:
    """vLLM's batch-invariant mode has had holes: fused MoE, the FlashInfer sampler with 44 sequences together, CUDA
    graphs on some GPUs, compiler fusions. And it makes vLLM equal to itself, not to the trainer.
    """
    if not (view.on_vllm and view.batch_invariant):
        return
    if view.experts:
        yield found(f"{MODEL}.path", f"the model has {view.experts} experts, and vLLM's fused MoE was not invariant")
    if not view.get(f"{ROLLOUT}.enforce_eager", False):
        yield found(f"{ROLLOUT}.enforce_eager", "it is false: graphs and compiled fusions are in use")


@rule(
    "exact.prefix-cache",
    Severity.EXACTNESS,
    f"{ROLLOUT}.enable_prefix_caching",
    remedy=f"set {ROLLOUT}.enable_prefix_caching=false; vexact's own prefix cache gives the same bits cold and warm",
    reports=("vllm#27433", "vllm#40896", "vllm#33123", "vllm#40179"),
)
def prefix_cache(view: View) -> Iterator[Finding]:
    """A prompt that hits the cache gets other bits than a cold one (3.4e-3 reported): what is left of it is prefilled
    in another shape, at another place in its tiles.
    """
    if view.rollout in ("vllm", "sglang", "trtllm") and view.get(f"{ROLLOUT}.enable_prefix_caching", True):
        yield found(f"{ROLLOUT}.enable_prefix_caching", "it is true")


@rule(
    "exact.cuda-graphs",
    Severity.EXACTNESS,
    f"{ROLLOUT}.enforce_eager",
    f"{ROLLOUT}.cudagraph_capture_sizes",
    remedy=f"set {ROLLOUT}.enforce_eager=true to take this out of a comparison (slower)",
    reports=("vllm#28131", "vllm#54243"),
)
def cuda_graphs(view: View) -> Iterator[Finding]:
    """Decode steps are padded to the captured batch sizes and replay what was compiled for them, while prefill and the
    trainer run other shapes and kernels.
    """
    if view.on_vllm and not view.batch_invariant and not view.get(f"{ROLLOUT}.enforce_eager", False):
        yield found(f"{ROLLOUT}.enforce_eager", "it is false")


@rule(
    "exact.quantisation",
    Severity.EXACTNESS,
    f"{ROLLOUT}.quantization",
    f"{ROLLOUT}.quantization_config_file",
    "engine_kwargs.<engine>.quantization",
    f"{MODEL}.path",
    remedy="take it out; or keep it and correct: correction=token_tis",
)
def quantisation(view: View) -> Iterator[Finding]:
    """The rollout multiplies weights of fewer bits than the trainer's. The gap is far above that of rounding."""
    if not view.rollout_is_ours:  # refused by start.rollout
        for key in (f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"):
            if view.get(key):
                yield found(key, f"it is {view.get(key)}")
        key, value = view.engine_option("quantization")
        if value:
            yield found(key, f"it is {value}")
    if getattr(view.model_config, "quantization_config", None):
        yield found(f"{MODEL}.path", f"{view.model_path} is a quantised model", "take the unquantised weights")


@rule(
    "exact.kv-cache-dtype",
    Severity.EXACTNESS,
    "engine_kwargs.<engine>.kv_cache_dtype",
    remedy="set it to auto",
    reports=("sglang#25790",),
)
def kv_cache_dtype(view: View) -> Iterator[Finding]:
    """Keys and values are rounded when they are stored, so decode reads other numbers than the trainer computes; with
    fp8 prefill and decode part from 97 keys on.
    """
    key, value = view.engine_option("kv_cache_dtype")
    if value is not None and str(value) not in ("auto", view.rollout_dtype):
        yield found(key, f"it is {value}, and the rollout computes in {view.rollout_dtype}")


@rule(
    "exact.speculative-decoding",
    Severity.EXACTNESS,
    f"{MODEL}.mtp.enable_rollout",
    "engine_kwargs.<engine>.speculative_config",
    remedy="take it out of the rollout",
)
def speculative(view: View) -> Iterator[Finding]:
    """Several tokens are scored in one pass, in another shape than one by one, and a rejected draft is drawn again
    from a residual distribution whose log-prob is not the model's.
    """
    if not view.rollout_is_ours and view.get(f"{ROLLOUT}.mtp.enable", False):
        key = f"{ROLLOUT}.mtp.enable_rollout"
        if view.get(key, False):
            yield found(key, "it is true")
    for name in ("speculative_config", "speculative_algorithm"):
        key, value = view.engine_option(name)
        if value:
            yield found(key, "it is given")


@rule(
    "exact.vocabulary-padding",
    Severity.EXACTNESS,
    f"{MODEL}.path",
    remedy="rollout=vexact, which normalises as the trainer does; or a model whose head has as many rows as its "
    "tokenizer has tokens",
)
def vocabulary_padding(view: View) -> Iterator[Finding]:
    """verl masks logits beyond the tokenizer's tokens in its vLLM workers, and its trainer normalises over the whole
    head: a constant is added to d on every token, log(128/99) = 0.257 nats where the logits are flat.
    """
    if view.on_vllm and view.unused_logits is not None:
        tokens, rows = view.unused_logits
        yield found(f"{MODEL}.path", f"the tokenizer has {tokens} tokens, the model's head {rows} rows")


@rule(
    "exact.attention-head-dim",
    Severity.EXACTNESS,
    f"{MODEL}.path",
    ATTENTION_KEY,
    remedy=f"with vexact set {ATTENTION_KEY}=chunk64",
    reports=("vllm#51902",),
)
def head_dim(view: View) -> Iterator[Finding]:
    """FlashAttention 3 keeps one key-block size in prefill, paged prefill and decode at head dims 128 and 256 only: at
    64, 96 and 192 a token's bits depend on the route by which it was computed.
    """
    size = getattr(view.model_config, "head_dim", None)
    if size is None and getattr(view.model_config, "num_attention_heads", None):
        size = view.model_config.hidden_size // view.model_config.num_attention_heads
    if size in (None, 128, 256):
        return
    if view.on_vllm:
        yield found(f"{MODEL}.path", f"the model's head dim is {size}")
    elif view.rollout == "vexact" and view.get(ATTENTION_KEY) == "fa3":
        yield found(ATTENTION_KEY, f"it is fa3, and the model's head dim is {size}")


@rule(
    "exact.routes",
    Severity.EXACTNESS,
    f"{MODEL}.path",
    remedy="rollout=vexact with trainer=contract, whose routers agree bit for bit; routing_replay=r3 mends a part",
    reports=("verl#7340", "miles#2570", "miles#2722"),
)
def routes(view: View) -> Iterator[Finding]:
    """A router that sees a slightly different hidden state picks other experts: about a tenth of the choices flip, and
    the mismatch of a mixture of experts is far above a dense model's. Replaying expert ids leaves the rest of it.
    """
    if view.experts and not view.zero_mismatch:
        yield found(f"{MODEL}.path", f"the model has {view.experts} experts, routed by each side for itself")


@rule(
    "exact.staleness",
    Severity.EXACTNESS,
    "trainer.v1.trainer_mode",
    remedy="set trainer.v1.trainer_mode=sync; or rollout=vexact trainer=contract, whose tokens are compared by version",
)
def staleness(view: View) -> Iterator[Finding]:
    """Outside the synchronous trainer tokens are drawn under older weights, so d is staleness plus mismatch; and the
    asynchronous client drops what the engine reports beside the tokens (top-1 ids, routes).
    """
    if not view.synchronous and not view.zero_mismatch:
        yield found("trainer.v1.trainer_mode", f"it is {view.get('trainer.v1.trainer_mode')}")


@rule(
    "note.stale-tokens",
    Severity.NOTE,
    "trainer.v1.trainer_mode",
    "tim.partial_rollout.max_version_lag",
    remedy="tim.partial_rollout.max_version_lag=0 trains on the trainer's own version only; or "
    "trainer.v1.trainer_mode=sync",
)
def stale_tokens(view: View) -> Iterator[Finding]:
    """Each token's log-prob is exact at the version that drew it, and the gate compares those of the trainer's own
    version (`tim/compared_tokens`, `tim/uncompared_tokens`). The PPO ratio of older ones starts from the trainer's old
    log-prob, not from the policy that drew them.
    """
    if view.synchronous or not view.zero_mismatch or view.get("tim.partial_rollout.max_version_lag") is not None:
        return
    corrects = view.correction is not None and view.correction.enabled
    if not corrects:
        yield found("trainer.v1.trainer_mode", f"it is {view.get('trainer.v1.trainer_mode')}, and nothing is corrected")


@rule(
    "exact.weight-conversion",
    Severity.EXACTNESS,
    f"{ACTOR}.strategy",
    remedy=f"set {ACTOR}.strategy=fsdp2",
)
def weight_conversion(view: View) -> Iterator[Finding]:
    """With another trainer than FSDP the weights are renamed, split and merged on their way to the rollout: one more
    place where the two sides can hold different numbers without an error.
    """
    if view.strategy in ("megatron", "veomni", "torchtitan"):
        yield found(f"{ACTOR}.strategy", f"it is {view.strategy}")
