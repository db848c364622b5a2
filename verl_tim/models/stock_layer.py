"""One decoder layer on stock PyTorch kernels: what an engine without a contract does.

F.linear in the model dtype on whatever rows there are, scaled_dot_product_attention, and Hugging Face's rounding
points: RoPE tables rounded to the model dtype, router logits rounded to it, expert outputs added in it. No noise is
added; the difference from the trainer is that of the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_tim.models.config import ModelConfig
from verl_tim.models.contract_layer import Step, tap_routes
from verl_tim.models.taps import ROTATED, tap
from verl_tim.models.weights import WeightSlot
from verl_tim.numerics.moe import Routes
from verl_tim.numerics.paging import DecodeBatch, PagedBatch, SequenceGroup


class StockLayer:
    """Weights and forward of layer `index`. `slots` maps the names below ``model.layers.<index>.`` to buffer views."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.name = f"model.layers.{index}"
        self.slots: dict[str, WeightSlot] = {}
        self.buffers: list[Tensor] = []
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.input_norm = self._weight((hidden,), "input_layernorm.weight")
        self.post_norm = self._weight((hidden,), "post_attention_layernorm.weight")
        names = [f"self_attn.{n}_proj" for n in "qkv"]
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv = self._fused(sizes, (hidden,), [f"{n}.weight" for n in names])
        self.qkv_bias = self._fused(sizes, (), [f"{n}.bias" for n in names]) if config.arch.qkv_bias else None
        self.output = self._weight((hidden, heads * dim), "self_attn.o_proj.weight")
        if config.arch.qk_norm:
            self.q_norm = self._weight((dim,), "self_attn.q_norm.weight")
            self.k_norm = self._weight((dim,), "self_attn.k_norm.weight")
        self.is_moe = config.is_moe_layer(index)
        if self.is_moe:
            moe = config.moe
            assert moe is not None
            self.router = self._weight((moe.num_experts, hidden), "mlp.gate.weight")
            inner = moe.intermediate_size
            self.experts = [
                (
                    self._fused(
                        [inner, inner], (hidden,), [f"mlp.experts.{e}.{n}_proj.weight" for n in ("gate", "up")]
                    ),
                    self._weight((hidden, inner), f"mlp.experts.{e}.down_proj.weight"),
                )
                for e in range(moe.num_experts)
            ]
        else:
            inner = config.intermediate_size
            self.gate_up = self._fused([inner, inner], (hidden,), ["mlp.gate_proj.weight", "mlp.up_proj.weight"])
            self.down = self._weight((hidden, inner), "mlp.down_proj.weight")

    def _weight(self, shape: tuple[int, ...], name: str) -> Tensor:
        return self._fused([shape[0]], shape[1:], [name])

    def _fused(self, sizes: list[int], rest: tuple[int, ...], names: list[str]) -> Tensor:
        buffer = torch.zeros(sum(sizes), *rest, dtype=self.dtype, device=self.device)
        self.buffers.append(buffer)
        for name, view in zip(names, buffer.split(sizes), strict=True):
            self.slots[name] = WeightSlot(view, self.dtype)
        return buffer

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `ContractLayer`'s."""
        x_TD = x_TD if residual_TD is None else residual_TD + x_TD
        x_TD = x_TD + self._attention(x_TD, step, k_pages_PSHD, v_pages_PSHD)
        h = rms_norm(x_TD, self.post_norm, self.config.rms_norm_eps)
        tap(f"{self.name}.post_attention_layernorm", h)
        mlp_TD = self._moe(h, step) if self.is_moe else self._swiglu(h, self.gate_up, self.down)
        tap(f"{self.name}.mlp", mlp_TD)
        return mlp_TD, x_TD

    @staticmethod
    def _swiglu(h_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(h_TD, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    def _moe(self, h_TD: Tensor, step: Step) -> Tensor:
        moe = self.config.moe
        assert moe is not None
        p_TE = F.softmax(F.linear(h_TD, self.router), dim=-1, dtype=torch.float32)
        weight_TK, expert_TK = torch.topk(p_TE, moe.top_k, dim=-1)
        if step.chosen is not None:
            step.chosen.append(expert_TK)
        if moe.normalise:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        weight_TK = weight_TK.to(h_TD.dtype)
        tap_routes(self.name, Routes(expert_TK, weight_TK))
        out = torch.zeros_like(h_TD)
        order = expert_TK.view(-1).argsort()
        counts = torch.bincount(expert_TK.view(-1), minlength=moe.num_experts).tolist()
        for (gate_up, down), pairs in zip(self.experts, order.split(counts), strict=True):
            if pairs.numel():
                token = pairs // moe.top_k
                y = self._swiglu(h_TD[token], gate_up, down)
                out.index_add_(0, token, y * weight_TK.view(-1)[pairs, None])
        return out

    def _attention(self, x_TD: Tensor, step: Step, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor) -> Tensor:
        c = self.config
        h = rms_norm(x_TD, self.input_norm, c.rms_norm_eps)
        tap(f"{self.name}.input_layernorm", h)
        qkv = F.linear(h, self.qkv, self.qkv_bias)
        qkv_THD = qkv.view(x_TD.shape[0], -1, c.head_dim)
        q, k, v = qkv_THD.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if c.arch.qk_norm:
            q, k = rms_norm(q, self.q_norm, c.rms_norm_eps), rms_norm(k, self.k_norm, c.rms_norm_eps)
        q, k = rotate(q, step.cos_TF, step.sin_TF), rotate(k, step.cos_TF, step.sin_TF)
        k_pages_PSHD.flatten(0, 1).index_copy_(0, step.paged.slot_T, k)
        v_pages_PSHD.flatten(0, 1).index_copy_(0, step.paged.slot_T, v)
        tap(f"{self.name}.self_attn.v_proj", v)
        tap(f"{self.name}.self_attn.q {ROTATED}", q)
        tap(f"{self.name}.self_attn.k {ROTATED}", k)
        out = sdpa_paged(q, k_pages_PSHD, v_pages_PSHD, step.paged)
        tap(f"{self.name}.self_attn.attention", out)
        out_TD = F.linear(out.flatten(1), self.output)
        tap(f"{self.name}.self_attn.o_proj", out_TD)
        return out_TD


def sdpa_paged(
    q_THD: Tensor,
    k_pages_PSHD: Tensor,
    v_pages_PSHD: Tensor,
    batch: PagedBatch | DecodeBatch,
    _attention: str = "stock",
) -> Tensor:
    """PyTorch's scaled_dot_product_attention over the paged KV cache; arguments as `numerics.paged_attention`."""
    k_rows, v_rows = k_pages_PSHD.flatten(0, 1), v_pages_PSHD.flatten(0, 1)
    out = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    for group in batch.groups(k_pages_PSHD.shape[1]):
        group.put_rows(out, _sdpa(group.take_rows(q_THD), k_rows, v_rows, group))
    return out


def _sdpa(q_NQHD: Tensor, k_rows: Tensor, v_rows: Tensor, group: SequenceGroup) -> Tensor:
    shape = (group.size, group.keys, *k_rows.shape[1:])
    k = k_rows.index_select(0, group.key_slots).view(shape).transpose(1, 2)
    v = v_rows.index_select(0, group.key_slots).view(shape).transpose(1, 2)
    mask = group.bias(0, group.queries, group.keys)[:, None] == 0
    q = q_NQHD.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the HF module writes it."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rotate(x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """HF's apply_rotary_pos_emb: tables rounded to the model dtype, products in it."""
    cos = torch.cat([cos_TF, cos_TF], dim=-1).to(x_THD.dtype)[:, None]
    sin = torch.cat([sin_TF, sin_TF], dim=-1).to(x_THD.dtype)[:, None]
    x1, x2 = x_THD.chunk(2, dim=-1)
    return x_THD * cos + torch.cat([-x2, x1], dim=-1) * sin
