"""Rotary position embedding, half-split layout (Hugging Face's `rotate_half`).

Rule: cos/sin in float32 from float32 inverse frequencies and integer positions, never from a module's buffer (a
``model.to(bfloat16)`` rounds buffers) and never cast; products and sum in float32, each rounded; one rounding to the
operand dtype at the end.

`qk_norm_rope` is what a layer does between its projections and attention: RMSNorm of each head of q and k where the
model has it, then the rotation; the engine's form writes keys and values to the cache in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError, ceil_to, exact_region, kernels, on_gpu
from verl_tim.numerics.norm import rms_norm, rms_norm_inference

_GROWTH = 1024  # positions; a table grows in whole multiples, so that its SIMD body covers every element


class RopeTable:
    """cos and sin for positions 0..n-1, float32 [n, head_dim / 2], grown on demand up to `max_positions`.

    Args:
        inverse_frequencies: head_dim / 2 float32 values (held as Python floats).
        scaling: factor on cos and sin (YaRN's attention factor; 1.0 otherwise).
        max_positions: largest number of positions the model allows.
    """

    def __init__(
        self, inverse_frequencies: Sequence[float], scaling: float, max_positions: int, device: torch.device | str
    ) -> None:
        self.max_positions = max_positions
        self._scaling = scaling
        self._frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32, device=device)
        self._cos = self._sin = torch.empty(0, len(inverse_frequencies), dtype=torch.float32, device=device)

    def at(self, position_T: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """cos and sin rows, float32 [T, head_dim / 2]. `limit` is an upper bound (exclusive) on the positions."""
        if limit > self.max_positions:
            raise ContractError(
                f"rope: position {limit - 1} is beyond the model's max_position_embeddings={self.max_positions}; "
                "shorten the sequence or raise max_position_embeddings in the model's config.json"
            )
        if limit > self._cos.shape[0]:
            self._grow(ceil_to(max(limit, 2 * self._cos.shape[0]), _GROWTH))
        if on_gpu(position_T):
            take = kernels("row_lookup").take
            return take(self._cos, position_T), take(self._sin, position_T)
        return self._cos.index_select(0, position_T), self._sin.index_select(0, position_T)

    def _grow(self, size: int) -> None:
        # A table grown during an evaluation under inference_mode must still serve a training step.
        with torch.inference_mode(False):
            positions = torch.arange(size, device=self._frequencies.device).to(torch.float32)
            angles = positions[:, None] * self._frequencies
            self._cos = angles.cos() * self._scaling
            self._sin = angles.sin() * self._scaling


def _rotate(x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    half = x_THD.shape[-1] // 2
    x = x_THD.to(torch.float32)
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    out = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    out[..., :half] = x1 * cos - x2 * sin
    out[..., half:] = x2 * cos + x1 * sin
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TF, sin_TF)
        with exact_region(x_THD.device.type):
            return _rotate(x_THD, cos_TF, sin_TF)

    @staticmethod
    def backward(ctx, grad_THD: Tensor):
        cos_TF, sin_TF = ctx.saved_tensors
        with exact_region(grad_THD.device.type):
            return _rotate(grad_THD, cos_TF, -sin_TF), None, None


def apply_rope(x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] in the operand dtype by float32 [T, head_dim / 2] tables. Differentiable in x."""
    _check_tables(cos_TF, sin_TF)
    if torch.is_grad_enabled() and x_THD.requires_grad:
        return _Rope.apply(x_THD, cos_TF, sin_TF)
    return _rotate(x_THD, cos_TF, sin_TF)


class _QKNormRope(torch.autograd.Function):
    """The fused GPU form; a CPU composes the two ops."""

    @staticmethod
    def forward(ctx, q_THD, k_THD, q_weight_D, k_weight_D, eps, cos_TF, sin_TF):
        ctx.save_for_backward(q_THD, k_THD, q_weight_D, k_weight_D, cos_TF, sin_TF)
        ctx.eps = eps
        return kernels("rope").qk_norm_rope(q_THD, k_THD, q_weight_D, k_weight_D, eps, cos_TF, sin_TF)

    @staticmethod
    def backward(ctx, grad_q_THD, grad_k_THD):
        q_THD, k_THD, q_weight_D, k_weight_D, cos_TF, sin_TF = ctx.saved_tensors
        grads = kernels("rope").qk_norm_rope_backward(
            grad_q_THD, grad_k_THD, q_THD, k_THD, q_weight_D, k_weight_D, ctx.eps, cos_TF, sin_TF
        )
        return *grads, None, None, None


def _check_tables(cos_TF: Tensor, sin_TF: Tensor) -> None:
    if cos_TF.dtype != torch.float32 or sin_TF.dtype != torch.float32:
        raise ContractError(f"rope: cos/sin arrived as {cos_TF.dtype}; they must stay float32 (FSDP casts arguments)")


def qk_norm_rope(
    q_THD: Tensor,
    k_THD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
) -> tuple[Tensor, Tensor]:
    """Differentiable: q and k normalised per head and rotated.

    Args:
        q_THD, k_THD: [T, heads, head_dim] and [T, kv heads, head_dim] in the operand dtype.
        norms: the weights of q_norm and k_norm, each [head_dim] in the operand dtype; None: the model has none.
        cos_TF, sin_TF: float32 [T, head_dim / 2].
    """
    _check_tables(cos_TF, sin_TF)
    if on_gpu(q_THD):
        q_weight, k_weight = norms or (None, None)
        return _QKNormRope.apply(q_THD, k_THD, q_weight, k_weight, eps, cos_TF, sin_TF)
    if norms is not None:
        q_THD, k_THD = rms_norm(q_THD, norms[0], eps), rms_norm(k_THD, norms[1], eps)
    return apply_rope(q_THD, cos_TF, sin_TF), apply_rope(k_THD, cos_TF, sin_TF)


def qk_norm_rope_write(
    qkv_THD: Tensor,
    num_heads: int,
    norms_HD: Tensor | None,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    k_pages_PSHD: Tensor,
    v_pages_PSHD: Tensor,
    slot_T: Tensor,
) -> Tensor:
    """The engine's form of `qk_norm_rope`: keys and values go to the cache, the rotated queries are returned.

    Args:
        qkv_THD: [T, heads + 2 kv heads, head_dim], queries first, then keys, then values.
        norms_HD: q_norm's and k_norm's weights repeated per head, [heads + kv heads, head_dim]; None: none.
        k_pages_PSHD, v_pages_PSHD: one layer's pages. slot_T: page * page_size + offset of each row.

    Returns:
        [T, heads, head_dim]. Same bits as `qk_norm_rope` on the parts.
    """
    num_kv_heads = k_pages_PSHD.shape[2]
    qk_THD, v_THD = qkv_THD[:, :-num_kv_heads], qkv_THD[:, -num_kv_heads:]
    if on_gpu(qkv_THD):
        q_weight, k_weight = (None, None) if norms_HD is None else (norms_HD[0], norms_HD[num_heads])
        q_THD, _ = kernels("rope").qk_norm_rope(
            qk_THD[:, :num_heads], qk_THD[:, num_heads:], q_weight, k_weight, eps, cos_TF, sin_TF,
            v_THD=v_THD, kv_write=(k_pages_PSHD, v_pages_PSHD, slot_T),
        )  # fmt: skip
        return q_THD
    if norms_HD is not None:
        qk_THD = rms_norm_inference(qk_THD, norms_HD, eps)
    qk_THD = apply_rope(qk_THD, cos_TF, sin_TF)
    k_pages_PSHD.flatten(0, 1).index_copy_(0, slot_T, qk_THD[:, num_heads:].to(k_pages_PSHD.dtype))
    v_pages_PSHD.flatten(0, 1).index_copy_(0, slot_T, v_THD.to(v_pages_PSHD.dtype))
    return qk_THD[:, :num_heads]


def rope_reference(x_THD: Tensor, inverse_frequencies: Sequence[float], scaling: float, position_T: Tensor) -> Tensor:
    """Slow: one row at a time, with Hugging Face's rotate_half written out in float32."""
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
    half = x_THD.shape[-1] // 2
    rows = []
    for x_HD, position in zip(x_THD, position_T.tolist(), strict=True):
        angle = torch.cat([frequencies, frequencies]) * float(position)
        cos, sin = angle.cos() * scaling, angle.sin() * scaling
        x = x_HD.to(torch.float32)
        rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        rows.append((x * cos + rotated * sin).to(x_HD.dtype))
    return torch.stack(rows)
