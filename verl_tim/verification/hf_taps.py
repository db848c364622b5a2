"""Taps on a stock Hugging Face causal LM: the names of `models.taps`, from forward hooks on its modules.

Works for Qwen2/2.5, Qwen3, Qwen3-MoE and Llama as transformers 5 writes them, plain or wrapped by FSDP2 (verl's
trainer). Queries and keys after rotation are no module's result: they are read where the attention function is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_tim.models.taps import ROTATED, record, recording, tap

LOGITS = "lm_head"
# Results of modules that have the tap's name.
_NAMED = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm|mlp|self_attn\.(v_proj|o_proj)))"
)
_GATE = re.compile(r"(model\.layers\.\d+)\.mlp\.gate")


@contextmanager
def record_hf(model: nn.Module, wanted: Callable[[str], bool] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect a forward's results inside the block, as `taps.record`: {name: (rows, features)}, and `lm_head`'s logits.

    Rows are all positions of the input, batch by batch.

    Args:
        model: a `...ForCausalLM` whose forward is transformers' own.
        wanted: which names to keep; None keeps all.

    Raises:
        ValueError: a model without a decoder stack under `model.layers`, whose names would all be missed.
    """
    modules = {_plain(name): module for name, module in model.named_modules()}
    if "model.layers.0" not in modules or "lm_head" not in modules:
        raise ValueError(
            f"{type(model).__name__} has no model.layers and lm_head: hooks know decoder-only models of transformers "
            "(Llama, Qwen2, Qwen3, Qwen3-MoE)"
        )
    handles = [
        module.register_forward_hook(hook)
        for name, module in modules.items()
        for hook in (_hook_of(name),)
        if hook is not None
    ]
    handles += [
        module.register_forward_pre_hook(_attention_hook(name.removesuffix(".o_proj")))
        for name, module in modules.items()
        if name.endswith(".self_attn.o_proj")
    ]
    attention = str(model.config._attn_implementation)  # type: ignore[union-attr]
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(_attention_function(attention))
        yield stack.enter_context(record(wanted))


def _plain(name: str) -> str:
    """Without what wrappers put between (activation offload, torch.compile)."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _hook_of(name: str) -> Callable[..., None] | None:
    if name == LOGITS or _NAMED.fullmatch(name):

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tap(name, _rows(output[0] if isinstance(output, tuple) else output))

        return keep
    gate = _GATE.fullmatch(name)
    if gate is None:
        return None
    layer = gate[1]

    def keep_routes(_module: nn.Module, _inputs: Any, output: Any) -> None:
        _logits, weight_TK, expert_TK = output  # transformers 5: Qwen3MoeTopKRouter
        tap(f"{layer}.mlp.router", weight_TK)
        tap(f"{layer}.mlp.routes", expert_TK)

    return keep_routes


def _attention_hook(name: str) -> Callable[..., None]:
    def keep(_module: nn.Module, inputs: Any) -> None:
        tap(f"{name}.attention", _rows(inputs[0]))

    return keep


def _rows(x: Tensor) -> Tensor:
    """(..., rows, features) -> (all rows, features)."""
    return x.flatten(0, -2)


@contextmanager
def _attention_function(implementation: str) -> Iterator[None]:
    """Look at queries and keys on their way into transformers' attention function; eager's is not in its table."""
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        yield
        return
    original = ALL_ATTENTION_FUNCTIONS[implementation]

    def attention(module: nn.Module, query_BHTD: Tensor, key_BHTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recording():
            layer = f"model.layers.{module.layer_idx}.self_attn"
            for side, x_BHTD in (("q", query_BHTD), ("k", key_BHTD)):
                tap(f"{layer}.{side} {ROTATED}", x_BHTD.transpose(1, 2).flatten(0, 1))
        return original(module, query_BHTD, key_BHTD, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[implementation] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[implementation] = original
