"""The trainer's table: the forwards of a Hugging Face causal LM served by contract ops, the ones the engine uses.

`apply_contract` replaces `forward` on module *instances*, before or after FSDP2 wraps them:
    root (…ForCausalLM)  input checks, packing, autocast off, tokens -> log-probs
    model.embed_tokens   embedding
    decoder layer        `contract_layer.trainer_layer`, beside the engine's layer
    model.norm           rms_norm
    lm_head              token_log_probs (logits never leave it)
Modules that FSDP2 may wrap on its own (decoder layers, embed_tokens, lm_head) are *called*, so that their hooks gather
and reshard parameters and gradient checkpointing sees them. FSDP2's cast_forward_inputs casts every floating tensor
argument to the parameter dtype, also inside containers and dataclasses, so what must stay float32 (cos/sin,
temperature) travels in plain objects (`TrainerStep`, `_Targets`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from verl_tim.models.config import ModelConfig, ModelError, config_from_hf
from verl_tim.models.contract_layer import TrainerStep, plain, trainer_layer
from verl_tim.models.packing import pack
from verl_tim.models.taps import tap
from verl_tim.numerics.attention import resolve_attention
from verl_tim.numerics.contract import ContractError, check_process, contract_id, exact_region
from verl_tim.numerics.embedding import embedding
from verl_tim.numerics.head import token_log_probs
from verl_tim.numerics.norm import rms_norm
from verl_tim.numerics.rope import RopeTable


@dataclass
class ContractOutput(ModelOutput):
    """log_probs and entropy, float32 [B, S]: of the token after each position (entropy None when not asked for).

    With `record_choices`, top1, int64 [B, S]: the likeliest token after each position; routes, int16 [B, S, layers, k]:
    the experts that each sparse layer chose there (None for a dense model).

    A `ModelOutput`, because FSDP2 hangs its pre-backward hooks on the tensors that it finds in the output, and looks
    into registered pytrees only: a plain dataclass would leave the root's parameters freed in backward (torch 2.11).
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    top1: Tensor | None = None
    routes: Tensor | None = None


@dataclass
class ContractForward:
    """What `apply_contract` did to a model, and proof that its forward really ran.

    Attributes:
        config: the model's config as both sides read it.
        table: module name -> the contract op that serves it.
        attention: the attention contract asked for.
        forward_calls, tokens: how many root forwards ran, and over how many real tokens.
        choose: see `TrainerStep`; set it to replay routes. Rows are those of the packed input, padded to `ROW_FLOOR`.
    """

    config: ModelConfig
    table: dict[str, str]
    attention: str = "auto"
    forward_calls: int = 0
    tokens: int = 0
    choose: Callable[[int, Tensor], Tensor | None] | None = None
    _rope: dict[torch.device, RopeTable] = field(default_factory=dict, repr=False)
    _replaced: list[nn.Module] = field(default_factory=list, repr=False)

    def rope(self, device: torch.device) -> RopeTable:
        if device not in self._rope:
            c = self.config
            self._rope[device] = RopeTable(
                c.rope.inverse_frequencies, c.rope.scaling, c.max_position_embeddings, device
            )
        return self._rope[device]

    def attention_on(self, device: torch.device) -> str:
        """The attention contract in use on a device."""
        return resolve_attention(self.attention, device, self.config.head_dim)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module in self._replaced:
            del module.forward
            module.__dict__.pop("_verl_tim_contract", None)
        self._replaced.clear()


class _Targets:
    """What the head needs beside the hidden states. No dataclass either."""

    def __init__(self, token_T: Tensor, temperature_T: Tensor, with_entropy: bool, top1_out_T: Tensor | None) -> None:
        self.token_T, self.temperature_T, self.with_entropy = token_T, temperature_T, with_entropy
        self.top1_out_T = top1_out_T


def _embedding_forward() -> Any:
    def forward(self: nn.Embedding, token_T: Tensor) -> Tensor:
        return embedding(token_T, plain(self.weight), self.padding_idx)

    return forward


def _norm_forward(config: ModelConfig) -> Any:
    def forward(self: nn.Module, x_TD: Tensor) -> Tensor:
        h = rms_norm(x_TD, plain(self.weight), config.rms_norm_eps)
        tap("model.norm", h)
        return h

    return forward


def _head_forward() -> Any:
    def forward(self: nn.Module, hidden_TD: Tensor, targets: _Targets) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(
            hidden_TD,
            plain(self.weight),
            targets.token_T,
            targets.temperature_T,
            with_entropy=targets.with_entropy,
            top1_out_T=targets.top1_out_T,
        )

    return forward


_IGNORED = {"use_cache": (False, None), "return_dict": (True, None), "output_hidden_states": (False, None),
            "output_attentions": (False, None), "output_router_logits": (False, None), "labels": (None,),
            "past_key_values": (None,), "inputs_embeds": (None,)}  # fmt: skip


def _root_forward(handle: ContractForward) -> Any:
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        shift_labels: Tensor | None = None,
        calculate_entropy: bool = True,
        record_choices: bool = False,
        **ignored: Any,
    ) -> ContractOutput:
        for name, value in ignored.items():
            allowed = _IGNORED.get(name)
            if allowed is None or not any(value is option for option in allowed):
                raise ContractError(f"contract forward: argument {name}={value!r} is not supported; leave it out")
        if input_ids is None:
            raise ContractError("contract forward: input_ids is required")
        device = input_ids.device
        check_process(device)
        # Whoever calls may have autocast on (verl's trainer does); every op here chooses its own dtypes.
        with exact_region(device.type):
            packed = pack(input_ids, attention_mask, position_ids, temperature, shift_labels)
            cos_TF, sin_TF = handle.rope(device).at(packed.position_T, packed.max_length)
            x = self.model.embed_tokens(packed.token_T)
            tap("model.embed_tokens", x)
            step = TrainerStep(packed.sequences, cos_TF, sin_TF, handle.attention_on(device))
            contract_id(device, x.dtype, step.attention)
            top1_T = torch.empty_like(packed.target_T) if record_choices else None
            step.routes = {} if record_choices else None
            step.choose = handle.choose
            for layer in self.model.layers:
                x = layer(x, step=step)
            x = self.model.norm(x)
            targets = _Targets(packed.target_T, packed.temperature_T, calculate_entropy, top1_T)
            log_prob_T, entropy_T = self.lm_head(x, targets)
            handle.forward_calls += 1
            handle.tokens += packed.sequences.num_rows
            routes_TLK = None
            if step.routes:
                routes_TLK = torch.stack([step.routes[layer] for layer in sorted(step.routes)], 1).to(torch.int16)

            def unpacked(value: Tensor | None) -> Tensor | None:
                return None if value is None else packed.unpack(value)

            return ContractOutput(*(unpacked(value) for value in (log_prob_T, entropy_T, top1_T, routes_TLK)))

    return forward


def apply_contract(hf_model: nn.Module, *, attention: str = "auto") -> ContractForward:
    """Serve a transformers Qwen3, Qwen3-MoE, Qwen2/2.5 or Llama causal LM by contract ops, in place.

    May be called before `fully_shard` or after it. Afterwards the model's forward is
    ``(input_ids, attention_mask=None, position_ids=None, temperature=1.0, shift_labels=None, calculate_entropy=True,
    record_choices=False)`` and returns a `ContractOutput`, whose ``.log_probs`` and ``.entropy`` are what verl's
    use_fused_kernels path takes (verl 0.9.1, workers/engine/fsdp/transformer_impl.py:1362, 1456). Packed input is (1,
    T) without attention_mask, a sequence starting wherever the position id is 0; padded input is (B, S) with an
    attention_mask padded left or right. Without shift_labels the target of a position is the next column of its row.

    `attention`: the attention contract, see `verl_tim.numerics.attention.resolve_attention`; the rollout's, too.

    Raises:
        ModelError: for a model that has no table.
        ContractError: for one already served, or whose attention or MoE modules are not the expected ones.
    """
    hf_config = getattr(hf_model, "config", None)
    if hf_config is None or not hasattr(hf_model, "lm_head") or not hasattr(hf_model, "model"):
        raise ModelError(f"apply_contract: {type(hf_model).__name__} is not a transformers causal language model")
    config = config_from_hf(hf_config)
    if not any(cls.__name__ == config.architecture for cls in type(hf_model).__mro__):
        raise ModelError(
            f"apply_contract: {type(hf_model).__name__} wraps or replaces {config.architecture}; give the model itself "
            "(adapters and value heads are outside the contract)"
        )
    if getattr(hf_model, "_verl_tim_contract", None) is not None:
        raise ContractError("apply_contract: this model is already served by the contract")
    handle = ContractForward(config, {}, attention)

    def serve(name: str, module: nn.Module, forward: Any, op: str) -> None:
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        handle.table[name] = op
        handle._replaced.append(module)

    root: Any = hf_model
    for index, layer in enumerate(root.model.layers):
        if config.is_moe_layer(index) != hasattr(layer.mlp, "experts"):
            raise ContractError(f"apply_contract: model.layers.{index}.mlp does not match the config's sparse layers")
        for name, module in layer.named_modules():
            if name.endswith("_proj") and not isinstance(module, nn.Linear):
                raise ContractError(
                    f"apply_contract: model.layers.{index}.{name} is {type(module).__name__}, not nn.Linear (adapters "
                    "and quantised layers are outside the contract)"
                )
        mlp = "router + experts" if config.is_moe_layer(index) else "linear + swiglu"
        op = f"rms_norm, linear, qk_norm_rope, varlen_attention, {mlp}"
        serve(f"model.layers.{index}", layer, trainer_layer(config, index), op)
    serve("model.embed_tokens", root.model.embed_tokens, _embedding_forward(), "embedding")
    serve("model.norm", root.model.norm, _norm_forward(config), "rms_norm")
    serve("lm_head", root.lm_head, _head_forward(), "token_log_probs")
    serve("", hf_model, _root_forward(handle), "pack, autocast off, unpack")
    hf_model._verl_tim_contract = handle  # type: ignore[assignment]
    return handle
