"""One decoder layer in contract ops, twice, side by side: why trainer and rollout agree.

`ContractLayer` is the engine's: fused weights in prepared buffers, paged keys and values, no autograd.
`trainer_layer` is the forward of the Hugging Face module: its own parameters, packed sequences, differentiable. Each
line of one has its counterpart in the other, with the same op of `verl_tim.numerics` or a schedule of it:

    engine                                  trainer
    (add_)rms_norm_inference                rms_norm, add_rms_norm
    PreparedLinear (q, k, v fused)          linear (q, k, v)
    qk_norm_rope_write, paged_attention     qk_norm_rope, varlen_attention
    PreparedLinear (o)                      linear (o)
    gate_up_inference, PreparedLinear       linear (gate, up), swiglu, linear (down)
    router_inference, experts_inference     router, experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_tim.models.config import ModelConfig
from verl_tim.models.taps import ROTATED, recording, tap
from verl_tim.models.weights import WeightSlot
from verl_tim.numerics.activation import gate_up_inference, swiglu
from verl_tim.numerics.attention import PackedSequences, paged_attention, varlen_attention
from verl_tim.numerics.contract import COLUMN_FLOOR, ContractError, ceil_to, on_gpu
from verl_tim.numerics.linear import PreparedLinear, linear
from verl_tim.numerics.moe import Routes, experts, experts_inference, router, router_inference
from verl_tim.numerics.norm import add_rms_norm, add_rms_norm_inference, rms_norm, rms_norm_inference
from verl_tim.numerics.paging import DecodeBatch, PagedBatch
from verl_tim.numerics.rope import qk_norm_rope, qk_norm_rope_write
from verl_tim.numerics.shards import ONE, Shards


def tap_routes(layer: str, routes: Routes) -> None:
    """Weights and expert ids of a layer's router, both (rows, k) in slot order."""
    tap(f"{layer}.mlp.router", routes.weight_TK)
    tap(f"{layer}.mlp.routes", routes.expert_TK)


@dataclass
class Step:
    """What all layers of one forward share. attention: the attention contract (`attention.resolve_attention`);
    chosen: the experts [T, K] that each sparse layer chose, in layer order, where they are asked for."""

    paged: PagedBatch | DecodeBatch
    cos_TF: Tensor
    sin_TF: Tensor
    attention: str
    chosen: list[Tensor] | None = None


class ContractLayer:
    """Weights and forward of layer `index`. `slots` maps the names below ``model.layers.<index>.`` to buffer views.

    With several ranks in `shards`, each holds some heads and some outputs of every linear; inputs of a linear are
    gathered before it, so that hidden states are whole, and equal, on every rank. Norms and router are on every rank.
    """

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, shards: Shards = ONE
    ) -> None:
        self.config, self.shards = config, shards
        self.name = f"model.layers.{index}"
        self.num_heads = _size(shards.part(config.num_heads, "num_attention_heads"))
        self.num_kv_heads = _size(shards.part(config.num_kv_heads, "num_key_value_heads"))
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, config.head_dim
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
            total = (config.num_heads if name == "q" else config.num_kv_heads) * dim
            self.slots[f"self_attn.{name}_proj.weight"] = self._part(self.qkv.weight_view(part), dtype, total)
            if config.arch.qkv_bias:
                self.slots[f"self_attn.{name}_proj.bias"] = self._part(self.qkv.bias_view(part), dtype, total)
        self.output = self._split_linear("self_attn.o_proj", config.num_heads * dim, dtype, device)
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
            total = config.intermediate_size
            self.inner = inner = _size(shards.part(total, "intermediate_size"))
            self.gate_up = PreparedLinear((inner, inner), config.hidden_size, dtype=dtype, device=device)
            self.slots["mlp.gate_proj.weight"] = self._part(self.gate_up.weight_view(0), dtype, total)
            self.slots["mlp.up_proj.weight"] = self._part(self.gate_up.weight_view(1), dtype, total)
            self.down = self._split_linear("mlp.down_proj", total, dtype, device)

    def _part(self, target: Tensor, dtype: torch.dtype, total: int) -> WeightSlot:
        """The slot of this rank's rows of a weight of `total` rows."""
        if self.shards.size == 1:
            return WeightSlot(target, dtype)
        return WeightSlot(target, dtype, part=self.shards.part(total, "rows"), total=total)

    def _vector(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        weight = torch.zeros(size, dtype=dtype, device=device)
        self.slots[name] = WeightSlot(weight, dtype)
        return weight

    def _split_linear(self, name: str, in_features: int, dtype: torch.dtype, device: torch.device) -> PreparedLinear:
        """This rank's share of a linear that gives hidden states."""
        hidden = self.config.hidden_size
        share = _size(self.shards.part(hidden, "hidden_size"))
        prepared = PreparedLinear((share,), in_features, dtype=dtype, device=device)
        self.slots[f"{name}.weight"] = self._part(prepared.weight_view(0), dtype, hidden)
        return prepared

    def _build_moe(self, dtype: torch.dtype, device: torch.device) -> None:
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        shards = self.shards
        inner = self.inner = _size(shards.part(moe.intermediate_size, "moe_intermediate_size"))
        share = _size(shards.part(hidden, "hidden_size"))
        self.router = PreparedLinear((moe.num_experts,), hidden, dtype=dtype, device=device)
        self.slots["mlp.gate.weight"] = WeightSlot(self.router.weight_view(0), dtype)
        gate_up_rows, down_rows, kept_dtype = 2 * inner, share, dtype
        if not on_gpu(device):  # as `PreparedLinear`
            gate_up_rows, down_rows = ceil_to(gate_up_rows, COLUMN_FLOOR), ceil_to(down_rows, COLUMN_FLOOR)
            kept_dtype = torch.float32
        self.experts_gate_up = torch.zeros(moe.num_experts, gate_up_rows, hidden, dtype=kept_dtype, device=device)
        self.experts_down = torch.zeros(
            moe.num_experts, down_rows, moe.intermediate_size, dtype=kept_dtype, device=device
        )
        total = moe.intermediate_size
        for e in range(moe.num_experts):
            gate_up, down = self.experts_gate_up[e], self.experts_down[e]
            self.slots[f"mlp.experts.{e}.gate_proj.weight"] = self._part(gate_up[:inner], dtype, total)
            self.slots[f"mlp.experts.{e}.up_proj.weight"] = self._part(gate_up[inner : 2 * inner], dtype, total)
            self.slots[f"mlp.experts.{e}.down_proj.weight"] = self._part(down[:share], dtype, hidden)

    @property
    def buffers(self) -> list[Tensor]:
        """Every tensor this layer owns."""
        tensors = [self.input_norm, self.post_norm, self.qkv.weight_PK, self.output.weight_PK]
        tensors += [t for t in (self.qkv.bias_N, self.qk_norm) if t is not None]
        if self.is_moe:
            return [*tensors, self.router.weight_PK, self.experts_gate_up, self.experts_down]
        return [*tensors, self.gate_up.weight_PK, self.down.weight_PK]

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(last branch's result, residual stream before it) -> the same after this layer.

        The residual add stands in front of the next norm, so that both are one call. `residual_TD` is None where
        `x_TD` is the whole stream (the embedding).
        """
        c = self.config
        if residual_TD is None:
            h, residual_TD = rms_norm_inference(x_TD, self.input_norm, c.rms_norm_eps), x_TD
        else:
            h, residual_TD = add_rms_norm_inference(x_TD, residual_TD, self.input_norm, c.rms_norm_eps)
        tap(f"{self.name}.input_layernorm", h)
        attention_TD = self._attention(h, step, k_pages_PSHD, v_pages_PSHD)
        h, residual_TD = add_rms_norm_inference(attention_TD, residual_TD, self.post_norm, c.rms_norm_eps)
        tap(f"{self.name}.post_attention_layernorm", h)
        mlp_TD = self._mlp(h, step)
        tap(f"{self.name}.mlp", mlp_TD)
        return mlp_TD, residual_TD

    def _attention(self, h_TD: Tensor, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor) -> Tensor:
        c, slots = self.config, step.paged.slot_T
        rows = h_TD.shape[0]
        qkv_THD = self.qkv(h_TD).view(rows, self.num_heads + 2 * self.num_kv_heads, c.head_dim)
        q_THD = qk_norm_rope_write(
            qkv_THD, self.num_heads, self.qk_norm, c.rms_norm_eps, step.cos_TF, step.sin_TF, k_pages_PSHD, v_pages_PSHD,
            slots,
        )  # fmt: skip
        if recording():
            tap(f"{self.name}.self_attn.v_proj", v_pages_PSHD.flatten(0, 1)[slots])
            tap(f"{self.name}.self_attn.q {ROTATED}", q_THD)
            tap(f"{self.name}.self_attn.k {ROTATED}", k_pages_PSHD.flatten(0, 1)[slots])
        out = paged_attention(q_THD, k_pages_PSHD, v_pages_PSHD, step.paged, step.attention)
        tap(f"{self.name}.self_attn.attention", out)
        out_TD = self.shards.columns(self.output(self.shards.columns(out.view(rows, -1))))
        tap(f"{self.name}.self_attn.o_proj", out_TD)
        return out_TD

    def _mlp(self, h_TD: Tensor, step: Step) -> Tensor:
        c = self.config
        if self.is_moe:
            assert c.moe is not None
            routes = router_inference(h_TD, self.router.weight_PK, c.moe.num_experts, c.moe.top_k, c.moe.normalise)
            if step.chosen is not None:
                step.chosen.append(routes.expert_TK)
            tap_routes(self.name, routes)
            return experts_inference(h_TD, routes, self.experts_gate_up, self.experts_down, self.inner, self.shards)
        inner_TI = gate_up_inference(h_TD, self.gate_up)
        return self.shards.columns(self.down(self.shards.columns(inner_TI)))


def _size(part: slice) -> int:
    return part.stop - part.start


class TrainerStep:
    """What a forward's layers share. No dataclass, on purpose: FSDP2 casts tensors inside those and in containers.

    `routes`: sparse layer -> the experts [T, K] it took, where they are asked for; by layer, because gradient
    checkpointing runs a layer twice. `choose`: (layer, experts [T, K] it chose) -> those to take in their place, or
    None (routing replay).
    """

    def __init__(self, packed: PackedSequences, cos_TF: Tensor, sin_TF: Tensor, attention: str) -> None:
        self.packed, self.cos_TF, self.sin_TF, self.attention = packed, cos_TF, sin_TF, attention
        self.routes: dict[int, Tensor] | None = None
        self.choose: Callable[[int, Tensor], Tensor | None] | None = None


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
        norms = (plain(attn.q_norm.weight), plain(attn.k_norm.weight)) if config.arch.qk_norm else None
        q, k = qk_norm_rope(q, k, norms, config.rms_norm_eps, step.cos_TF, step.sin_TF)
        tap(f"{name}.self_attn.v_proj", v)
        tap(f"{name}.self_attn.q {ROTATED}", q)
        tap(f"{name}.self_attn.k {ROTATED}", k)
        out = varlen_attention(q, k, v, step.packed, step.attention)
        tap(f"{name}.self_attn.attention", out)
        out_TD = _proj(out.view(rows, -1), attn.o_proj)
        tap(f"{name}.self_attn.o_proj", out_TD)
        h, x_TD = add_rms_norm(out_TD, x_TD, plain(self.post_attention_layernorm.weight), config.rms_norm_eps)
        tap(f"{name}.post_attention_layernorm", h)
        mlp = self.mlp
        if moe is not None:
            choose = None if step.choose is None else partial(step.choose, index)
            routes = router(h, plain(mlp.gate.weight), moe.top_k, moe.normalise, choose)
            if step.routes is not None:
                step.routes[index] = routes.expert_TK
            tap_routes(name, routes)
            mlp_TD = experts(h, routes, plain(mlp.experts.gate_up_proj), plain(mlp.experts.down_proj))
        else:
            mlp_TD = _proj(swiglu(_proj(h, mlp.gate_proj), _proj(h, mlp.up_proj)), mlp.down_proj)
        tap(f"{name}.mlp", mlp_TD)
        return x_TD + mlp_TD

    return forward
