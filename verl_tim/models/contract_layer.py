"""One decoder layer in contract ops, twice, side by side: why trainer and rollout agree.

`ContractLayer` is the engine's: fused weights in prepared buffers, paged keys and values, no autograd.
`trainer_layer` is the forward of the Hugging Face module: its own parameters, packed sequences, differentiable. Each
line of one has its counterpart in the other, with the same op of `verl_tim.numerics` or a schedule of it:

    engine                                  trainer
    rms_norm_inference                      rms_norm
    PreparedLinear (q, k, v fused)          linear (q, k, v)
    apply_rope, KV write, paged_attention   apply_rope, varlen_attention
    PreparedLinear (o)                      linear (o)
    PreparedLinear (gate, up fused)         linear (gate, up)
    swiglu_inference, PreparedLinear        swiglu, linear
    moe_inference                           router, experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_tim.models.config import ModelConfig
from verl_tim.models.taps import tap
from verl_tim.models.weights import WeightSlot
from verl_tim.numerics.activation import swiglu, swiglu_inference
from verl_tim.numerics.attention import PackedSequences, paged_attention, varlen_attention
from verl_tim.numerics.contract import COLUMN_FLOOR, ContractError, ceil_to
from verl_tim.numerics.linear import PreparedLinear, linear
from verl_tim.numerics.moe import experts, moe_inference, router
from verl_tim.numerics.norm import rms_norm, rms_norm_inference
from verl_tim.numerics.paging import PagedBatch
from verl_tim.numerics.rope import apply_rope


@dataclass
class Step:
    """What all layers of one forward share."""

    paged: PagedBatch
    cos_TF: Tensor
    sin_TF: Tensor


class ContractLayer:
    """Weights and forward of layer `index`. `slots` maps the names below ``model.layers.<index>.`` to buffer views."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.name = f"model.layers.{index}"
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.slots: dict[str, WeightSlot] = {}
        self.input_norm = self._vector("input_layernorm.weight", config.hidden_size, dtype, device)
        self.post_norm = self._vector("post_attention_layernorm.weight", config.hidden_size, dtype, device)
        self.qkv = PreparedLinear(
            (heads * dim, kv_heads * dim, kv_heads * dim),
            config.hidden_size,
            dtype=dtype,
            device=device,
            bias=config.arch.qkv_bias,
        )
        for part, name in enumerate("qkv"):
            self.slots[f"self_attn.{name}_proj.weight"] = WeightSlot(self.qkv.weight_view(part), dtype)
            if config.arch.qkv_bias:
                self.slots[f"self_attn.{name}_proj.bias"] = WeightSlot(self.qkv.bias_view(part), dtype)
        self.output = self._linear("self_attn.o_proj", config.hidden_size, heads * dim, dtype, device)
        self.qk_norm: Tensor | None = None
        if config.arch.qk_norm:
            # One weight per head of q and k, so that both are normalised in one call.
            self.qk_norm = torch.zeros(heads + kv_heads, dim, dtype=dtype, device=device)
            self.slots["self_attn.q_norm.weight"] = WeightSlot(self.qk_norm[:heads], dtype, repeated=True)
            self.slots["self_attn.k_norm.weight"] = WeightSlot(self.qk_norm[heads:], dtype, repeated=True)
        self.is_moe = config.is_moe_layer(index)
        if self.is_moe:
            self._build_moe(dtype, device)
        else:
            inner = config.intermediate_size
            self.gate_up = PreparedLinear((inner, inner), config.hidden_size, dtype=dtype, device=device)
            self.slots["mlp.gate_proj.weight"] = WeightSlot(self.gate_up.weight_view(0), dtype)
            self.slots["mlp.up_proj.weight"] = WeightSlot(self.gate_up.weight_view(1), dtype)
            self.down = self._linear("mlp.down_proj", config.hidden_size, inner, dtype, device)

    def _vector(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        weight = torch.zeros(size, dtype=dtype, device=device)
        self.slots[name] = WeightSlot(weight, dtype)
        return weight

    def _linear(
        self, name: str, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> PreparedLinear:
        prepared = PreparedLinear((out_features,), in_features, dtype=dtype, device=device)
        self.slots[f"{name}.weight"] = WeightSlot(prepared.weight_view(0), dtype)
        return prepared

    def _build_moe(self, dtype: torch.dtype, device: torch.device) -> None:
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        inner = moe.intermediate_size
        self.router = self._linear("mlp.gate", moe.num_experts, hidden, dtype, device)
        self.experts_gate_up = torch.zeros(moe.num_experts, ceil_to(2 * inner, COLUMN_FLOOR), hidden, device=device)
        self.experts_down = torch.zeros(moe.num_experts, ceil_to(hidden, COLUMN_FLOOR), inner, device=device)
        for e in range(moe.num_experts):
            gate_up, down = self.experts_gate_up[e], self.experts_down[e]
            self.slots[f"mlp.experts.{e}.gate_proj.weight"] = WeightSlot(gate_up[:inner], dtype)
            self.slots[f"mlp.experts.{e}.up_proj.weight"] = WeightSlot(gate_up[inner : 2 * inner], dtype)
            self.slots[f"mlp.experts.{e}.down_proj.weight"] = WeightSlot(down[:hidden], dtype)

    @property
    def buffers(self) -> list[Tensor]:
        """Every tensor this layer owns."""
        tensors = [self.input_norm, self.post_norm, self.qkv.weight_PK, self.output.weight_PK]
        tensors += [t for t in (self.qkv.bias_N, self.qk_norm) if t is not None]
        if self.is_moe:
            return [*tensors, self.router.weight_PK, self.experts_gate_up, self.experts_down]
        return [*tensors, self.gate_up.weight_PK, self.down.weight_PK]

    def __call__(self, x_TD: Tensor, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor) -> Tensor:
        x_TD = x_TD + self._attention(x_TD, step, k_pages_PSHD, v_pages_PSHD)
        mlp_TD = self._mlp(x_TD)
        tap(f"{self.name}.mlp", mlp_TD)
        return x_TD + mlp_TD

    def _attention(self, x_TD: Tensor, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor) -> Tensor:
        c = self.config
        rows = x_TD.shape[0]
        h = rms_norm_inference(x_TD, self.input_norm, c.rms_norm_eps)
        tap(f"{self.name}.input_layernorm", h)
        qkv = self.qkv(h)
        qkv_THD = qkv.view(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk_THD, v_THD = qkv_THD[:, : -c.num_kv_heads], qkv_THD[:, -c.num_kv_heads :]
        if self.qk_norm is not None:
            qk_THD = rms_norm_inference(qk_THD, self.qk_norm, c.rms_norm_eps)
        qk_THD = apply_rope(qk_THD, step.cos_TF, step.sin_TF)
        k_pages_PSHD.flatten(0, 1).index_copy_(0, step.paged.slot_T, qk_THD[:, c.num_heads :].to(k_pages_PSHD.dtype))
        v_pages_PSHD.flatten(0, 1).index_copy_(0, step.paged.slot_T, v_THD.to(v_pages_PSHD.dtype))
        tap(f"{self.name}.self_attn.v_proj", v_THD)
        tap(f"{self.name}.self_attn.q (projected, normalised, rotated)", qk_THD[:, : c.num_heads])
        tap(f"{self.name}.self_attn.k (projected, normalised, rotated)", qk_THD[:, c.num_heads :])
        out = paged_attention(qk_THD[:, : c.num_heads], k_pages_PSHD, v_pages_PSHD, step.paged)
        tap(f"{self.name}.self_attn.attention", out)
        out_TD = self.output(out.view(rows, -1))
        tap(f"{self.name}.self_attn.o_proj", out_TD)
        return out_TD

    def _mlp(self, x_TD: Tensor) -> Tensor:
        c = self.config
        h = rms_norm_inference(x_TD, self.post_norm, c.rms_norm_eps)
        tap(f"{self.name}.post_attention_layernorm", h)
        if self.is_moe:
            assert c.moe is not None
            return moe_inference(
                h,
                self.router.weight_PK,
                c.moe.num_experts,
                self.experts_gate_up,
                self.experts_down,
                c.moe.intermediate_size,
                c.moe.top_k,
                c.moe.normalise,
            )
        gate_up = self.gate_up(h)
        return self.down(swiglu_inference(gate_up[:, : c.intermediate_size], gate_up[:, c.intermediate_size :]))


class TrainerStep:
    """What a forward's layers share. No dataclass, on purpose: FSDP2 casts tensors inside those and in containers."""

    def __init__(self, packed: PackedSequences, cos_TF: Tensor, sin_TF: Tensor) -> None:
        self.packed, self.cos_TF, self.sin_TF = packed, cos_TF, sin_TF


def plain(parameter: Any) -> Tensor:
    """A parameter as the plain tensor that FSDP2's hooks leave while its module runs."""
    if isinstance(parameter, DTensor):
        raise ContractError(
            "a parameter is still sharded inside the forward: FSDP2 must wrap whole decoder layers (and embed_tokens, "
            "lm_head); check fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
        )
    return parameter


def _proj(x_TK: Tensor, module: Any) -> Tensor:
    return linear(x_TK, plain(module.weight), module.bias)


def trainer_layer(config: ModelConfig, index: int) -> Callable[[Any, Tensor, TrainerStep], Tensor]:
    """The forward of decoder layer `index` of the Hugging Face model: (module, x [T, hidden], step) -> [T, hidden]."""
    moe = config.moe if config.is_moe_layer(index) else None
    name = f"model.layers.{index}"

    def forward(self: Any, x_TD: Tensor, step: TrainerStep) -> Tensor:
        attn, rows = self.self_attn, x_TD.shape[0]
        h = rms_norm(x_TD, plain(self.input_layernorm.weight), config.rms_norm_eps)
        tap(f"{name}.input_layernorm", h)
        q = _proj(h, attn.q_proj).view(rows, config.num_heads, config.head_dim)
        k = _proj(h, attn.k_proj).view(rows, config.num_kv_heads, config.head_dim)
        v = _proj(h, attn.v_proj).view(rows, config.num_kv_heads, config.head_dim)
        if config.arch.qk_norm:
            q = rms_norm(q, plain(attn.q_norm.weight), config.rms_norm_eps)
            k = rms_norm(k, plain(attn.k_norm.weight), config.rms_norm_eps)
        q, k = apply_rope(q, step.cos_TF, step.sin_TF), apply_rope(k, step.cos_TF, step.sin_TF)
        tap(f"{name}.self_attn.v_proj", v)
        tap(f"{name}.self_attn.q (projected, normalised, rotated)", q)
        tap(f"{name}.self_attn.k (projected, normalised, rotated)", k)
        out = varlen_attention(q, k, v, step.packed)
        tap(f"{name}.self_attn.attention", out)
        out_TD = _proj(out.view(rows, -1), attn.o_proj)
        tap(f"{name}.self_attn.o_proj", out_TD)
        x_TD = x_TD + out_TD
        h = rms_norm(x_TD, plain(self.post_attention_layernorm.weight), config.rms_norm_eps)
        tap(f"{name}.post_attention_layernorm", h)
        mlp = self.mlp
        if moe is not None:
            routes = router(h, plain(mlp.gate.weight), moe.top_k, moe.normalise)
            mlp_TD = experts(h, routes, plain(mlp.experts.gate_up_proj), plain(mlp.experts.down_proj))
        else:
            mlp_TD = _proj(swiglu(_proj(h, mlp.gate_proj), _proj(h, mlp.up_proj)), mlp.down_proj)
        tap(f"{name}.mlp", mlp_TD)
        return x_TD + mlp_TD

    return forward
