"""vLLM as a side of `probe` and `verify --layers`; written against the offline `LLM` of vLLM 0.24 and 0.28.

vLLM is imported where an engine is made and nowhere else. `TapExtension` becomes a base of vLLM's worker class
(`worker_extension_cls`), so its methods run in the worker process by `LLM.collective_rpc`; results travel as a file.

What hooks cannot see there: with CUDA graphs or torch.compile modules are not called one by one, so taps need
`enforce_eager`; with tensor parallelism a rank holds a part of each result, so they need one rank.

Routes are taken where vLLM chooses them. Where a kernel does that inside itself (monolithic ones for GPUs), they are
those of the gate's logits (`routes_of`): ties and last bits of the weights may then be others than the kernel's.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.models.taps import ROTATED
from verl_tim.rollout.vllm_cpu import is_cpu_build
from verl_tim.training.in_process import ScoredSequence
from verl_tim.verification.answers import Answer, Top2
from verl_tim.verification.vllm_start import StartError, started

EXTENSION = f"{__name__}.TapExtension"
_LAYER = r"model\.layers\.\d+"
# Module names (vllm/model_executor/models/qwen2.py, qwen3.py, qwen3_moe.py, llama.py) and what their result is.
_RESULTS = (
    (r"model\.embed_tokens", "plain"),
    (rf"{_LAYER}\.(input_layernorm|post_attention_layernorm)", "norm"),
    (r"model\.norm", "norm"),
    (rf"{_LAYER}\.self_attn\.qkv_proj", "qkv"),
    (rf"{_LAYER}\.self_attn\.attn", "attention"),
    (rf"{_LAYER}\.self_attn\.o_proj", "plain"),
    (rf"{_LAYER}\.mlp\.gate", "gate"),
    (rf"{_LAYER}\.mlp", "plain"),
)
_LANGUAGE_MODEL = "language_model."
CPU_CACHE_BYTES = 1 << 30


class VllmError(RuntimeError):
    """vLLM is not here, or did not give what was asked for."""


def require_vllm() -> None:
    """Raises `VllmError` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise VllmError(
            "vllm is not installed here: pip install 'verl_tim[gpu]' on a machine with a GPU, scripts/vllm_cpu.sh on "
            "one without, or dump the log-probs of another engine to a file and give --dump"
        )


# -------------------------------------------------------------------------------------------------------- in a worker


class TapExtension:
    """Mixed into vLLM's worker; `self.get_model()` is the module it runs."""

    _tim_taps: dict[str, Tensor]
    _tim_handles: Sequence[Any] = ()

    def tim_start_taps(self) -> list[str]:
        """Hook the model's modules; the names that will be seen. Calls on a hooked model start anew."""
        self.tim_stop_taps()
        model = self.get_model()  # type: ignore[attr-defined]
        self._tim_taps = {}
        self._tim_handles = hook_model(model, self._tim_taps)
        return [name for name, module in model.named_modules() if result_kind(name)]

    def tim_save_taps(self, path: str, rows: int) -> list[str]:
        """Write the first `rows` rows of every result since the last call to a safetensors file; their names."""
        from safetensors.torch import save_file

        taken = {name: x[:rows].cpu().contiguous() for name, x in self._tim_taps.items()}
        self._tim_taps.clear()
        save_file(taken, path)
        return list(taken)

    def tim_stop_taps(self) -> None:
        """Take the hooks off again."""
        for handle in self._tim_handles:
            handle.remove()
        self._tim_handles = ()


def result_kind(name: str) -> str | None:
    """What the result of a module of vLLM is for us; None for modules that have no tap."""
    name = name.removeprefix(_LANGUAGE_MODEL)
    return next((kind for pattern, kind in _RESULTS if re.fullmatch(pattern, name)), None)


def hook_model(model: torch.nn.Module, taps: dict[str, Tensor]) -> list[Any]:
    """Hooks that keep the first result of every known module in `taps`, under `models.taps` names; their handles.

    Raises:
        VllmError: no module of the model is known.
    """
    handles: list[Any] = []
    choosers = _choosers(model)
    handles += [_WatchedChoice(owner, method, layer, taps) for layer, (owner, method) in choosers.items()]
    for full, module in model.named_modules():
        kind = result_kind(full)
        name = full.removeprefix(_LANGUAGE_MODEL)
        if kind is None or (kind == "gate" and name.removesuffix(".gate") in choosers):
            continue
        handles.append(module.register_forward_hook(_hook(name, kind, model, taps), with_kwargs=True))
    if not handles:
        raise VllmError(f"{type(model).__name__}: no module has a known name; hooks know vLLM's Qwen2, Qwen3 and Llama")
    return handles


def _choosers(model: torch.nn.Module) -> dict[str, tuple[Any, str]]:
    """{layer's `mlp`: (object, name of its method that gives weights (T, K) and expert ids (T, K))}.

    vLLM 0.28: a layer's `experts` is a MoERunner. It asks its router, unless its kernel takes the gate's logits
    (runner/moe_runner.py:587); of those the CPU's choose in a method of their own (experts/cpu_moe.py).
    """
    found: dict[str, tuple[Any, str]] = {}
    for full, module in model.named_modules():
        layer, _, last = full.removeprefix(_LANGUAGE_MODEL).rpartition(".")
        if last != "experts" or not re.fullmatch(rf"{_LAYER}\.mlp", layer):
            continue
        kernel = getattr(getattr(module, "_quant_method", None), "moe_kernel", None)
        owner, method = getattr(module, "router", None), "select_experts"
        if getattr(kernel, "is_monolithic", False):
            owner, method = kernel.fused_experts, "_select_experts"  # type: ignore[union-attr]
        if hasattr(owner, method):
            found[layer] = (owner, method)
    return found


class _WatchedChoice:
    """Keeps what a chooser of experts gives, as `hook_model`'s other hooks do, until `remove`."""

    def __init__(self, owner: Any, method: str, layer: str, taps: dict[str, Tensor]) -> None:
        self._owner, self._method = owner, method
        choose = getattr(owner, method)

        @functools.wraps(choose)
        def watched(*args: Any, **kwargs: Any) -> Any:
            weight_TK, expert_TK = choose(*args, **kwargs)
            for tap, value in ordered_routes(weight_TK, expert_TK, layer).items():
                taps.setdefault(tap, value.detach().clone())
            return weight_TK, expert_TK

        setattr(owner, method, watched)

    def remove(self) -> None:
        delattr(self._owner, self._method)  # the class's own is seen again


def _hook(name: str, kind: str, model: Any, taps: dict[str, Tensor]) -> Callable[..., None]:
    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for tap, value in results(name, kind, module, args, kwargs, output, model.config).items():
            taps.setdefault(tap, value.detach().flatten(1).clone())

    return keep


def results(
    name: str, kind: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, config: Any
) -> dict[str, Tensor]:
    """{tap name: value} of one module call, by the kind of the module.

    vLLM's norms return (normed, residual) inside the stack, its linears (result, bias).
    """
    first = output[0] if isinstance(output, tuple) else output
    layer = name.rpartition(".")[0]
    if kind == "qkv":
        return {f"{layer}.v_proj": split_qkv(first, config)[2]}
    if kind == "attention":
        queries, keys = (kwargs[key] if key in kwargs else args[at] for at, key in enumerate(("query", "key")))
        return {f"{layer}.q {ROTATED}": queries, f"{layer}.k {ROTATED}": keys, f"{layer}.attention": first}
    if kind == "gate":
        return routes_of(first, layer, int(config.num_experts_per_tok), bool(getattr(config, "norm_topk_prob", True)))
    return {name: first}


def split_qkv(qkv_TN: Tensor, config: Any) -> tuple[Tensor, ...]:
    """(q, k, v) of a fused projection on one rank."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    if qkv_TN.shape[-1] != queries + 2 * keys:
        raise VllmError(
            f"qkv_proj gives {qkv_TN.shape[-1]} columns, the model has {queries + 2 * keys}: set tensor_parallel_size=1"
        )
    return qkv_TN.split([queries, keys, keys], dim=-1)


def ordered_routes(weight_TK: Tensor, expert_TK: Tensor, layer: str) -> dict[str, Tensor]:
    """Router weights and expert ids, the most probable first, as both trainers name them; a tie keeps its order.

    A top k that does not sort (vLLM's for CPUs) would else differ at tokens that have the same experts.
    """
    order_TK = weight_TK.sort(dim=-1, descending=True, stable=True).indices
    return {f"{layer}.router": weight_TK.gather(1, order_TK), f"{layer}.routes": expert_TK.gather(1, order_TK).long()}


def routes_of(logits_TE: Tensor, layer: str, top_k: int, normalise: bool) -> dict[str, Tensor]:
    """Router weights and expert ids as vLLM makes them of a gate's logits: softmax in float32, top k, renormalised."""
    weight_TK, expert_TK = torch.softmax(logits_TE.float(), dim=-1).topk(top_k, dim=-1)
    if normalise:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return {f"{layer}.router": weight_TK, f"{layer}.routes": expert_TK}


# -------------------------------------------------------------------------------------------------------- the engine


def make_llm(model_path: str, *, dtype: str, max_model_len: int, seed: int, taps: bool = False) -> Any:
    """vLLM's offline engine on one GPU, or on the CPU with a build for CPUs.

    Args:
        max_model_len: longest prompt and response together.
        taps: for `hidden_states`: eager, one prompt in one piece, no prefix cache, and `TapExtension` in the worker.

    Raises:
        VllmError: vLLM is not installed, or its engine does not start.
    """
    require_vllm()
    # A forked engine process cannot use a GPU that this process has looked at (torch.cuda.is_available is enough), and
    # vLLM 0.24 sees only whether torch made a context.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "seed": seed,
        "tensor_parallel_size": 1,
        # what verl's rollout records (its logprobs_mode): after temperature, over the full vocabulary
        "logprobs_mode": "processed_logprobs",
    }
    if is_cpu_build():
        # As cluster=cpu has it: compiling takes minutes, and vLLM asks for 92 % of the machine's memory for its cache,
        # which the other processes have a part of. VLLM_CPU_KVCACHE_SPACE (GiB), where it is set, wins.
        settings |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        # vLLM dies at a prompt that it cuts, where requests have seeds: `plugin.patch_vllm_cpu_draws`, which only
        # workers below verl have.
        settings |= {"enable_chunked_prefill": False}
    if taps:
        settings |= {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": max_model_len,
            "worker_extension_cls": EXTENSION,
        }
    try:
        return started(lambda: LLM(**settings))
    except StartError as error:
        raise VllmError(f"vLLM did not start: {error}") from error


def vllm_answers(
    llm: Any, prompts: Sequence[np.ndarray], *, temperature: float, max_tokens: int, seed: int
) -> list[Answer]:
    """Responses of vLLM with its two likeliest tokens, all prompts in one batch, in the order given."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number, logprobs=2)
        for number in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt_P.tolist()} for prompt_P in prompts], params, use_tqdm=False)
    return [
        answer_of(prompt_P, output.outputs[0], temperature or 1.0)
        for prompt_P, output in zip(prompts, outputs, strict=True)
    ]


def answer_of(prompt_P: np.ndarray, completion: Any, temperature: float) -> Answer:
    """An answer from vLLM's `CompletionOutput`: token_ids, and per token a {token id: Logprob(logprob, rank)}.

    Raises:
        VllmError: vLLM gave fewer than two likeliest tokens, or no log-prob of a drawn token.
    """
    token_ids = list(completion.token_ids)
    if completion.logprobs is None or len(completion.logprobs) != len(token_ids):
        raise VllmError("vLLM returned no log-prob per token: it must be asked with logprobs=2")
    drawn: list[float] = []
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for at, (token, entries) in enumerate(zip(token_ids, completion.logprobs, strict=True)):
        likeliest = sorted(((e.rank, id_, e.logprob) for id_, e in entries.items() if e.rank in (1, 2)))
        if token not in entries or [rank for rank, *_ in likeliest] != [1, 2]:
            raise VllmError(f"response token {at}: vLLM's entry has ranks {sorted(e.rank for e in entries.values())}")
        drawn.append(entries[token].logprob)
        ids.append([id_ for _, id_, _ in likeliest])
        values.append([value for *_, value in likeliest])
    return Answer(
        ScoredSequence(np.asarray(prompt_P, np.int64), np.asarray(token_ids, np.int64)),
        torch.tensor(drawn, dtype=torch.float32),
        Top2(torch.tensor(ids), torch.tensor(values, dtype=torch.float32)),
        temperature,
    )


def hidden_states(llm: Any, answers: Sequence[Answer]) -> list[dict[str, Tensor]]:
    """Each response once more through an engine made with `taps=True`, one prefill each: {tap name: (rows, features)}.

    Raises:
        VllmError: more than one worker answered.
    """
    from safetensors.torch import load_file
    from vllm import SamplingParams

    llm.collective_rpc("tim_start_taps")
    states = []
    with tempfile.TemporaryDirectory(prefix="verl-tim-taps-") as work:
        for number, answer in enumerate(answers):
            tokens = np.concatenate([answer.tokens.prompt_P, answer.tokens.response_R])
            llm.generate(
                [{"prompt_token_ids": tokens.tolist()}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False
            )
            path = Path(work) / f"{number}.safetensors"
            workers = llm.collective_rpc("tim_save_taps", args=(str(path), len(tokens)))
            if len(workers) != 1:
                raise VllmError(f"{len(workers)} workers hold parts of the results: set tensor_parallel_size=1")
            taken = load_file(path)  # a safetensors file has no order; the worker's answer has
            states.append({name: taken[name] for name in workers[0]})
    llm.collective_rpc("tim_stop_taps")
    return states
