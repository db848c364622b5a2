"""Environment variables that change numbers, and where they do not arrive."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ACTOR, ENVIRONMENT, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.config import joins_a_cluster
from verl_tim.training.determinism import SWITCH
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule

# The set that makes stock kernels repeat themselves.
DETERMINISM = (
    "VLLM_BATCH_INVARIANT",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "PYTHONHASHSEED",
    "FLASH_ATTENTION_DETERMINISTIC",
)
# verl sets these for the workers itself under full_determinism (trainer/main_ppo.py:47).
_SET_BY_VERL = ("VLLM_BATCH_INVARIANT", "PYTHONHASHSEED")
# verl hands these on to workers on other machines (trainer/constants_ppo.py:141).
_FORWARDED = (*DETERMINISM, "NCCL_DETERMINISTIC")
# What changes numbers and is not handed on.
_NUMERIC = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLASLT_WORKSPACE_SIZE",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_FLASH_ATTN_VERSION",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "NCCL_PROTO",
)


@rule(
    "exact.tf32",
    Severity.EXACTNESS,
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    remedy="unset it, or set it to 0",
)
def tf32(view: View) -> Iterator[Finding]:
    """The variable turns fp32 products into TF32 ones (10 bits of mantissa) in every library call of the process,
    below anything a config says: fp32 heads, routers and logits lose their precision.
    """
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        key, value = view.variable(name)
        if view.is_on(name) and not view.on_cpu:
            yield found(key, f"it is {value}")


@rule(
    "exact.cublas-workspace",
    Severity.EXACTNESS,
    "CUBLAS_WORKSPACE_CONFIG",
    remedy=f'+{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG=":16:8" ({SWITCH}=true sets it), or trainer=contract, which denies '
    "split-K by itself",
    reports=("vllm#43337",),
)
def cublas_workspace(view: View) -> Iterator[Finding]:
    """With its default workspace, or with :4096:8, cuBLAS splits K when K is large and rows are few: 0.3-0.8 % of the
    elements then differ from the same rows in a large batch. With :16:8 there is no room to split.
    """
    if view.contract or view.on_cpu:
        return
    key, value = view.variable("CUBLAS_WORKSPACE_CONFIG")
    if value != ":16:8":
        yield found(key, f"it is {value or 'unset'}")


@rule(
    "exact.flash-attention-version",
    Severity.EXACTNESS,
    "VLLM_FLASH_ATTN_VERSION",
    "engine_kwargs.vllm.attention_backend",
    remedy=f'pin it: +{ENVIRONMENT}.VLLM_FLASH_ATTN_VERSION="2" beside a trainer on flash_attention_2',
)
def flash_attention_version(view: View) -> Iterator[Finding]:
    """Left alone, vLLM takes FlashAttention 3 on Hopper and 2 elsewhere, and the trainer what transformers is told:
    versions differ in key blocks and splits, and a run's numbers change with the GPU it lands on.
    """
    key, value = view.variable("VLLM_FLASH_ATTN_VERSION")
    if value is None:
        option, value = view.engine_option("flash_attn_version")
        key = option if value is not None else key
    trainer = {"flash_attention_2": "2", "flash_attention_3": "3"}.get(view.attention)
    differs = value is None or (trainer is not None and str(value) != trainer)
    if view.on_vllm and not view.contract and differs:
        yield found(key, f"it is {value or 'unset'}, and the trainer's attention is {view.attention}")


@rule(
    "exact.determinism-variables",
    Severity.EXACTNESS,
    f"{ROLLOUT}.full_determinism",
    f"{ACTOR}.fsdp_config.full_determinism",
    *DETERMINISM,
    remedy=f"{SWITCH}=true in its place, which sets them all and asks every process; or set the missing ones under "
    f"{ENVIRONMENT}, for example NCCL_ALGO: Ring, CUBLAS_WORKSPACE_CONFIG: ':16:8', FLASH_ATTENTION_DETERMINISTIC: '1'",
    reports=("verl#6570", "verl#6572", "verl#5179", "verl#3126"),
)
def determinism_variables(view: View) -> Iterator[Finding]:
    """full_determinism promises runs that repeat, and needs a set of variables in every worker: one that is missing
    lets GEMMs, collectives or attention's backward choose freely again.
    """
    keys = [f"{ROLLOUT}.full_determinism", f"{ACTOR}.fsdp_config.full_determinism"]
    on = [key for key in keys if view.get(key, False)]
    given = _SET_BY_VERL if keys[0] in on else ()
    missing = [name for name in DETERMINISM if name not in given and view.variable(name)[1] is None]
    if on and missing and not view.on_cpu:
        yield found(on[0], f"it is true, and the workers get no {', '.join(missing)}")


@rule(
    "exact.variables-left-behind",
    Severity.EXACTNESS,
    "environment",
    remedy=f"set them under {ENVIRONMENT} (with + in front on the command line)",
    reports=("verl#6570",),
    needs_machine=True,
)
def variables_left_behind(view: View) -> Iterator[Finding]:
    """In a Ray cluster that runs already, workers inherit the environment it was started with, not this shell's. verl
    hands on a short list only, and this package what `tim.launch.forward` names; the rest is set here and missing
    there.
    """
    if view.machine is None or not joins_a_cluster(view.config):
        return
    given = view.group(ENVIRONMENT)
    for name in _NUMERIC:
        if name in view.machine.environment and name not in given and name not in _FORWARDED:
            yield found(f"environment variable {name}", "it is set in this shell, and no worker gets it")


@rule(
    "stops.expandable-segments",
    Severity.STOPS,
    "PYTORCH_CUDA_ALLOC_CONF",
    remedy=f"take expandable_segments out of it, or set {ROLLOUT}.free_cache_engine=false",
)
def expandable_segments(view: View) -> Iterator[Finding]:
    """vLLM's sleep mode keeps its memory in a pool of its own, which refuses to work with expandable segments: its
    start ends in an assertion.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        key, value = view.variable(name)
        on = "expandable_segments:true" in (value or "").lower().replace(" ", "")
        if on and view.on_vllm and view.get(f"{ROLLOUT}.free_cache_engine", True):
            yield found(key, f"it is {value}")


@rule(
    "correction.plugin-not-loaded",
    Severity.CORRECTION,
    "VERL_USE_EXTERNAL_PLUGINS",
    remedy="unset it, or add verl_tim to its list",
    needs_machine=True,
)
def plugin_not_loaded(view: View) -> Iterator[Finding]:
    """verl finds this package through the entry points of `verl.plugins`, and this variable keeps it from looking: the
    trainer, the correction and the metrics of this package would be missing without an error.
    """
    key, value = view.variable("VERL_USE_EXTERNAL_PLUGINS")
    names = {name.strip() for name in (value or "auto").lower().split(",")}
    if view.uses_verl_tim and value is not None and not names & {"auto", "verl_tim"}:
        yield found(key, f"it is {value}")


@rule(
    "stops.nccl-timeout",
    Severity.STOPS,
    "actor_rollout_ref.nccl_timeout",
    remedy="leave it at 600 seconds, or raise it",
)
def nccl_timeout(view: View) -> Iterator[Finding]:
    """A collective waits for the slowest rank, which may still load weights, compile a kernel or write a checkpoint;
    NCCL's watchdog ends the run when that takes longer than this.
    """
    key = "actor_rollout_ref.nccl_timeout"
    if view.number(key, 600) < 300 and not view.on_cpu:
        yield found(key, f"it is {view.number(key, 600):g} seconds")


@rule(
    "stops.nccl-transports",
    Severity.STOPS,
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    remedy="unset one of them",
)
def nccl_transports(view: View) -> Iterator[Finding]:
    """With peer-to-peer and shared memory both off, NCCL goes through the network inside one machine; without a
    network interface it can use, the first collective hangs.
    """
    if view.is_on("NCCL_P2P_DISABLE") and view.is_on("NCCL_SHM_DISABLE") and view.ranks > 1 and not view.on_cpu:
        yield found(view.variable("NCCL_P2P_DISABLE")[0], "it is on, and NCCL_SHM_DISABLE too")
